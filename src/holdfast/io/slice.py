"""What was fetched of a checkpoint or a published model, as something to load from.

It has all names of its source, and chunks of what was fetched only: a load that asks for more is refused
before anything is read (`file_reader.plan_read`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.format.columns import Array, Columns
from holdfast.format.index import Index
from holdfast.format.slice import PUBLISHED, read_origin
from holdfast.io.indexed_model import IndexedModel
from holdfast.store.base import Store


class Slice:
    """A part of a Holdfast checkpoint."""

    object_prefix = b""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.where = index.where
        self.about: dict[str, Any] = index.about
        self.origin = read_origin(index.about, index.where)
        # Hosts have different slices of one version, from which their ranks load together.
        self.identity = self.origin.identity
        self.fetched_for = self.origin.fetched_for
        self.tensors = index.tensors

    @property
    def bytes_read(self) -> int:
        return self.index.bytes_read

    def names(self) -> list[str]:
        return self.index.names()

    def find(self, wanted: Sequence[str]) -> Array:
        return self.index.find(wanted)

    def find_one(self, name: str) -> int:
        return self.index.find_one(name)

    def select(self, rows: Array | None = None) -> Columns:
        return self.index.select(rows)


class PublishedSlice(IndexedModel, Slice):
    """A part of a published model."""

    def __init__(self, store: Store, index: Index) -> None:
        IndexedModel.__init__(self, store, index)
        Slice.__init__(self, index)


def slice_of(store: Store, index: Index) -> Slice:
    """The slice that an index describes."""
    if read_origin(index.about, index.where).kind == PUBLISHED:
        return PublishedSlice(store, index)
    return Slice(index)
