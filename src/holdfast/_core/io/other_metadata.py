"""The `.metadata` of another program (torch DCP, megatron-core) beside the index of a checkpoint.

A program that saves into the folder of a Holdfast checkpoint, and does not know Holdfast, leaves the index in
place, which then describes older data. So an index says which `.metadata` lay beside it when it was
committed, and readers raise an error if another one does. Folders in object stores are not looked at: each
look would be a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

from holdfast._core.format.digest import digest, hex_digest
from holdfast._core.format.names import INDEX, MARKER_HEAD, METADATA, is_marker
from holdfast._core.store.base import Store, capabilities
from holdfast.errors import BadInput, StorageError

_KEY = "metadata_beside"
_TAIL = 1 << 16
"""Bytes at its end that identify a `.metadata`: torch writes a random name of each save there."""

_MADE_BY_TORCH = b"torch.distributed.checkpoint.metadata"
"""The module whose class each `.metadata` names first."""


def note_other_metadata(store: Store) -> dict[str, str]:
    """Return the entry of an index that says which `.metadata` is beside it."""
    return {_KEY: _identity(store)} if capabilities(store).folders else {}


def check_other_metadata(store: Store, about: Mapping[str, object]) -> None:
    """Raise BadInput if another program has saved into the folder since its index was committed."""
    known = about.get(_KEY)
    if not isinstance(known, str) or not capabilities(store).folders:
        return
    if _identity(store) not in ("", known):
        raise BadInput(
            f"{store.url} holds two checkpoints: {INDEX} is Holdfast's, and torch DCP or another program has "
            f"written {METADATA} since.",
            hint=f"Move {INDEX} elsewhere to load what {METADATA} describes, or {METADATA} to load the older "
            "checkpoint.",
        )


def _identity(store: Store) -> str:
    """Return what identifies the `.metadata` of another program in a folder; "" if none is known to be
    there."""
    try:
        reader = store.open(METADATA)
    except StorageError:
        return ""
    with closing(reader):
        head = reader.read(0, min(MARKER_HEAD, reader.size))
        if is_marker(head) or _MADE_BY_TORCH not in head:
            return ""
        start = max(reader.size - _TAIL, 0)
        return f"{reader.size}-{hex_digest(digest(reader.read(start, reader.size - start)))}"
