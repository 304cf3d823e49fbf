"""The steps that a run has left behind by going back to an older one. No torch, no NumPy.

A run that was restored from step 1500 and saves step 1600 leaves step 2000 behind, if it exists. Step 2000
stays until `keep=` removes it, but no longer counts as the newest step. A file in the run folder lists such
steps, each by its folder and the version of its index (or other marker file), so that a step that is saved
again is no longer listed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import closing, suppress

import msgspec

from holdfast._core.base.values import NO_JSON
from holdfast._core.format.names import LEFT
from holdfast._core.ready import ready
from holdfast._core.store.base import VERSION_BYTES, NotFound, Store, replace_file, version_of
from holdfast.errors import StorageError

log = logging.getLogger("holdfast")
_MOST = 1 << 24
"""Maximum bytes to read of the file, which may be damaged; a step takes about 60."""


class _Left(msgspec.Struct):
    """The content of the file."""

    left: dict[str, str]
    """Map of folders to versions, in hexadecimal digits."""
    version: str
    """Random, new at each write: the last bytes of the file identify its version."""


def left_behind(store: Store) -> dict[str, str]:
    """Return the folders of the steps that the run has left behind, with their versions; none if the file is
    damaged."""
    try:
        reader = store.open(LEFT)
    except NotFound:
        return {}
    with closing(reader):
        data = reader.read(0, _MOST)
    try:
        return msgspec.json.decode(data, type=ready(_Left)).left
    except NO_JSON as error:
        log.warning("%s/%s can't be read, and counts as empty: %s.", store.url, LEFT, error)
        return {}


def is_left(store: Store, left: Mapping[str, str], folder: str, mark: str) -> bool:
    """Return whether a step is left behind, as `left` lists it. mark: the file that makes it a checkpoint."""
    return bool(tail := left.get(folder)) and tail == version(store, folder, mark)


def version(store: Store, folder: str, mark: str) -> str:
    """Return the version of a step, which differs for each save into the same folder; "" if it can't be read,
    for example if it is a link that leaves the run."""
    with suppress(StorageError):
        return (version_of(store, f"{folder}/{mark}") or b"").hex()
    return ""


def write_left(store: Store, left: Mapping[str, str]) -> None:
    """Replace the list."""
    # `version` is the last field, so it is at the end of the file, where `publish` compares versions.
    content = _Left(dict(left), os.urandom(VERSION_BYTES).hex())
    replace_file(store, LEFT, msgspec.json.encode(content))
