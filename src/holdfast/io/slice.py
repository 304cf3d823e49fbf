"""What was fetched of a checkpoint or a published model, as something to load from.

It has all names of its source, and chunks of what was fetched only: a load that asks for more is refused
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
        # Hosts have different slices of one version, from which their ranks load together.
        self.identity = self.origin.identity
        self.fetched_for = self.origin.fetched_for


class PublishedSlice(IndexedModel, Slice):
    """A part of a published model."""

    def __init__(self, store: Store, index: Index) -> None:
        IndexedModel.__init__(self, store, index)
        self._note_origin(index)


def slice_of(store: Store, index: Index) -> Slice:
    """The slice that an index describes."""
    if read_origin(index.about, index.where).kind == PUBLISHED:
        return PublishedSlice(store, index)
    return Slice(index)
