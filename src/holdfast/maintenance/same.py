"""Compare the weights of two places, each a checkpoint in any layout, a published model, or a live state.

If both places have fingerprints of a tensor, nothing is read. Otherwise it is read slab by slab, with the
name and shape that it has in the place that is no published model.
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
from holdfast.io.open_checkpoint import open_source
from holdfast.io.raw_read import slabs
from holdfast.io.slice import Slice
from holdfast.io.source import Source
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
"""Boxes that are reported per tensor, at most."""
_EXACT = [CODE_OF[name] for name in ("float64", "float32", "float16", "bfloat16")]
"""Floating-point dtypes, the most exact first."""
_OUTPUT, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Unlike(msgspec.Struct, frozen=True):
    """A tensor that differs between the two places."""

    name: str
    a: str
    """Its dtype and shape in that place, or why it can't be read."""
    b: str
    boxes: tuple[tuple[Dims, Dims], ...] = ()
    """Offset and shape of the first 100 boxes that differ; empty without `where=True`."""


class Same(msgspec.Struct, frozen=True):
    """The result of `same`."""

    a: str
    b: str
    same: bool
    """Whether every weight is in both places, and equal."""
    equal: int
    different: tuple[Unlike, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    converted: tuple[str, ...]
    """Names whose dtypes differ; they were compared in the less exact dtype."""
    bytes_read: int
    """Bytes of weights that were read; 0 if fingerprints were enough."""


def same(
    a: Place,
    b: Place,
    *,
    where: bool = False,
    include: Patterns = None,
    exclude: Patterns = None,
    progress: Callable[[int], None] = lambda moved: None,
) -> Same:
    """Compare the weights in two places bit by bit. This process alone reads them.

    a, b: a checkpoint of Holdfast, torch DCP or megatron-core in any layout, a run folder (its newest step),
        the folder of a model that Hugging Face publishes, or the result of `fingerprint` on a live state.
        If one is a published model, the other must have its names, megatron-core's or transformers'.
    where: also find the boxes that differ.
    include, exclude: shell patterns of names; `decoder.layers` means everything under it.
    progress: called with the bytes read since the last call.

    Optimizer state and objects are not compared, nor, beside a published model, the padding of a vocabulary.

    Raises BadInput if a place has no weights, or no table knows the model; NotCommitted and CorruptCheckpoint
    if a place can't be read.
    """
    with ExitStack() as opened:
        first, second = (_open(place, opened) for place in (a, b))
        # A published model does not lead another kind of place, whose fused tensors have none of its names. A
        # live state leads, because it determines what is read.
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
    """Names of stored tensors of which something was read."""

    @property
    def where(self) -> str: ...

    @property
    def published(self) -> PublishedModel | None: ...

    def weights(self) -> dict[str, TensorSpec]:
        """Return the specs of all weights, by name."""
        ...

    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprints that are known without reading, by name."""
        ...

    def read(self, spec: TensorSpec, box: Box, dtype: int) -> Array | None:
        """Return the bytes of a box; None if the place has only fingerprints."""
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
        # With the scales of a published model, because elements mean nothing without them.
        names = [name for name in self.source.names() if is_weight(name) and not hf.is_constant(name)]
        columns = self.source.select(np.sort(self.source.find(names)))
        specs = {
            name: TensorSpec(name, int(columns.dtype[row]), columns.shape_of(row))
            for row, name in enumerate(columns.names)
            if columns.kind[row] == TENSOR
        }
        if not specs:
            raise BadInput(f"{self.store.url} holds no weights.")
        return specs

    def fingerprints(self) -> dict[str, str]:
        index = self.source.index if isinstance(self.source, IndexedModel) else self.source
        if not isinstance(index, Index):
            return {}
        return {name: text_of(sums) for name, sums in index.fingerprints().items()}

    def read(self, spec: TensorSpec, box: Box, dtype: int) -> Array | None:
        (tensor,), used = read_boxes(self.store, self.source, [Wanted(spec, box, dtype)])
        self.used |= used
        data: Array = tensor.reshape(-1).view(torch.uint8).numpy()
        return data


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
    """A tensor that is compared."""

    specs: tuple[TensorSpec, TensorSpec]
    """How it is read from each place."""
    regions: tuple[tuple[int, Box], ...]
    """The boxes that are compared, all but padding, each with the dtype of the comparison."""
    prints: tuple[str | None, str | None]
    """Fingerprints of exactly these regions, where they are known."""


class _Work:
    """Compares the two sides, under the names of the side that leads."""

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
                self._other.used |= self._parts(spec)  # these are excluded too
                continue
            compared += 1
            if self._goes_with_its_tensor(name, mine, theirs):
                continue
            try:
                pair = self._pair(spec, theirs.get(name), (prints[0].get(name), prints[1].get(name)))
                if pair is not None:
                    self._compare(pair)
            except (BadInput, MissingTensors, ShapeMismatch) as error:  # from a published model
                if isinstance(self._lead, _Live) and isinstance(error, BadInput):
                    raise
                self.unlike.append(Unlike(name, what(TENSOR, spec.dtype, spec.shape), error.message))
                self._other.used |= self._parts(spec)  # reported already
        left = [name for name in theirs if name not in mine and keep(name)]
        if not compared and not left:
            raise BadInput("Neither place has a weight that include= and exclude= leave.")
        # Of a published model only tensors of which no tensor of the other side is made.
        left = [name for name in left if name not in self._other.used and not self._is_scale(name)]
        if _OUTPUT in left and self._view is not None and self._view.is_tied:
            left.remove(_OUTPUT)
            self._check_tie(theirs)
        self.only[1].extend(left)

    @staticmethod
    def _goes_with_its_tensor(
        name: str, mine: Mapping[str, TensorSpec], theirs: Mapping[str, TensorSpec]
    ) -> bool:
        """Return whether these are the scales of a tensor that the other place has without scales."""
        base = name.removesuffix(hf.SCALES)
        return base != name and name not in theirs and base in mine and base in theirs

    def _is_scale(self, name: str) -> bool:
        """Return whether these are the scales of a tensor that was compared."""
        bases = (name.removesuffix(hf.SCALES), name.removesuffix("_scales") + "_blocks")
        return any(base != name and base in self._other.used for base in bases)

    def _check_tie(self, theirs: Mapping[str, TensorSpec]) -> None:
        """Check that the published output weight equals the embedding, in a model that ties them."""
        output, embedding = theirs[_OUTPUT], theirs.get(_EMBEDDING)
        if embedding is not None and embedding[1:] == output[1:]:
            pair = _Pair((embedding, output), ((output.dtype, whole(output.shape)),), (None, None))
            if not self._elements(pair, (self._other, self._other))[0]:
                return
        text = what(TENSOR, output.dtype, output.shape)
        self.unlike.append(Unlike(_OUTPUT, "the embedding (tie_word_embeddings)", text))

    def _parts(self, spec: TensorSpec) -> set[str]:
        """Return the published tensors of which a tensor is made; none if its shape does not fit."""
        if self._view is None or not self._view.knows(spec.name):
            return set()
        try:
            segments = self._view.segments(spec.name, spec.shape, whole(spec.shape))
            return {segment.name for segment in segments}
        except (BadInput, ShapeMismatch):
            return set()

    def _pair(
        self, spec: TensorSpec, theirs: TensorSpec | None, prints: tuple[str | None, str | None]
    ) -> _Pair | None:
        """Decide how to compare a tensor; None if it is already reported and needs no comparison."""
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
            texts = [what(TENSOR, one, two.shape) for one, two in ((mine.dtype, mine), (stored[0][0], other))]
            self.unlike.append(Unlike(spec.name, texts[0], texts[1]))
            return None
        if any(
            dtype != mine.dtype or dtype != had for (dtype, _), (had, _) in zip(regions, stored, strict=True)
        ):
            self.converted.append(spec.name)
        if isinstance(self._lead, _Live):
            if any(dtype != mine.dtype for dtype, _ in regions):
                raise _of_one_dtype(spec.name, mine.dtype, stored[0][0])
            # A fingerprint of a live state includes its padding; zeros do not change it.
            regions = [(mine.dtype, whole(mine.shape))]
        if theirs is None:
            other = spec._replace(dtype=regions[0][0] or spec.dtype)
        # A stored fingerprint covers the whole tensor in its stored dtype.
        known = [
            value if as_read == as_stored and regions == [(as_read.dtype, whole(as_read.shape))] else None
            for value, as_read, as_stored in zip(prints, (mine, other), (spec, theirs), strict=True)
        ]
        checked = tuple((dtype, box) for dtype, box in regions if dtype is not None)
        return _Pair((mine, other), checked, (known[0], known[1]))

    def _with_scales(self, spec: TensorSpec, theirs: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
        """Return how both are read: as stored if their dtypes are equal, else scaled tensors as float32."""
        if spec.dtype == theirs.dtype:
            return spec, theirs
        specs = [
            one._replace(dtype=CODE_OF["float32"])
            if side.published is not None and side.published.is_scaled(one.name)
            else one
            for side, one in ((self._lead, spec), (self._other, theirs))
        ]
        return specs[0], specs[1]

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
        texts = [what(TENSOR, spec.dtype, spec.shape) for spec in pair.specs]
        places = tuple((box.offset, box.shape) for box in boxes)
        self.unlike.append(Unlike(pair.specs[0].name, texts[0], texts[1], places))

    def _sums(self, side: _Side, spec: TensorSpec, pair: _Pair) -> str:
        """Read a tensor of one side, and return its fingerprint."""
        sums = nothing()
        ((dtype, region),) = pair.regions  # all of it, in one dtype
        for part in slabs(region, DTYPES[dtype].size):
            data = self._read(side, spec, part, dtype)
            if data is None:
                raise _of_one_dtype(spec.name, dtype, spec.dtype)
            sums += box_sums(data, DTYPES[dtype].size, part)
        return text_of(sums)

    def _elements(self, pair: _Pair, sides: tuple[_Side, _Side]) -> tuple[bool, list[Box]]:
        """Return whether elements differ, and, if `where` was asked for, the boxes in which they do."""
        boxes: list[Box] = []
        for dtype, region in pair.regions:
            for part in slabs(region, DTYPES[dtype].size):
                x = self._read(sides[0], pair.specs[0], part, dtype)
                y = self._read(sides[1], pair.specs[1], part, dtype)
                if x is None or y is None:  # a live state, of which only the fingerprint is known
                    return True, []
                if np.array_equal(x, y):
                    continue
                boxes += islice(differing_boxes(x, y, part), MOST_BOXES - len(boxes))
                if not self._where or len(boxes) >= MOST_BOXES:
                    return True, boxes if self._where else []
        return bool(boxes), boxes

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
    """Return the dtype in which two dtypes are compared; None if they can't be."""
    if one == other:
        return one
    return max(one, other, key=_EXACT.index) if {one, other} <= set(_EXACT) else None
