"""The plan of an export: which published tensors the checkpoint's weights give, which are missing, and which
file each goes into."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from holdfast.errors import BadInput, CoverageError, MissingTensors
from holdfast.format import hugging_face as hf
from holdfast.format.index import Index
from holdfast.format.names import is_weight
from holdfast.io.hugging_face import HuggingFaceFolder, read_config
from holdfast.layout.box import whole
from holdfast.layout.coverage import first_problem
from holdfast.layout.tensor import CODE_OF, DTYPES, TENSOR, Dims, TensorSpec, listed, nearest
from holdfast.store.local import LocalStore
from holdfast.views.family import View
from holdfast.views.mapping import Segment

WRITTEN_AS = ("bfloat16", "float16", "float32")
"""Dtypes that weights may be converted to."""
_PARTS = re.compile(r"(\d+)")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class Piece(NamedTuple):
    """A part of a published tensor: a segment of one of the checkpoint's tensors."""

    spec: TensorSpec
    segment: Segment


@dataclass
class PublishedTensor:
    """A published tensor, and the pieces that it is made of."""

    name: str
    code: int
    shape: Dims
    pieces: list[Piece] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.code].size


def published_tensors(index: Index, view: View, base: LocalStore, dtype: str | None) -> list[PublishedTensor]:
    """List the published tensors that the checkpoint's weights give, in the natural order of their names.

    base: the published folder. A tensor of the checkpoint with a name from there is written unchanged.
    """
    published = set()
    if HuggingFaceFolder.is_one(base):
        published = {name for name in HuggingFaceFolder(base).names() if hf.is_weight(name)}
    names = [name for name in index.names() if is_weight(name) and not hf.is_constant(name)]
    columns = index.select(index.find(names))
    unknown = [
        name
        for row, name in enumerate(columns.names)
        if columns.kind[row] == TENSOR and name not in published and not view.knows(name)
    ]
    if unknown:
        raise BadInput(
            f"{index.where} holds {len(unknown)} weights that the family {view.family.name!r} has no place "
            f"for: {listed(unknown)}.",
            hint="An adapter must be merged into the weights first; scales of quantised weights are not "
            "exported; another model needs another like=.",
            details={"unknown": unknown[:100]},
        )
    by_name: dict[str, PublishedTensor] = {}
    for row, name in enumerate(columns.names):
        if columns.kind[row] != TENSOR:
            continue
        _refuse_quantised(index, name, DTYPES[columns.dtype[row]].name, base)
        spec = TensorSpec(name, int(columns.dtype[row]), columns.shape_of(row))
        if view.is_tied and name == "output_layer.weight":
            raise BadInput(
                f"{index.where} holds {name!r}, and the published model's output is its embedding "
                f"(tie_word_embeddings).",
                hint="If the model was trained so, set tie_word_embeddings to false in like='s config.json.",
            )
        segments = (
            [_as_it_is(spec)] if name in published else view.segments(name, spec.shape, whole(spec.shape))
        )
        for segment in segments:
            code = _code(spec, dtype)
            tensor = by_name.setdefault(segment.name, PublishedTensor(segment.name, code, segment.published))
            tensor.pieces.append(Piece(spec, segment))
    tensors = sorted(by_name.values(), key=lambda tensor: _natural(tensor.name))
    for tensor in tensors:
        _check_covered(tensor, index.where)
    return tensors


def _refuse_quantised(index: Index, name: str, dtype: str, base: LocalStore) -> None:
    """Raise BadInput for quantised elements: an export writes neither scales nor their configuration."""
    if dtype not in (*WRITTEN_AS, "float64") and "quantization_config" in (read_config(base) or {}):
        raise BadInput(
            f"{index.where} holds {name!r} in {dtype}, and {base.url} is quantised: such weights are not "
            f"exported.",
            hint="Load them into a model in floating point, and export what that saves.",
            details={"tensor": name},
        )


def _as_it_is(spec: TensorSpec) -> Segment:
    """Map a tensor to itself: it has its published name already (an import, or transformers' modules)."""
    axes = tuple(range(len(spec.shape)))
    return Segment(whole(spec.shape), spec.name, (0,) * len(axes), axes, spec.shape)


def _code(spec: TensorSpec, dtype: str | None) -> int:
    """Return the code of the dtype in which a tensor is written."""
    name = DTYPES[spec.dtype].name
    if dtype is not None and dtype not in WRITTEN_AS:
        raise BadInput(f"dtype={dtype!r} is none of {', '.join(WRITTEN_AS)}.")
    if hf.CODE_OF_TAG.get(DTYPES[spec.dtype].tag) != spec.dtype or DTYPES[spec.dtype].extra != 1:
        raise BadInput(f"{spec.name!r} is {name}, which safetensors has no name for; convert it first.")
    # A router's bias selects experts by small differences; transformers does not convert it either.
    if dtype is None or name not in WRITTEN_AS or spec.name.endswith("expert_bias"):
        return spec.dtype
    return CODE_OF[dtype]


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key that puts layer 2 before layer 10."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in _PARTS.split(name)]


def _check_covered(tensor: PublishedTensor, where: str) -> None:
    """Raise CoverageError unless each element comes from exactly one piece."""
    first = tensor.pieces[0].segment
    if any(piece.segment.whole != first.whole for piece in tensor.pieces):
        raise CoverageError(f"The parts of {tensor.name!r} in {where} disagree about its shape.")
    boxes = [piece.segment.theirs(piece.segment.box) for piece in tensor.pieces]
    problem = first_problem(
        np.asarray([first.whole], np.int64).reshape(1, -1),
        np.zeros(len(boxes), np.int64),
        np.asarray([box.offset for box in boxes], np.int64).reshape(len(boxes), -1),
        np.asarray([box.shape for box in boxes], np.int64).reshape(len(boxes), -1),
    )
    if problem is not None:
        raise CoverageError(
            f"{where} does not make up {tensor.name!r} of shape {list(tensor.shape)}: {problem.kind} from "
            f"index {list(problem.place)} on.",
            hint="Layers or experts are missing from the checkpoint, or like= is another model's.",
            details={"tensor": tensor.name},
        )


def missing_tensors(
    tensors: Sequence[PublishedTensor], base: LocalStore, strict: bool, layers: int | None = None
) -> list[str]:
    """List the tensors of the published folder that the checkpoint does not have; compare names and shapes.

    strict: raise MissingTensors for them, and BadInput for a folder without weights.
    layers: the number of the model's layers, if later ones, for multi-token prediction, may be missing.
    """
    if not HuggingFaceFolder.is_one(base):
        if strict:
            raise BadInput(
                f"{base.url} holds no weights, so whether the checkpoint has all of the model can't be told.",
                hint="Give a folder with weights, or strict=False (--partial).",
            )
        return []
    folder = HuggingFaceFolder(base)
    names = {name.removesuffix("_blocks") for name in folder.names() if hf.is_weight(name)}
    mine = {tensor.name for tensor in tensors}
    extra, missing = sorted(mine - names), sorted(names - mine, key=_natural)
    if extra:
        near = nearest(extra[0], missing or sorted(names))
        raise BadInput(
            f"The checkpoint makes up {len(extra)} tensors that {base.url} does not have: {listed(extra)}.",
            hint=f"The nearest there is {near!r}." if near else "",
        )
    needed = [name for name in missing if layers is None or _layer(name) < layers]
    if needed and strict:
        raise MissingTensors(
            f"The checkpoint has nothing for {len(needed)} tensors of {base.url}: {listed(needed)}.",
            hint="Layers that predict further tokens may be left out with strict=False (--partial).",
            details={"missing": needed[:100]},
        )
    for tensor in tensors:
        place = folder.place(tensor.name)
        if place is not None and place.shape != tensor.shape:
            raise BadInput(
                f"{tensor.name!r} has shape {list(place.shape)} in {base.url}, and the checkpoint's weights "
                f"make {list(tensor.shape)} of it."
            )
    return missing


def _layer(name: str) -> int:
    """Return the layer number in a published tensor's name; -1 if there is none."""
    match = _LAYER.search(name)
    return int(match[1]) if match else -1


def share_among_files(
    tensors: Sequence[PublishedTensor], limit: int
) -> list[tuple[str, list[PublishedTensor]]]:
    """Distribute tensors over files, which are named as transformers does."""
    parts: list[list[PublishedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if parts[-1] and size + tensor.nbytes > limit:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.nbytes
    if len(parts) == 1:
        return [(hf.WEIGHTS, parts[0])]
    return [
        (f"model-{number:05d}-of-{len(parts):05d}.safetensors", part) for number, part in enumerate(parts, 1)
    ]
