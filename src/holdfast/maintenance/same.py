"""Are these the same weights? Two places, each a checkpoint in any layout or a published model.

Where both have fingerprints nothing is read. Otherwise a tensor is read slab by slab, in the names and shapes
of the place that is no published model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from holdfast.errors import BadInput, MissingTensors, NotCommitted, ShapeMismatch
from holdfast.format import hugging_face as hf
from holdfast.format.columns import Array
from holdfast.format.fingerprint import box_sums, nothing, text_of
from holdfast.format.index import Index
from holdfast.format.names import is_weight
from holdfast.io.hugging_face import PublishedModel
from holdfast.io.indexed_model import IndexedModel
from holdfast.io.open_checkpoint import Source, open_source
from holdfast.io.raw_read import slabs
from holdfast.layout.box import Box, Dims, whole
from holdfast.layout.tensor import CODE_OF, DTYPES, TENSOR, TensorSpec, matches
from holdfast.loading.boxes import Wanted, read_boxes
from holdfast.loading.published import published_dtype
from holdfast.maintenance.differing_boxes import differing_boxes
from holdfast.maintenance.fingerprints import Fingerprint
from holdfast.maintenance.target import checkpoint_at
from holdfast.plan.merge import what
from holdfast.store.base import Store
from holdfast.store.local import open_store

Place = str | os.PathLike[str] | Mapping[str, Fingerprint]
Patterns = Sequence[str] | None
MOST_BOXES = 100
"""Boxes that are told of a tensor."""
_EXACT = [CODE_OF[name] for name in ("float64", "float32", "float16", "bfloat16")]
"""From the most exact to the least."""
_OUTPUT = "lm_head.weight"


class Unlike(msgspec.Struct, frozen=True):
    """A tensor that is not the same in both."""

    name: str
    a: str
    """Its dtype and shape there, or why it can't be had."""
    b: str
    boxes: tuple[tuple[Dims, Dims], ...] = ()
    """Offset and shape of where elements differ, the first 100; empty if that was not asked for."""


class Same(msgspec.Struct, frozen=True):
    """How the weights in two places compare."""

    a: str
    b: str
    same: bool
    """Every weight is in both, and the same."""
    equal: int
    different: tuple[Unlike, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    converted: tuple[str, ...]
    """Names whose dtypes differ; they were compared in the less exact one."""
    bytes_read: int
    """Of weights; 0 where fingerprints told everything."""


def same(
    a: Place,
    b: Place,
    *,
    where: bool = False,
    include: Patterns = None,
    exclude: Patterns = None,
    progress: Callable[[int], None] = lambda moved: None,
) -> Same:
    """Say whether two places hold the same weights, bit by bit. This process reads them alone.

    a, b: a checkpoint of Holdfast, torch DCP or megatron-core in any layout, a run folder (its newest step),
        the folder of a model that Hugging Face publishes, or what `fingerprint` has said of a live state.
        What is compared with a published model has its names, megatron-core's or transformers'.
    where: find the boxes that differ, too.
    include, exclude: shell patterns of names; `decoder.layers` means everything under it.
    progress: called with the bytes read since the last call.

    State of optimizers, objects and the padding of a vocabulary are not compared.

    Raises BadInput if a place holds no weights, or no table knows the model; NotCommitted and
    CorruptCheckpoint for what is there.
    """
    with ExitStack() as opened:
        first, second = (_open(place, opened) for place in (a, b))
        # The names of a published model are not those that a fused tensor of the other place has, and a live
        # state says what is to be read.
        swapped = (first.published is not None and second.published is None) or (
            isinstance(second, _Live) and not isinstance(first, _Live)
        )
        lead, other = (second, first) if swapped else (first, second)
        work = _Work(lead, other, where, progress)
        work.run(lambda name: _is_chosen(name, include, exclude))
    only, unlike = (work.only[0], work.only[1]), work.unlike
    if swapped:
        only = only[::-1]
        unlike = [Unlike(one.name, one.b, one.a, one.boxes) for one in unlike]
    return Same(
        first.where,
        second.where,
        not (only[0] or only[1] or unlike),
        work.equal,
        tuple(unlike),
        tuple(sorted(only[0])),
        tuple(sorted(only[1])),
        tuple(work.converted),
        work.bytes_read,
    )


def _is_chosen(name: str, include: Patterns, exclude: Patterns) -> bool:
    taken = include is None or any(matches(name, pattern) for pattern in include)
    return taken and not any(matches(name, pattern) for pattern in exclude or ())


class _Side(Protocol):
    """One of the two places."""

    used: set[str]
    """Stored tensors that something was read of."""

    @property
    def where(self) -> str: ...

    @property
    def published(self) -> PublishedModel | None: ...

    def weights(self) -> dict[str, TensorSpec]:
        """By name, as they are read."""
        ...

    def fingerprints(self) -> dict[str, str]:
        """Those that are known without reading, by name."""
        ...

    def read(self, spec: TensorSpec, box: Box, dtype: int) -> Array | None:
        """The bytes of a box; None if there is nothing to read."""
        ...


class _Live:
    """A state of which only fingerprints are known."""

    where, published = "the live state", None

    def __init__(self, known: Mapping[str, Fingerprint]) -> None:
        self.used: set[str] = set()
        self._known = known

    def weights(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(name, CODE_OF[one.dtype], one.shape) for name, one in self._known.items()}

    def fingerprints(self) -> dict[str, str]:
        return {name: one.value for name, one in self._known.items()}

    def read(self, spec: TensorSpec, box: Box, dtype: int) -> Array | None:
        return None


@dataclass
class _Folder:
    """A checkpoint, or a published model."""

    store: Store
    source: Source
    used: set[str] = field(default_factory=set)

    @property
    def where(self) -> str:
        return self.store.url

    @property
    def published(self) -> PublishedModel | None:
        return self.source if isinstance(self.source, PublishedModel) else None

    def weights(self) -> dict[str, TensorSpec]:
        is_one = hf.is_weight if self.published is not None else is_weight
        names = [name for name in self.source.names() if is_one(name)]
        columns = self.source.select(np.sort(self.source.find(names)))
        found = {
            name: TensorSpec(name, self._dtype(name, int(columns.dtype[row])), columns.shape_of(row))
            for row, name in enumerate(columns.names)
            if columns.kind[row] == TENSOR
        }
        if not found:
            raise BadInput(f"{self.store.url} holds no weights.")
        return found

    def _dtype(self, name: str, stored: int) -> int:
        """The dtype that a tensor is read in: with its scales, if it has some."""
        scaled = self.published is not None and self.published.is_scaled(name)
        return CODE_OF["float32"] if scaled else stored

    def fingerprints(self) -> dict[str, str]:
        index = self.source.index if isinstance(self.source, IndexedModel) else self.source
        if not isinstance(index, Index):
            return {}
        return {name: text_of(sums) for name, sums in index.fingerprints().items()}

    def read(self, spec: TensorSpec, box: Box, dtype: int) -> Array | None:
        (tensor,), used = read_boxes(self.store, self.source, [Wanted(spec, box, dtype)])
        self.used |= used
        found: Array = tensor.reshape(-1).view(torch.uint8).numpy()
        return found


def _open(place: Place, opened: ExitStack) -> _Side:
    if isinstance(place, Mapping):
        return _Live(place)
    try:
        store = checkpoint_at(place)  # of a run folder the newest step
    except NotCommitted:
        store = open_store(place)
    return _Folder(store, opened.enter_context(open_source(store)))


def _parts(side: _Side, spec: TensorSpec) -> set[str]:
    """The published tensors that a tensor is made of, as far as its shape fits them."""
    if side.published is None:
        return set()
    try:
        found = side.published.view.segments(spec.name, spec.shape, whole(spec.shape))
        return {segment.name for segment in found}
    except (BadInput, ShapeMismatch):
        return set()


class _Pair(NamedTuple):
    """A tensor of both places."""

    specs: tuple[TensorSpec, TensorSpec]
    """As each is read."""
    dtype: int
    """What elements are compared in."""
    region: Box
    """What is compared: all but padding."""
    prints: tuple[str | None, str | None]
    """Fingerprints of just that, as far as they are known."""


class _Work:
    """Compares under the names of the side that leads."""

    def __init__(self, lead: _Side, other: _Side, where: bool, progress: Callable[[int], None]) -> None:
        self._lead, self._other = lead, other
        self._where, self._progress = where, progress
        self.equal = self.bytes_read = 0
        self.converted: list[str] = []
        self.unlike: list[Unlike] = []
        self.only: tuple[list[str], list[str]] = ([], [])

    def run(self, keep: Callable[[str], bool]) -> None:
        mine = {name: spec for name, spec in self._lead.weights().items() if keep(name)}
        theirs = {name: spec for name, spec in self._other.weights().items() if keep(name)}
        prints = self._lead.fingerprints(), self._other.fingerprints()
        for name, spec in mine.items():
            try:
                pair = self._pair(spec, theirs.get(name), (prints[0].get(name), prints[1].get(name)))
                if pair is not None:
                    self._compare(pair)
            except (MissingTensors, ShapeMismatch) as error:  # of a published model
                self.unlike.append(Unlike(name, what(TENSOR, spec.dtype, spec.shape), error.message))
                self._other.used |= _parts(self._other, spec)  # told of already
        # Of a published model: what no tensor of the other side is made of.
        left = [name for name in theirs if name not in mine and name not in self._other.used]
        folder = self._other.published
        if _OUTPUT in left and folder is not None and folder.config and folder.view.is_tied:
            left.remove(_OUTPUT)
        self.only[1].extend(left)

    def _pair(
        self, spec: TensorSpec, theirs: TensorSpec | None, prints: tuple[str | None, str | None]
    ) -> _Pair | None:
        """How a tensor is compared; None once there is nothing more to it."""
        folder, region = self._other.published, whole(spec.shape)
        if theirs is None:
            if folder is None or not folder.config or not folder.view.knows(spec.name):
                self.only[0].append(spec.name)
                return None
            stored = published_dtype(folder, spec)
            # Padding of a live state can't be left out of its fingerprint; zeros add nothing to it.
            if folder.view.is_padded(spec.name) and not isinstance(self._lead, _Live):
                rows = max(part.box.stop[0] for part in folder.view.segments(spec.name, spec.shape, region))
                region = Box(region.offset, (rows, *region.shape[1:]))
        else:
            stored = theirs.dtype
        dtype = _less_exact(spec.dtype, stored)
        if dtype is not None and isinstance(self._lead, _Live):
            dtype = spec.dtype
        if dtype is None or (theirs is not None and theirs.shape != spec.shape):
            shape = spec.shape if theirs is None else theirs.shape
            self.unlike.append(
                Unlike(spec.name, what(TENSOR, spec.dtype, spec.shape), what(TENSOR, stored, shape))
            )
            return None
        if dtype != spec.dtype or dtype != stored:
            self.converted.append(spec.name)
        specs = (spec, theirs or spec._replace(dtype=dtype))
        is_whole = region == whole(spec.shape)
        known = [
            one if is_whole and each.dtype == dtype else None for one, each in zip(prints, specs, strict=True)
        ]
        return _Pair(specs, dtype, region, (known[0], known[1]))

    def _compare(self, pair: _Pair) -> None:
        mine, theirs = pair.prints
        differ, boxes = False, list[Box]()
        if mine is not None and theirs is not None:
            differ = mine != theirs
        elif mine is not None:
            differ = self._sums(self._other, pair.specs[1], pair) != mine
        elif theirs is not None:
            differ = self._sums(self._lead, pair.specs[0], pair) != theirs
        if pair.prints == (None, None) or (differ and self._where):
            differ, boxes = self._elements(pair)
        if not differ:
            self.equal += 1
            return
        said = [what(TENSOR, spec.dtype, spec.shape) for spec in pair.specs]
        told = tuple((box.offset, box.shape) for box in boxes[:MOST_BOXES])
        self.unlike.append(Unlike(pair.specs[0].name, said[0], said[1], told))

    def _sums(self, side: _Side, spec: TensorSpec, pair: _Pair) -> str:
        """The fingerprint of a tensor of one side, which is read."""
        sums, itemsize = nothing(), DTYPES[pair.dtype].size
        for part in slabs(pair.region, itemsize):
            data = self._read(side, spec, part, pair.dtype)
            if data is None:
                raise BadInput(
                    f"{pair.specs[0].name!r} is {DTYPES[spec.dtype].name} in the live state, and "
                    f"{DTYPES[pair.dtype].name} in {self._lead.where}: fingerprints are of one dtype.",
                    hint="Save the state, and compare the checkpoint.",
                )
            sums += box_sums(data, itemsize, part)
        return text_of(sums)

    def _elements(self, pair: _Pair) -> tuple[bool, list[Box]]:
        """Do elements differ, and where?"""
        found: list[Box] = []
        for part in slabs(pair.region, DTYPES[pair.dtype].size):
            x = self._read(self._lead, pair.specs[0], part, pair.dtype)
            y = self._read(self._other, pair.specs[1], part, pair.dtype)
            if x is None or y is None:  # a live state: that it differs is all that can be told
                return True, []
            if not np.array_equal(x, y):
                if not self._where:
                    return True, []
                found += differing_boxes(x, y, part)
        return bool(found), found

    def _read(self, side: _Side, spec: TensorSpec, box: Box, dtype: int) -> Array | None:
        data = side.read(spec, box, dtype)
        self.bytes_read += 0 if data is None else len(data)
        self._progress(0 if data is None else len(data))
        return data


def _less_exact(one: int, other: int) -> int | None:
    """What elements of two dtypes are compared in; None if that means nothing."""
    if one == other:
        return one
    return max(one, other, key=_EXACT.index) if {one, other} <= set(_EXACT) else None
