"""Finds the boxes of stored tensors that the ranks of a grid need: in a published model, by the table of its
family, and in a checkpoint of a megatron-core model, by tensor names; else by the numbers of layers.

If it is not known how a tensor is split, the ranks of its stage take it whole; `Needs.unknown` lists these.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from holdfast._core.format.names import rank_in_name
from holdfast._core.layout.box import Box, union, whole
from holdfast._core.layout.tensor import TENSOR, Dims, TensorSpec
from holdfast._models.views.entries import TableEntry
from holdfast._models.views.family import View
from holdfast._models.views.mapping import shape_made
from holdfast._models.views.quantized import (
    BYTES,
    IN_8_BITS,
    PACKED,
    base_of,
    is_scale,
    scales_of,
)
from holdfast._models.views.rank_share import ModelSizes, RankShare, how_cut
from holdfast.errors import BadInput

_OURS = ("embedding.", "decoder.", "output_layer.", "mtp.")
"""Prefixes of megatron-core's names; families have transformers' names, too."""
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.|\Z)")
_LAYER = re.compile(r"(?:\A|\.)layers\.(\d+)\.")
_HOLES = re.compile(r"\{\w+\}")
_GATED = ("joined", "concat", "of_experts_joined", "of_experts_joined_turned", "of_experts_mixed")
"""Ways that put a gate above its up projection."""
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.[^.]+\.")
"""Prefix of optimizer states, before the parameter's name. A state has the parameter's shape."""
_TRAINING = re.compile(r"chained_\d+\.|optimizer\.|rng_state")
"""Prefixes of names that don't belong to weights."""
Specs = Mapping[str, TensorSpec]
"""Stored tensors by name."""


class Needs(NamedTuple):
    """The needs of one or several ranks."""

    boxes: dict[str, list[Box]]
    """Non-overlapping boxes, by tensor name."""
    unknown: frozenset[str]
    """Names of tensors that are taken whole because it is not known whether and how ranks share them."""


def together(needs: Iterable[Needs]) -> Needs:
    """Join the needs of several ranks, each byte once."""
    boxes: dict[str, dict[Box, None]] = {}
    unknown: set[str] = set()
    for need in needs:
        unknown |= need.unknown
        for name, some in need.boxes.items():
            boxes.setdefault(name, {}).update(dict.fromkeys(some))
    return Needs({name: union(list(boxes[name])) for name in sorted(boxes)}, frozenset(unknown))


# -- a published model ------------------------------------------------------------------------------------


def sizes_published(view: View | None, specs: Specs, words: int) -> ModelSizes:
    """Return the sizes of a published model. view: None if its family is not known. words: rows of the padded
    vocabulary; 0: not known."""
    if view is None:
        return ModelSizes(max(_depths(specs).values(), default=0), 0, False, 0, words)
    predicts = view.sizes.get("num_nextn_predict_layers", 0)
    experts = view.sizes.get("num_experts", 0)
    return ModelSizes(view.sizes["num_hidden_layers"], experts, view.is_tied, max(predicts, 0), words)


def of_published(view: View | None, specs: Specs, share: RankShare) -> Needs:
    """Return a rank's needs in a published model."""
    boxes: defaultdict[str, list[Box]] = defaultdict(list)
    if view is not None:
        for entry in view.family.entries.values():
            if entry.name.startswith(_OURS):
                for name, numbers in _names_held(entry, share):
                    for published, box in _parts_held(view, entry, name, numbers, specs, share):
                        boxes[published].append(box)
    depths = _depths(specs)
    unknown = {name for name in _unclaimed(view, specs) if _of_stage(name, share, depths)}
    scales = {found for name in {*boxes, *unknown} for found in _beside(name, specs)}
    boxes |= {name: [whole(specs[name].shape)] for name in unknown | scales}
    return Needs({name: union(some) for name, some in boxes.items()}, frozenset(unknown))


def _beside(name: str, specs: Specs) -> Iterator[str]:
    """Yield what belongs to a quantized tensor: its scales, and of a packed one the shape."""
    base = name.removesuffix(PACKED)
    if (scales := scales_of(base, specs.__contains__)) is not None:
        yield scales
    if f"{base}_shape" in specs:
        yield f"{base}_shape"


def _names_held(entry: TableEntry, share: RankShare) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the names of an entry's tensors that a rank has, with the numbers in them."""
    if "layer" not in entry.holes:
        yield entry.name, {}
        return
    for layer in chain.from_iterable(share.layer_ranges(entry.name)):
        for expert in share.experts if "expert" in entry.holes else (0,):
            yield entry.name.format(layer=layer, expert=expert), {"layer": layer, "expert": expert}


def _parts_held(
    view: View, entry: TableEntry, name: str, numbers: dict[str, int], specs: Specs, share: RankShare
) -> Iterator[tuple[str, Box]]:
    """Yield the parts of published tensors that make up a rank's part of a tensor."""
    if not view.has_layer(entry, numbers.get("layer", 0)):
        return
    rule, published = view.rule(entry, numbers)
    # A family has names for several ways in which megatron-core builds a layer, and for parts that only some
    # models have. The load will report what is missing.
    packed = [one + PACKED if one + PACKED in specs else one for one in published]
    if any(one not in specs for one in packed):
        return
    # Which of the two layouts a folder has is not told here, nor how many elements a number holds.
    if rule.layout is not None or any(one.endswith(PACKED) or specs[one].dtype in BYTES for one in packed):
        yield from ((one, whole(specs[one].shape)) for one in packed)
        return
    shape = shape_made(rule.way, [specs[one].shape for one in published], view.sizes)
    for box in share.boxes(name, shape, 2 if entry.rule.way in _GATED else 1):
        for segment in view.segments(name, shape, box):
            stored = specs[segment.name].shape
            if segment.published != stored:
                raise BadInput(
                    f"{segment.name!r} has shape {list(stored)}, and the sizes in config.json do not fit.",
                    details={"tensor": segment.name},
                )
            yield segment.name, segment.joined(segment.theirs(segment.box))


def _unclaimed(view: View | None, specs: Specs) -> list[str]:
    """List the stored names that the family does not use."""
    if view is None:
        return list(specs)
    ours = [entry for entry in view.family.entries.values() if entry.name.startswith(_OURS)]
    possible = chain.from_iterable(map(view.possible, ours))
    known = {_HOLES.sub("#", name) for name in possible}

    def is_quantized(name: str) -> bool:
        return name + PACKED in specs or (name in specs and specs[name].dtype in (IN_8_BITS, *BYTES))

    def weight(name: str) -> str:
        return base_of(name) if is_scale(name, is_quantized) else name.removesuffix(PACKED)

    return [name for name in specs if _NUMBERS.sub("#", weight(name)) not in known]


def _depths(names: Iterable[str]) -> dict[str, int]:
    """Return the number of layers after each beginning of names, such as `model.`."""
    depths: dict[str, int] = {}
    for name in names:
        if (layer := _LAYER.search(name)) is not None:
            head = name[: layer.start()]
            depths[head] = max(depths.get(head, 0), int(layer[1]) + 1)
    return depths


def _of_stage(name: str, share: RankShare, depths: Mapping[str, int]) -> bool:
    """Return whether a tensor without a family is on this stage, by the number of its layer. Parts of a model
    with fewer layers than the model, such as a vision tower, are on all stages.

    depths: from `_depths`.
    """
    layer = _LAYER.search(name)
    if layer is None or depths[name[: layer.start()]] < share.sizes.layers:
        return True
    number = int(layer[1])
    beyond = share.last and number >= share.sizes.layers
    return beyond or any(number in some for some in share.layers)


# -- a checkpoint -----------------------------------------------------------------------------------------


def sizes_stored(specs: Specs, words: int) -> ModelSizes:
    """Return the sizes of the model in a checkpoint."""
    embedding = specs.get("embedding.word_embeddings.weight")
    predicts = {int(match[1]) for name in specs if (match := re.match(r"mtp\.layers\.(\d+)\.", name))}
    if not _is_megatrons(specs):
        return ModelSizes(max(_depths(specs).values(), default=0), 0, False, 0, words)
    return ModelSizes(
        _count(specs, re.compile(r"decoder\.layers\.(?:(\d+)\.)?"), 0),
        _count(specs, re.compile(r".*\.experts\.experts\.(?:(\d+)\.)?"), 1),
        "output_layer.weight" not in specs,
        max(predicts, default=-1) + 1,
        words or (embedding.shape[0] if embedding is not None and embedding.shape else 0),
    )


def _is_megatrons(specs: Specs) -> bool:
    return any(_STATE.sub("", name, count=1).startswith(_OURS) for name in specs)


def _count(specs: Specs, pattern: re.Pattern[str], axis: int) -> int:
    """Count layers or experts by names and shapes."""
    most = 0
    for name, spec in specs.items():
        match = pattern.match(name)
        if match is None or spec.kind != TENSOR:
            continue
        if match[1] is not None:
            most = max(most, int(match[1]) + 1)
            continue
        # Layers have no axis where their numbers are in the name.
        position = axis - (1 if axis and re.search(r"layers\.\d+\.", name) else 0)
        most = max(most, spec.shape[position] if len(spec.shape) > position else 0)
    return most


def of_stored(specs: Specs, share: RankShare, rank: int, weights_only: bool) -> Needs:
    """Return a rank's needs in a checkpoint. If it is not of megatron-core's model, these are whole tensors
    of the layers of the rank's stages.

    weights_only: leave out the optimizer's state and the states of random generators.
    """
    boxes: dict[str, list[Box]] = {}
    unknown: set[str] = set()
    depths = {} if _is_megatrons(specs) else _depths(specs)
    for name, spec in specs.items():
        if weights_only and _TRAINING.match(name):
            continue
        if spec.kind != TENSOR:  # small, and perhaps another rank's if the layout was different
            boxes[name] = [whole(spec.shape)]
            continue
        if rank_in_name(name) not in (None, rank) or (depths and not _of_stage(name, share, depths)):
            continue
        parameter = _STATE.sub("", name, count=1)
        is_known = parameter.startswith(_OURS)
        needed = [whole(spec.shape)]
        if is_known:
            needed = share.boxes(parameter, spec.shape, _parts(parameter, spec.shape, specs))
        if needed:
            boxes[name] = union(needed)
            if not is_known or _is_in_doubt(parameter, spec.shape, share):
                unknown.add(name)
    return Needs(boxes, frozenset(unknown))


def _parts(name: str, shape: Dims, specs: Specs) -> int:
    """Return 2 for a gate and its up projection, concatenated: it has twice as many rows as the next layer
    has columns. Else 1."""
    if "linear_fc1." not in name:
        return 1
    after = specs.get(re.sub(r"linear_fc1\.(weight|bias)(\d*)\Z", r"linear_fc2.weight\2", name))
    rows = shape[-2:-1] if name.rpartition(".")[2].startswith("weight") else shape[-1:]
    if after is None or not rows or not after.shape:
        return 1
    return 2 if rows[0] == 2 * after.shape[-1] else 1


def _is_in_doubt(name: str, shape: Dims, share: RankShare) -> bool:
    """Return whether a matrix is taken whole because it is not known how it is split."""
    axes = len(shape) - len(re.findall(r"(?:layers|experts\.experts)\.(?!\d)", name))
    return how_cut(name) is None and axes > 1 and max(share.tp[1], share.etp[1]) > 1
