"""Are these the same weights? Two places, each a checkpoint in any layout or a published model.

Where both have fingerprints nothing is read. Otherwise a tensor is read slab by slab, in the names and shapes
of the place that is no published model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice
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
from holdfast.io.hugging_face import HuggingFaceFolder, PublishedModel
from holdfast.io.indexed_model import IndexedModel
from holdfast.io.open_checkpoint import Source, open_source
from holdfast.io.raw_read import slabs
from holdfast.io.slice import Slice
from holdfast.layout.box import Box, whole
from holdfast.layout.tensor import CODE_OF, DTYPES, TENSOR, Dims, TensorSpec, matches
from holdfast.loading.boxes import Wanted, read_boxes
from holdfast.loading.published import published_regions
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
_OUTPUT, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


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

    State of optimizers, objects and the padding of a vocabulary beside a published model are not compared.

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
        # Scales of a published model are compared, too: elements mean nothing without them.
        names = [name for name in self.source.names() if is_weight(name) and not hf.is_constant(name)]
        columns = self.source.select(np.sort(self.source.find(names)))
        found = {
            name: TensorSpec(name, int(columns.dtype[row]), columns.shape_of(row))
            for row, name in enumerate(columns.names)
            if columns.kind[row] == TENSOR
        }
        if not found:
            raise BadInput(f"{self.store.url} holds no weights.")
        return found

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
        if not all(isinstance(one, Fingerprint) for one in place.values()):
            raise BadInput("A state is compared by what fingerprint(state) says of it.")
        return _Live(place)
    store = open_store(place)
    if not HuggingFaceFolder.is_one(store):
        with suppress(NotCommitted):
            store = checkpoint_at(place)  # of a run folder the newest step
    source = opened.enter_context(open_source(store))
    if isinstance(source, Slice):
        raise BadInput(
            f"{store.url} is what was fetched for {source.fetched_for}, a part of the weights.",
            hint="Compare the folder that it was fetched from.",
        )
    return _Folder(store, source)


class _Pair(NamedTuple):
    """A tensor of both places."""

    specs: tuple[TensorSpec, TensorSpec]
    """As each is read."""
    regions: tuple[tuple[int, Box], ...]
    """What is compared, and in which dtype: all but padding."""
    prints: tuple[str | None, str | None]
    """Fingerprints of just that, as far as they are known."""


class _Work:
    """Compares under the names of the side that leads."""

    def __init__(self, lead: _Side, other: _Side, where: bool, progress: Callable[[int], None]) -> None:
        self._lead, self._other = lead, other
        self._where, self._progress = where, progress
        self._view = other.published.view_if_known if other.published is not None else None
        self.equal = self.bytes_read = 0
        self.converted: list[str] = []
        self.unlike: list[Unlike] = []
        self.only: tuple[list[str], list[str]] = ([], [])

    def run(self, keep: Callable[[str], bool]) -> None:
        mine, theirs = self._lead.weights(), self._other.weights()
        prints = self._lead.fingerprints(), self._other.fingerprints()
        compared = 0
        for name, spec in mine.items():
            if not keep(name):
                self._other.used |= self._parts(spec)  # which are not asked for, either
                continue
            compared += 1
            if self._goes_with_its_tensor(name, mine, theirs):
                continue
            try:
                pair = self._pair(spec, theirs.get(name), (prints[0].get(name), prints[1].get(name)))
                if pair is not None:
                    self._compare(pair)
            except (BadInput, MissingTensors, ShapeMismatch) as error:  # of a published model
                if isinstance(self._lead, _Live) and isinstance(error, BadInput):
                    raise
                self.unlike.append(Unlike(name, what(TENSOR, spec.dtype, spec.shape), error.message))
                self._other.used |= self._parts(spec)  # told of already
        left = [name for name in theirs if name not in mine and keep(name)]
        if not compared and not left:
            raise BadInput("Neither place has a weight that include= and exclude= leave.")
        # Of a published model: what no tensor of the other side is made of.
        left = [name for name in left if name not in self._other.used and not self._is_scale(name)]
        if _OUTPUT in left and self._view is not None and self._view.is_tied:
            left.remove(_OUTPUT)
            self._check_tie(theirs)
        self.only[1].extend(left)

    @staticmethod
    def _goes_with_its_tensor(
        name: str, mine: Mapping[str, TensorSpec], theirs: Mapping[str, TensorSpec]
    ) -> bool:
        """Is it the scales of a tensor that the other place has without some?"""
        base = name.removesuffix(hf.SCALES)
        return base != name and name not in theirs and base in mine and base in theirs

    def _is_scale(self, name: str) -> bool:
        """Is it the scales of something that was compared?"""
        bases = (name.removesuffix(hf.SCALES), name.removesuffix("_scales") + "_blocks")
        return any(base != name and base in self._other.used for base in bases)

    def _check_tie(self, theirs: Mapping[str, TensorSpec]) -> None:
        """The published output of a model whose output is its embedding must be that."""
        output, embedding = theirs[_OUTPUT], theirs.get(_EMBEDDING)
        if embedding is not None and embedding[1:] == output[1:]:
            pair = _Pair((embedding, output), ((output.dtype, whole(output.shape)),), (None, None))
            if not self._elements(pair, (self._other, self._other))[0]:
                return
        said = what(TENSOR, output.dtype, output.shape)
        self.unlike.append(Unlike(_OUTPUT, "the embedding (tie_word_embeddings)", said))

    def _parts(self, spec: TensorSpec) -> set[str]:
        """The published tensors that a tensor is made of, as far as its shape fits them."""
        if self._view is None or not self._view.knows(spec.name):
            return set()
        try:
            found = self._view.segments(spec.name, spec.shape, whole(spec.shape))
            return {segment.name for segment in found}
        except (BadInput, ShapeMismatch):
            return set()

    def _pair(
        self, spec: TensorSpec, theirs: TensorSpec | None, prints: tuple[str | None, str | None]
    ) -> _Pair | None:
        """How a tensor is compared; None once there is nothing more to it."""
        folder = self._other.published
        if theirs is None and (folder is None or self._view is None or not self._view.knows(spec.name)):
            self.only[0].append(spec.name)
            return None
        if theirs is not None:
            mine, other = self._with_scales(spec, theirs)
            stored = [(other.dtype, whole(other.shape))]
        else:
            assert folder is not None
            mine, other, stored = spec, spec, published_regions(folder, spec)
        regions = [(_less_exact(mine.dtype, dtype), box) for dtype, box in stored]
        if mine.shape != other.shape or any(dtype is None for dtype, _ in regions):
            said = [what(TENSOR, one, two.shape) for one, two in ((mine.dtype, mine), (stored[0][0], other))]
            self.unlike.append(Unlike(spec.name, said[0], said[1]))
            return None
        if any(
            dtype != mine.dtype or dtype != had for (dtype, _), (had, _) in zip(regions, stored, strict=True)
        ):
            self.converted.append(spec.name)
        if isinstance(self._lead, _Live):
            if any(dtype != mine.dtype for dtype, _ in regions):
                raise _of_one_dtype(spec.name, mine.dtype, stored[0][0])
            # Padding of a live state can't be left out of its fingerprint; zeros add nothing to it.
            regions = [(mine.dtype, whole(mine.shape))]
        if theirs is None:
            other = spec._replace(dtype=regions[0][0] or spec.dtype)
        known = [
            one if each == told and regions == [(each.dtype, whole(each.shape))] else None
            for one, each, told in zip(prints, (mine, other), (spec, theirs), strict=True)
        ]
        checked = tuple((dtype, box) for dtype, box in regions if dtype is not None)
        return _Pair((mine, other), checked, (known[0], known[1]))

    def _with_scales(self, spec: TensorSpec, theirs: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
        """As they are read: in 8 bits if both are, else multiplied by scales where there are some."""
        if spec.dtype == theirs.dtype:
            return spec, theirs
        found = [
            one._replace(dtype=CODE_OF["float32"])
            if side.published is not None and side.published.is_scaled(one.name)
            else one
            for side, one in ((self._lead, spec), (self._other, theirs))
        ]
        return found[0], found[1]

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
            differ, boxes = self._elements(pair, (self._lead, self._other))
        if not differ:
            self.equal += 1
            return
        said = [what(TENSOR, spec.dtype, spec.shape) for spec in pair.specs]
        told = tuple((box.offset, box.shape) for box in boxes)
        self.unlike.append(Unlike(pair.specs[0].name, said[0], said[1], told))

    def _sums(self, side: _Side, spec: TensorSpec, pair: _Pair) -> str:
        """The fingerprint of a tensor of one side, which is read."""
        sums = nothing()
        ((dtype, region),) = pair.regions  # all of it, in one dtype
        for part in slabs(region, DTYPES[dtype].size):
            data = self._read(side, spec, part, dtype)
            if data is None:
                raise _of_one_dtype(spec.name, dtype, spec.dtype)
            sums += box_sums(data, DTYPES[dtype].size, part)
        return text_of(sums)

    def _elements(self, pair: _Pair, sides: tuple[_Side, _Side]) -> tuple[bool, list[Box]]:
        """Do elements differ, and where, if that was asked for?"""
        found: list[Box] = []
        for dtype, region in pair.regions:
            for part in slabs(region, DTYPES[dtype].size):
                x = self._read(sides[0], pair.specs[0], part, dtype)
                y = self._read(sides[1], pair.specs[1], part, dtype)
                if x is None or y is None:  # a live state: that it differs is all that can be told
                    return True, []
                if np.array_equal(x, y):
                    continue
                found += islice(differing_boxes(x, y, part), MOST_BOXES - len(found))
                if not self._where or len(found) >= MOST_BOXES:
                    return True, found if self._where else []
        return bool(found), found

    def _read(self, side: _Side, spec: TensorSpec, box: Box, dtype: int) -> Array | None:
        data = side.read(spec, box, dtype)
        self.bytes_read += 0 if data is None else len(data)
        self._progress(0 if data is None else len(data))
        return data


def _of_one_dtype(name: str, live: int, other: int) -> BadInput:
    return BadInput(
        f"{name!r} is {DTYPES[live].name} in the live state, and {DTYPES[other].name} in the other place: "
        f"fingerprints are of one dtype.",
        hint="Save the state, and compare the checkpoint.",
    )


def _less_exact(one: int, other: int) -> int | None:
    """What elements of two dtypes are compared in; None if that means nothing."""
    if one == other:
        return one
    return max(one, other, key=_EXACT.index) if {one, other} <= set(_EXACT) else None
