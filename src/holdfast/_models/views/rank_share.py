"""Computes the part of each megatron-core tensor that a rank of a grid holds.

Layers are split over pipeline stages (and model chunks of a virtual pipeline), experts over expert-parallel
ranks, rows or columns of a linear layer over tensor-parallel ranks. `CUTS` has the split of each layer; an
unknown layer counts as whole, so that a share is never too small.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from holdfast._core.layout.box import Box, whole
from holdfast._core.layout.grid import Grid
from holdfast._core.layout.tensor import Dims
from holdfast.errors import BadInput

ROWS, COLUMNS, WHOLE = "rows", "columns", "whole"
CUTS = {
    "word_embeddings": ROWS,
    "output_layer": ROWS,
    "linear_qkv": ROWS,
    "linear_q_proj": ROWS,
    "linear_q_up_proj": ROWS,
    "linear_kv_up_proj": ROWS,
    "linear_fc1": ROWS,
    "linear_proj": COLUMNS,
    "linear_fc2": COLUMNS,
    # Gated delta nets and Mamba layers, whose heads are split.
    "in_proj": ROWS,
    "conv1d": ROWS,
    "A_log": ROWS,
    "dt_bias": ROWS,
    "D": ROWS,
    "out_proj": COLUMNS,
    # Transformer Engine's layers have these whole on all ranks, others split them; they are small.
    "linear_q_down_proj": WHOLE,
    "linear_kv_down_proj": WHOLE,
    "linear_kv_proj": WHOLE,
    "eh_proj": WHOLE,
    "e_proj": WHOLE,
    "h_proj": WHOLE,
    "fc1_latent_proj": WHOLE,
    "fc2_latent_proj": WHOLE,
    "mapping_proj": WHOLE,
    "compressor": WHOLE,
    "router": WHOLE,
    "indexer": WHOLE,
    "per_layer_input_gate": WHOLE,
    "per_layer_projection": WHOLE,
    "shared_experts": WHOLE,  # the gate of its output
}
"""The tensor-parallel split of a tensor, by the last part of its name that is listed here. Biases of COLUMNS
layers are whole."""
_LAYER = re.compile(r"(decoder|mtp)\.layers\.(?:(\d+)\.)?")
_EXPERT = re.compile(r"\.experts\.experts\.(?:(\d+)\.)?")
_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
VOCABULARY = 128
"""Frameworks pad the vocabulary to a multiple of at most this times `tp`, unless configured otherwise."""


class ModelSizes(NamedTuple):
    """The sizes of a model that a share depends on."""

    layers: int
    experts: int
    """0: none."""
    is_tied: bool
    """Does the last stage have the embedding instead of an output layer?"""
    predicts: int
    """Multi-token prediction layers."""
    words: int = 0
    """Rows of the padded vocabulary; 0: not known, or as many as the tensor has."""


class RankShare(NamedTuple):
    """A rank's share of a model. Ranks with equal shares hold the same data."""

    tp: tuple[int, int]
    """Index of the tensor-parallel part, and number of parts."""
    etp: tuple[int, int]
    layers: tuple[range, ...]
    """The layers of each model chunk."""
    experts: range
    first: bool
    """Is it on the first pipeline stage?"""
    last: bool
    sizes: ModelSizes

    def layer_ranges(self, name: str) -> tuple[range, ...]:
        """Return the rank's ranges of layers, of the kind (main or multi-token prediction) of `name`."""
        if name.startswith("mtp."):
            return (range(self.sizes.predicts),) if self.last else ()
        return self.layers

    def has_stage(self, name: str) -> bool:
        """Return whether this stage holds a tensor outside of the layers."""
        if name.startswith("embedding."):
            return self.first or (self.last and (self.sizes.is_tied or self.sizes.predicts > 0))
        if name.startswith(("output_layer.", "decoder.final", "mtp.")):
            return self.last
        return True

    def boxes(self, name: str, shape: Dims, parts: int) -> list[Box]:
        """Return the rank's boxes in a tensor of global `shape`; none if it holds no part of it.

        parts: number of tensors that are concatenated along the rows of `linear_fc1`, and split separately:
            2 with a gate.
        """
        layer, expert = _LAYER.match(name), _EXPERT.search(name)
        ranges: list[tuple[range, ...]] = []
        if layer is None:
            if not self.has_stage(name):
                return []
        else:
            mine = self.layer_ranges(name)
            if layer[2] is None:
                # A shorter axis is of the layers of one type. Which these are is not told here.
                is_shorter = layer[1] == "decoder" and len(shape) > 0 and shape[0] < self.sizes.layers
                ranges.append((range(shape[0]),) if is_shorter else mine)
            elif not any(int(layer[2]) in some for some in mine):
                return []
        if expert is not None:
            if expert[1] is None:
                ranges.append((self.experts,))
            elif int(expert[1]) not in self.experts:
                return []
        if len(shape) < len(ranges):
            raise BadInput(f"{name!r} has shape {list(shape)}, which has too few axes for what it is.")
        lead = [Box((), ())]
        for some in ranges:
            lead = [
                Box((*box.offset, one.start), (*box.shape, len(one))) for box in lead for one in some if one
            ]
        tail = self._cut(name, shape[len(ranges) :], expert is not None, parts)
        boxes = [
            Box((*a.offset, *b.offset), (*a.shape, *b.shape)) for a in lead for b in tail if b.volume > 0
        ]
        for box in boxes:
            if not box.within(shape):
                raise BadInput(
                    f"{name!r} of shape {list(shape)} lacks layers or experts that the grid shares out.",
                    hint="Are --grid and --split those of the model?",
                )
        return boxes

    def _cut(self, name: str, shape: Dims, of_expert: bool, parts: int) -> list[Box]:
        how = how_cut(name)
        index, count = self.etp if of_expert else self.tp
        if how in (None, WHOLE) or count == 1 or not shape:
            return [whole(shape)]
        if how == COLUMNS:
            if len(shape) < 2:
                return [whole(shape)]  # a bias is added once, and is on all ranks
            size = _share(name, shape[-1], count)
            return [Box((*(0,) * (len(shape) - 1), index * size), (*shape[:-1], size))]
        rest, sides = (0,) * (len(shape) - 1), shape[1:]
        if name.endswith(_PADDED):
            low, high = self._words(shape[0], index, count)
            return [Box((low, *rest), (high - low, *sides))]
        parts = parts if "linear_fc1." in name else 1
        size, each = _share(name, shape[0], count * parts), shape[0] // parts
        return [Box((part * each + index * size, *rest), (size, *sides)) for part in range(parts)]

    def _words(self, rows: int, index: int, count: int) -> tuple[int, int]:
        """Return the first row and the end of its part of the vocabulary: exact if the padding is known, else
        wide enough for any padding."""
        multiple = VOCABULARY * count
        least = most = self.sizes.words
        if not most:
            least, most = rows, -(-rows // multiple) * multiple
        elif most < rows:
            raise BadInput(f"A vocabulary of {most} rows does not hold the {rows} that there are.")
        low, high = index * -(-least // count), (index + 1) * -(-most // count)
        return min(low, rows), min(high, rows)


def how_cut(name: str) -> str | None:
    """Return the tensor-parallel split of a tensor (ROWS, COLUMNS or WHOLE); None if it is not known."""
    for part in reversed(name.split(".")):
        if "norm" in part:
            return WHOLE
        if part in CUTS:
            return CUTS[part]
    return None


def _share(name: str, size: int, count: int) -> int:
    if size % count:
        raise BadInput(
            f"{size} rows or columns of {name!r} can't be shared by {count}.",
            hint="A tensor-parallel size must divide them: is the grid that of the model?",
        )
    return size // count


def split_of(split: str | Sequence[int] | None) -> Sequence[int] | None:
    """Return a split of layers, which may be given as a text such as `3,4,4,3`. Raises BadInput."""
    refused = BadInput(f"The split {split!r} is not made of numbers of layers.", hint="Write 3,4,4,3.")
    if isinstance(split, str):
        parts = [part.strip() for part in split.split(",")]
        if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
            raise refused
        return [int(part) for part in parts]
    if split is None:
        return None
    if not isinstance(split, Sequence) or not all(isinstance(number, int) for number in split):
        raise refused
    return [int(number) for number in split]


def stages_of(grid: Grid, layers: int, split: Sequence[int] | None) -> list[range]:
    """Return the layers of each model chunk, in the order of the model: the first chunks of all stages, then
    their second ones.

    split: layers of each chunk; None: all equal. BadInput if that does not give every layer to a chunk.
    """
    chunks = grid.pp * grid.vpp
    if split is None:
        if layers % chunks:
            raise BadInput(
                f"{layers} layers can't be shared equally by {chunks} model chunks (pp={grid.pp}, "
                f"vpp={grid.vpp}).",
                hint="Say how many layers each has: --split 3,4,4,3.",
            )
        split = [layers // chunks] * chunks
    if len(split) != chunks or sum(split) != layers or min(split) < 0:
        raise BadInput(
            f"The split {','.join(map(str, split))[:200]} does not share {layers} layers out to {chunks} "
            "model chunks.",
            hint="It has a number for each chunk in the order of the model, pp x vpp of them.",
        )
    stages, first = [], 0
    for size in split:
        stages.append(range(first, first + size))
        first += size
    return stages


def share_of(grid: Grid, rank: int, sizes: ModelSizes, stages: Sequence[range]) -> RankShare:
    """Return a rank's share. stages: from `stages_of`."""
    coordinates = grid.coordinates(rank)
    if sizes.experts % grid.ep:
        raise BadInput(f"{sizes.experts} experts can't be shared by ep={grid.ep}.")
    each = sizes.experts // grid.ep
    stage = coordinates["pp"]
    return RankShare(
        (coordinates["tp"], grid.dense["tp"]),
        (coordinates["etp"], grid.expert["etp"]),
        tuple(stages[stage :: grid.pp]),
        range(coordinates["ep"] * each, (coordinates["ep"] + 1) * each),
        stage == 0,
        stage == grid.pp - 1,
        sizes,
    )
