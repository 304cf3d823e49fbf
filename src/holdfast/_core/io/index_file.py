"""Open a Holdfast index: the committed one of a folder, or the embedded one of a data file.

Torch DCP or megatron-core, which do not know the index, leave it in place when they save into the folder of a
Holdfast checkpoint; it then describes older data. So an index says which `.metadata` of another program lay
beside it when it was committed, and readers raise an error if there is another one. Folders in object stores
are not looked at: each look would be a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress

from holdfast._core.format.digest import digest, hex_digest
from holdfast._core.format.index import Index
from holdfast._core.format.names import INDEX, MARKER_HEAD, METADATA, is_marker
from holdfast._core.store.absence import nothing_there
from holdfast._core.store.base import NotFound, Reader, Store, capabilities
from holdfast.errors import BadInput, StorageError

_KEY = "metadata_beside"
_TAIL = 1 << 16
"""Bytes at its end that identify a `.metadata`: torch writes a random name of each save there."""
_MADE_BY_TORCH = b"torch.distributed.checkpoint.metadata"
"""The module whose class each `.metadata` names first."""


@contextmanager
def open_index(store: Store) -> Iterator[Index]:
    """Open the committed index of a folder, and close it afterwards. NotCommitted if there is none, BadInput
    if another program has saved into the folder since."""
    try:
        reader = store.open(INDEX)
    except NotFound:
        raise nothing_there(store) from None
    with closing(reader):
        index = Index(reader.read, reader.size, f"{store.url}/{INDEX}")
        check_other_metadata(store, index.about)
        yield index


def embedded_index(reader: Reader, start: int, stop: int, where: str) -> Index:
    """Read the embedded index of a data file, at bytes [start, stop), as a whole: callers use all of it."""
    return Index(
        lambda offset, length: reader.read(start + offset, length),
        stop - start,
        f"the embedded index of {where}",
        whole=True,
    )


def note_other_metadata(store: Store, is_new: bool) -> dict[str, str]:
    """Return the entry of an index that says which `.metadata` is beside it. is_new: the save has made the
    folder, so there is none."""
    return {_KEY: "" if is_new else _identity(store)} if capabilities(store).folders else {}


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
    with suppress(StorageError), closing(store.open(METADATA)) as reader:
        head = reader.read(0, min(MARKER_HEAD, reader.size))
        if not is_marker(head) and _MADE_BY_TORCH in head:
            start = max(reader.size - _TAIL, 0)
            return f"{reader.size}-{hex_digest(digest(reader.read(start, reader.size - start)))}"
    return ""
