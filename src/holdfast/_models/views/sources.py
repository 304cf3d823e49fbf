"""The sources of published models: the publisher's folder, and a Holdfast index, of one that was imported or
of parts that were fetched."""

from __future__ import annotations

import math
from functools import cached_property

from holdfast._core.format.columns import ITEMSIZE
from holdfast._core.format.index import Index
from holdfast._core.format.limits import bounded_memory, check_size
from holdfast._core.format.slice import ABOUT
from holdfast._core.io.raw_read import read_box
from holdfast._core.io.slice import IndexSource, Slice
from holdfast._core.io.source import Source
from holdfast._core.layout.box import from_flat_range
from holdfast._core.layout.tensor import TensorSpec
from holdfast._core.store.base import Store
from holdfast._models.views import hub_format as hf
from holdfast._models.views.hugging_face import SMALL, HuggingFaceFolder, LoadedModel


class IndexedModel(IndexSource, LoadedModel):
    """A published model in Holdfast data files, whose bytes have digests."""

    def __init__(self, store: Store, index: Index) -> None:
        LoadedModel.__init__(self, store)
        IndexSource.__init__(self, index)

    @cached_property
    def _specs(self) -> dict[str, TensorSpec]:
        """All tensors, read at once, because callers ask for every one."""
        return {spec.name: spec for spec in self.index.select().specs()}

    def has(self, name: str) -> bool:
        return name in self._specs

    def place(self, name: str) -> hf.Place | None:
        spec = self._specs.get(name)
        # No file and position, because a tensor may have several chunks.
        return None if spec is None else hf.Place(name, "", spec.dtype, spec.shape, 0)

    def read_rows(self, name: str, rows: tuple[int, int] | None = None) -> bytes:
        spec = self._specs[name]
        first, count = rows or (0, math.prod(spec.shape[:-1]))
        width = math.prod(spec.shape[-1:])
        where = f"{name!r} of {self._store.url}"
        check_size(where, count * width * int(ITEMSIZE[spec.dtype]), SMALL)
        columns = self.index.select(self.find([name]))
        # A range of rows may consist of several boxes; scales are small, so each box is read by itself.
        parts = from_flat_range(spec.shape, first * width, (first + count) * width)
        read = (read_box(self._store, columns, part, self.where, self.fetched_for) for part in parts)
        with bounded_memory(where):
            return b"".join(part.tobytes() for part in read)


class PublishedSlice(IndexedModel, Slice):
    """A part of a published model."""

    def __init__(self, store: Store, index: Index) -> None:
        IndexedModel.__init__(self, store, index)
        self.note_origin(index)


def open_published(store: Store, index: Index | None) -> Source | None:
    """Open the published model that an index describes or, without an index, the one in a folder; None if
    there is none."""
    if index is None:
        return HuggingFaceFolder.at(store)
    model = PublishedSlice(store, index) if ABOUT in index.about else IndexedModel(store, index)
    if model.adapter is not None:
        model.identity = model.adapter.identity_with(model.identity)
    return model
