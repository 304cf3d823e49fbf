"""Files that are read whole."""

from __future__ import annotations

from contextlib import closing

from holdfast.format.limits import OBJECT_BYTES, bounded_memory, check_size
from holdfast.store.base import NotFound, Store


def read_file(store: Store, name: str, limit: int = OBJECT_BYTES) -> bytes | None:
    """The content of a file that is read whole, or None if it is not there. One that is longer than `limit`
    is damage."""
    try:
        reader = store.open(name)
    except NotFound:
        return None
    where = f"{store.url}/{name}"
    with closing(reader):
        # Before room is made for it: a sparse file of any size costs nothing to make.
        check_size(where, reader.size, limit)
        with bounded_memory(where):
            return reader.read(0, reader.size)
