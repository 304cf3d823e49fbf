"""A slice, fetched from a checkpoint or a published model, as a source of loads.

It has all names of its source, but only the chunks that were fetched. A load that asks for more is refused
before anything is read (`file_reader.plan_read`).
"""

from __future__ import annotations

from holdfast.format.index import Index
from holdfast.format.slice import PUBLISHED, read_origin
from holdfast.io.indexed_model import IndexedModel, IndexSource
from holdfast.store.base import Store


class Slice(IndexSource):
    """A part of a Holdfast checkpoint."""

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self._note_origin(index)

    def _note_origin(self, index: Index) -> None:
        self.origin = read_origin(index.about, index.where)
        # Hosts have different slices of one version; with a common identity their ranks can load together.
        self.identity = self.origin.identity
        self.fetched_for = self.origin.fetched_for


class PublishedSlice(IndexedModel, Slice):
    """A part of a published model."""

    def __init__(self, store: Store, index: Index) -> None:
        IndexedModel.__init__(self, store, index)
        self._note_origin(index)


def slice_of(store: Store, index: Index) -> Slice:
    """Return the slice that an index describes."""
    if read_origin(index.about, index.where).kind == PUBLISHED:
        return PublishedSlice(store, index)
    return Slice(index)
