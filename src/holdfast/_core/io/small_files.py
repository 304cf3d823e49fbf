"""Read small files whole."""

from __future__ import annotations

from contextlib import closing

from holdfast._core.format.limits import OBJECT_BYTES, bounded_memory, check_size
from holdfast._core.store.base import NotFound, Store


def read_file(store: Store, name: str, limit: int = OBJECT_BYTES) -> bytes | None:
    """Return the content of a file, or None if it does not exist. CorruptCheckpoint if it is longer than
    `limit`."""
    try:
        reader = store.open(name)
    except NotFound:
        return None
    where = f"{store.url}/{name}"
    with closing(reader):
        # Before memory is allocated, because a sparse file of any size costs nothing to create.
        check_size(where, reader.size, limit)
        with bounded_memory(where):
            return reader.read(0, reader.size)
