"""A part of a checkpoint as a source of loads: a slice that was fetched, from a checkpoint or a published
model, or a host's local copy of a step.

It has only some chunks of its tensors. A load that asks for more is refused before anything is read
(`file_reader.plan_read`).
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast._core.base.values import Message
from holdfast._core.format.columns import Array, Columns
from holdfast._core.format.index import Index
from holdfast._core.format.local_copy import LocalCopy
from holdfast._core.format.slice import read_origin
from holdfast._core.layout.ranks import ranks_of


class IndexSource:
    """A Holdfast index as a source of loads."""

    object_prefix = b""
    fetched_for = ""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.where, self.identity, self.tensors = index.where, index.identity, index.tensors
        self.about: Message = index.about

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


class Slice(IndexSource):
    """A part of a Holdfast checkpoint."""

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.note_origin(index)

    def note_origin(self, index: Index) -> None:
        self.origin = read_origin(index.about, index.where)
        # Hosts have different slices of one version; with a common identity their ranks can load together.
        self.identity = self.origin.identity
        self.fetched_for = self.origin.fetched_for


class CopyOfStep(IndexSource):
    """A host's local copy of a step. All hosts' copies have the same identity, so ranks can load together."""

    def __init__(self, index: Index, copy: LocalCopy) -> None:
        super().__init__(index)
        self.identity, self.fetched_for = copy.save, copy.held_for
        self.about = {**index.about, "ranks": len(ranks_of(copy.ranks))}  # not only those of this host
