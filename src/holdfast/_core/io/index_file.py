"""Open a Holdfast index: the committed one of a folder, or the embedded one of a data file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from holdfast._core.format.index import Index
from holdfast._core.format.names import INDEX
from holdfast._core.io.other_metadata import check_other_metadata
from holdfast._core.store.absence import nothing_there
from holdfast._core.store.base import NotFound, Reader, Store


@contextmanager
def open_index(store: Store) -> Iterator[Index]:
    """Open the committed index of a folder, and close it afterwards. NotCommitted if there is none, BadInput
    if another program has saved into the folder since (`other_metadata`)."""
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
