"""Compare the weights of two places, each a checkpoint in any layout, a published model, or a live state.

If both places have fingerprints of a tensor, only the indexes and the ends of data files are read, to check
that the files belong to the index. Otherwise the tensor is read slab by slab, with its name and shape in the
place that is not a published model.

Tensors of two floating-point dtypes are the same if the more exact one, cast to the other dtype, has the same
bits (any NaN equals any NaN), and the cast made no value infinite and no nonzero value zero. In a live state,
each rank has cast its own elements before it computed the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import msgspec

from holdfast._core.layout.box import whole
from holdfast._core.layout.patterns import refuse_text
from holdfast._core.layout.tensor import CODE_OF, DTYPES, FLOATS, Dims, TensorSpec, less_exact
from holdfast._core.plan.agreement import what
from holdfast._core.protocol.call import check_names
from holdfast._models.equality.adapted import alternatives, merge_told, side_with_adapter
from holdfast._models.equality.eight_bits import goes_with, multiplied
from holdfast._models.equality.name_prefix import leave_out_prefix, refuse_passed
from holdfast._models.equality.pair_reader import PairReader
from holdfast._models.equality.pairs import UNTOLD, Pair, Region
from holdfast._models.equality.parts import wrong_ranks
from holdfast._models.equality.sides import (
    FolderOrFingerprints,
    FolderSide,
    LiveSide,
    Side,
    leads,
    open_sides,
)
from holdfast._models.equality.verdict import Same, Unlike
from holdfast._models.views.published import published_regions
from holdfast._models.views.quantized import IN_8_BITS, base_of, scales_of
from holdfast.errors import BadInput, MissingTensors, ShapeMismatch


def same(
    a: FolderOrFingerprints,
    b: FolderOrFingerprints,
    *,
    where: bool = False,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Same:
    """Compare the weights in two places bit by bit. This process alone reads them.

    Weights with different floating-point dtypes are compared in the less exact dtype; the result lists them
    in `converted`. They count as the same if only rounding differs (listed in `rounded`); a value that became
    infinite or zero is a difference. Other pairs of dtypes can't be compared.

    a, b: a checkpoint of Holdfast, torch DCP or megatron-core in any layout, a run folder (its newest step),
        the folder of a model in Hugging Face's format, or the result of `fingerprint` on a live state, or of
        `holdfast.engine.fingerprint`, also as JSON has it (`msgspec.json.encode`, `json.loads`).
        If one is a published model, the other must have its names, megatron-core's or transformers'. A prefix
        that the names of a model have in one place only, such as `model.`, is left out.
    where: also count the differing elements of each tensor, and find the first.
    include, exclude: shell patterns of names; `decoder.layers` means everything under it.
    progress: called with the number of bytes read so far.

    Optimizer state and objects are not compared. Beside a published model, neither are the padding of a
    vocabulary and the rows that the model does not use (docs/huggingface.md, Gemma 4).
    Where fingerprints are used, data files are only checked to be present, complete and of the same
    save as the index; their data is not read (`holdfast verify` does that).

    Raises BadInput if a place has no weights, no table knows the model, or dtypes can't be
    compared; NotCommitted, CorruptCheckpoint and StorageError if a place can't be read.
    """
    check_names(include=include, exclude=exclude)
    refuse_text(include=include, exclude=exclude)
    with ExitStack() as opened:
        first, second = open_sides(a, b, opened)
        swapped = leads(second, first)
        lead, other = (second, first) if swapped else (first, second)
        keep = leave_out_prefix(lead, other, include, exclude)
        work = _Comparison(lead, other, where, progress)
        work.run(keep, include is not None)
    only, unlike = work.only[:: -1 if swapped else 1], work.unlike
    if swapped:
        unlike = [msgspec.structs.replace(one, a=one.b, b=one.a) for one in unlike]
    adapted = side_with_adapter((lead, other))
    merge = "" if adapted is None else merge_told((lead, other)[1 - adapted].where, work.changed, unlike)
    return Same(
        first.where,
        second.where,
        not (only[0] or only[1] or unlike),
        work.equal,
        tuple(unlike),
        tuple(sorted(only[0])),
        tuple(sorted(only[1])),
        work.converted,
        work.reader.rounded,
        work.reader.bytes_read,
        tuple(sorted(work.not_in_engine)),
        merge,
        first.prefix,
        second.prefix,
        work.by_fingerprints,
        tuple(sorted(filter(keep, {*lead.objects(), *other.objects()}))),
    )


class _Comparison:
    """Compares the two sides, under the names of the `lead` side."""

    def __init__(self, lead: Side, other: Side, where: bool, progress: Callable[[int], None]) -> None:
        self._lead, self._other = lead, other
        self._where = where
        self._live = isinstance(lead, LiveSide)
        self._view = other.published.view_if_known if other.published is not None else None
        self.equal = self.by_fingerprints = 0
        self.reader = PairReader(where, progress)
        self.changed = 0
        """Number of compared tensors that the adapter of a side changes."""
        self.converted: dict[str, str] = {}
        self._unscaled: set[str] = set()
        """Published tensors in 8 bits that were compared as they are stored."""
        self._multiplied = set[str]()
        """Names of tensors in 8 bits on both sides that are compared multiplied by their scales."""
        self.unlike: list[Unlike] = []
        self.only: tuple[list[str], list[str]] = ([], [])
        self.not_in_engine: list[str] = []

    def run(self, keep: Callable[[str], bool], is_chosen: bool) -> None:
        mine, theirs = self._lead.weights(), self._other.weights()
        self._refuse_unknown(mine, theirs)
        prints = self._lead.fingerprints(), self._other.fingerprints()
        self._multiplied = multiplied((self._lead, self._other), (mine, theirs), prints, self._parts)
        compared, passed = 0, dict[str, str]()
        for name, spec in mine.items():
            if not keep(name):
                passed |= dict.fromkeys(self._parts(spec), name)  # which are excluded, too
                continue
            compared += 1
            if self._goes_with_its_tensor(name, mine, theirs):
                continue
            try:
                pair = self._pair(spec, theirs.get(name), (prints[0].get(name), prints[1].get(name)))
                if pair is not None:
                    self._compare(pair)
            except (BadInput, MissingTensors, ShapeMismatch) as error:  # from a published model
                if isinstance(error, BadInput) and (self._live or UNTOLD & error.details.keys()):
                    raise
                self.unlike.append(Unlike(name, what(spec), error.message))
                self._other.used |= self._parts(spec)  # reported already
        left = [name for name in theirs if name not in mine and keep(name)]
        refuse_passed(passed if is_chosen else {}, left, self._lead, self._other)
        # In a published model, only tensors that are not part of any tensor on the other side.
        self._other.used |= passed.keys()
        left = [name for name in left if name not in self._other.used and not self._is_scale(name, theirs)]
        if not compared and not left:
            raise BadInput("Neither place has a weight that include= and exclude= leave.")
        tied = self._other.published.tied if self._other.published is not None else None
        if tied is not None and tied[0] in left:
            left.remove(tied[0])
            self._check_tie(theirs[tied[0]], theirs[tied[1]])
        if self._view is not None and isinstance(self._lead, LiveSide) and self._lead.is_engine:
            self.not_in_engine = [name for name in left if self._view.predicts_further(name)]
            left = [name for name in left if name not in self.not_in_engine]
        self._lead.refuse_quantized(left)
        self.only[1].extend(left)

    def _refuse_unknown(self, mine: Mapping[str, TensorSpec], theirs: Mapping[str, TensorSpec]) -> None:
        """Raise BadInput for a published model without a table, if the other side has different names."""
        published = self._other.published
        if published is None or self._view is not None or self._lead.published is not None:
            return
        if not mine.keys() & theirs.keys():
            raise BadInput(
                f"Whether {self._lead.where} holds the model of {self._other.where} can't be told: no table "
                f"knows its model_type {published.config.get('model_type')!r}, and the two have no name in "
                f"common, such as {min(mine)!r} and {min(theirs)!r}.",
                hint="docs/huggingface.md shows how to add a table.",
            )

    def _goes_with_its_tensor(
        self, name: str, mine: Mapping[str, TensorSpec], theirs: Mapping[str, TensorSpec]
    ) -> bool:
        """Return whether a name is the scales of a tensor that is compared after it was multiplied."""
        base = base_of(name)
        both = base != name and name not in theirs and base in mine and base in theirs
        is_other = both and mine[base].dtype == IN_8_BITS != theirs[base].dtype
        return is_other or goes_with(name, self._multiplied, theirs)

    def _is_scale(self, name: str, theirs: Mapping[str, TensorSpec]) -> bool:
        """Return whether a name is the scales of a tensor that was compared after it was multiplied."""
        base, blocks = base_of(name), name.removesuffix("_scales") + "_blocks"
        in_8_bits = base in theirs and theirs[base].dtype == IN_8_BITS
        compared = self._other.used - self._unscaled
        return blocks in compared or (base != name and in_8_bits and base in compared)

    def _check_tie(self, output: TensorSpec, embedding: TensorSpec) -> None:
        """Check that the published output weight equals the embedding, in a model that ties them."""
        if embedding[1:] == output[1:]:
            region = Region(whole(output.shape), (output.dtype, output.dtype), output.dtype)
            pair = Pair((embedding, output), (region,), (None, None))
            if not self.reader.elements(pair, self._other, self._other)[0]:
                return
        self.unlike.append(Unlike(output.name, "the embedding (tie_word_embeddings)", what(output)))

    def _parts(self, spec: TensorSpec) -> set[str]:
        """Return the published tensors that make up a tensor; none if its shape does not fit."""
        if self._view is None or not self._view.knows(spec.name):
            return set()
        try:
            segments = self._view.segments(spec.name, spec.shape, whole(spec.shape))
            return {segment.name for segment in segments}
        except (BadInput, ShapeMismatch):
            return set()

    def _pair(
        self, spec: TensorSpec, theirs: TensorSpec | None, prints: tuple[str | None, str | None]
    ) -> Pair | None:
        """Decide how to compare a tensor; None if it is already reported and needs no comparison."""
        folder = self._other.published
        if theirs is None:
            self._other.refuse_quantized([spec.name])
        if theirs is None and (folder is None or self._view is None or not self._view.knows(spec.name)):
            self.only[0].append(spec.name)
            return None
        if theirs is not None:
            mine, other = self._with_scales(spec, theirs)
            stored = [(other.dtype, whole(other.shape))]
        else:
            assert folder is not None
            mine = spec._replace(dtype=CODE_OF["float32"]) if spec.name in self._multiplied else spec
            other, stored = mine, published_regions(folder, mine)
        if mine.dtype == IN_8_BITS == stored[0][0]:
            self._unscaled |= {spec.name} if theirs is not None else self._parts(spec)
        if mine.shape != other.shape:
            self.unlike.append(Unlike(spec.name, what(mine), what(other._replace(dtype=stored[0][0]))))
            return None
        dtypes = [less_exact(mine.dtype, dtype) for dtype, _ in stored]
        if None in dtypes:
            raise self._of_two_dtypes(spec.name, mine.dtype, stored[dtypes.index(None)][0])
        regions = [
            Region(box, (mine.dtype, had), dtype)
            for dtype, (had, box) in zip(dtypes, stored, strict=True)
            if dtype is not None
        ]
        casts = {region.dtype: None for region in regions if region.is_cast}
        if isinstance(self._lead, LiveSide):
            # A fingerprint of a live state includes its padding; zeros do not change it. It is of one dtype.
            # Parts of several dtypes are read in the most exact of them.
            had = min((had for had, _ in stored), key=(*FLOATS, *range(len(DTYPES))).index)
            (dtype, *more) = {region.dtype for region in regions} or {mine.dtype}
            if more or (dtype != mine.dtype and self._lead.rounded(spec.name, dtype) is None):
                raise self._of_two_dtypes(spec.name, mine.dtype, had)
            regions = [Region(whole(mine.shape), (mine.dtype, had), dtype)]
        if casts:
            self.converted[spec.name] = ", ".join(DTYPES[code].name for code in casts)
        if theirs is None:
            other = spec._replace(dtype=stored[0][0])
        # A stored fingerprint covers the whole tensor in its stored dtype.
        known = [
            value
            if as_read == as_stored
            and [region[::2] for region in regions] == [(whole(as_read.shape), as_read.dtype)]
            else None
            for value, as_read, as_stored in zip(prints, (mine, other), (spec, theirs), strict=True)
        ]
        return Pair((mine, other), tuple(regions), (known[0], known[1]))

    def _rounded(self, pair: Pair) -> tuple[str | None, str | None]:
        """Return the fingerprints of a pair, including those of cast elements in a live state."""
        prints = list(pair.prints)
        for place, side in enumerate((self._lead, self._other)):
            if not isinstance(side, LiveSide) or prints[place] is not None:
                continue
            (region,) = pair.regions
            name, dtype = pair.specs[place].name, region.dtype
            if (rounded := side.rounded(name, dtype)) is None:
                raise self._of_two_dtypes(name, *region.stored)
            prints[place] = rounded.value
            self.reader.lost.update(dict.fromkeys(rounded.lost))
            if rounded.inexact:
                self.reader.rounded[name] = DTYPES[dtype].name
            if rounded.has_nan:  # the other place is read, where a NaN may have other bits
                prints[1 - place] = None
        return prints[0], prints[1]

    def _with_scales(self, spec: TensorSpec, theirs: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
        """Return the specs for reading both: as stored if dtypes are equal, else scaled ones as float32.
        `_multiplied` are float32 on both sides."""
        if spec.dtype == theirs.dtype and spec.name not in self._multiplied:
            return spec, theirs
        specs = [
            one._replace(dtype=CODE_OF["float32"])
            if side.published is not None and scales_of(one.name, side.published.has)
            else one
            for side, one in ((self._lead, spec), (self._other, theirs))
        ]
        return specs[0], specs[1]

    def _compare(self, pair: Pair) -> None:
        differ, elements, first = False, None, None
        self.reader.begin()
        mine, theirs = self._rounded(pair)
        if mine is not None and theirs is not None:
            differ = mine != theirs or not mine  # ranks of an engine differ from each other
            self.by_fingerprints += 1
        elif mine is not None:
            differ = self._sums(self._other, 1, pair) != mine
        elif theirs is not None:
            differ = self._sums(self._lead, 0, pair) != theirs
        # A NaN gets other bits when it is cast, so it can't be compared with a fingerprint of stored bits.
        unsure = differ and self.reader.has_nan
        differ = differ or bool(self.reader.lost)
        if unsure and self._live:
            raise self._of_two_dtypes(pair.specs[0].name, *pair.regions[0].stored, "has NaN, and ")
        if (mine, theirs) == (None, None) or unsure or (differ and self._where):
            differ, elements, first = self.reader.elements(pair, self._lead, self._other)
        texts = [self._text(pair, place) for place in range(2)]
        merged = self._merged(pair, (mine, theirs), differ)
        if not differ or merged == "":
            self.equal += 1
            return
        ranks = self._wrong_ranks(pair, (mine, theirs))
        self.unlike.append(
            Unlike(pair.specs[0].name, texts[0], texts[1], elements, first, *ranks, merged or "")
        )

    def _merged(self, pair: Pair, prints: tuple[str | None, str | None], differ: bool) -> str | None:
        """Count a tensor that a side's adapter changes. Return how else it was merged, if the two differ:
        "" for another right way, None if no way is found."""
        sides, place = (self._lead, self._other), side_with_adapter((self._lead, self._other))
        if place is None:
            return None
        side = sides[place]
        assert isinstance(side, FolderSide)
        assert side.published is not None
        spec = pair.specs[0]
        ways = list(alternatives(pair, place, side.published, {spec.name} | self._parts(spec)))
        self.changed += bool(ways)
        for way in ways if differ else ():
            merged = side.merging(way.times)
            self.reader.begin()
            if isinstance(sides[1 - place], LiveSide):
                (region,) = way.pair.regions
                found = self.reader.box_sums(merged, place, way.pair, region, region.box) != prints[1 - place]
            else:
                both = (merged, self._other) if place == 0 else (self._lead, merged)
                found, _, _ = self.reader.elements(way.pair, *both)
            if not found and not self.reader.lost:
                return way.words
        return None

    def _wrong_ranks(self, pair: Pair, prints: tuple[str | None, str | None]) -> tuple[Dims, bool]:
        """Return the ranks of an engine that hold wrong elements (`parts.wrong_ranks`)."""
        for place, side in enumerate((self._lead, self._other)):
            parts = side.parts(pair.specs[place].name) if isinstance(side, LiveSide) else ()
            if not parts:
                continue
            (region,) = pair.regions
            other, right = (self._other, self._lead)[place], prints[1 - place] or ""
            read = None
            if isinstance(other, FolderSide):
                read = partial(self.reader.box_sums, other, 1 - place, pair, region)
            return wrong_ranks(
                parts, DTYPES[region.dtype].name, DTYPES[region.stored[place]].name, right, read
            )
        return (), False

    def _text(self, pair: Pair, place: int) -> str:
        """Describe a tensor in one place, and which values of the other place it can't hold."""
        spec, side = pair.specs[place], (self._lead, self._other)[place]
        text = what(spec)
        if side.published is not None and spec.dtype != IN_8_BITS:
            # The names on the other side, and the name on this one.
            places = filter(None, map(side.published.place, {*self._parts(spec), spec.name}))
            if any(stored.code == IN_8_BITS for stored in places):
                text += f", rounded there to {DTYPES[IN_8_BITS].name} with scales"
        if self.reader.lost and all(region.stored[place] == region.dtype for region in pair.regions):
            text += f", in which values of the other place {' or '.join(sorted(self.reader.lost))}"
        return text

    def _sums(self, side: Side, place: int, pair: Pair) -> str:
        """Read a tensor of one side, and return its fingerprint."""
        (region,) = pair.regions  # all of it, in one dtype
        if isinstance(side, LiveSide):
            raise self._of_two_dtypes(pair.specs[place].name, *region.stored)
        return self.reader.box_sums(side, place, pair, region, region.box)

    def _of_two_dtypes(self, name: str, mine: int, theirs: int, more: str = "") -> BadInput:
        """Return the error for a tensor whose dtypes can't be compared."""
        by_reading = self._live and less_exact(mine, theirs) is not None
        return BadInput(
            f"{name!r} {more}is {DTYPES[mine].name} in {self._lead.where}, and {DTYPES[theirs].name} in "
            f"{self._other.where}: whether they are the same can't be told.",
            hint="Save the state, and compare the checkpoint." if by_reading else "exclude= leaves it out.",
            details={"tensor": name, "dtypes": [DTYPES[mine].name, DTYPES[theirs].name]},
        )
