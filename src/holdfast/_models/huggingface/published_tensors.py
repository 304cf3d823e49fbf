"""The plan of an export: the published tensors that the checkpoint's weights make up, the missing ones, and
the file of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import numpy as np

from holdfast._core.base.values import amount, natural
from holdfast._core.format.index import Index
from holdfast._core.format.names import is_weight
from holdfast._core.io.host_memory import batches
from holdfast._core.layout.box import whole
from holdfast._core.layout.coverage import first_problem
from holdfast._core.layout.tensor import (
    CODE_OF,
    DTYPES,
    FLOATS,
    TENSOR,
    Dims,
    TensorSpec,
    counted,
    nearest,
)
from holdfast._core.store.local import LocalStore
from holdfast._models.huggingface.export_dtypes import (
    WRITTEN_AS,
    CastLosses,
    check_kind,
    code_to_write,
    published_float,
)
from holdfast._models.views import hub_format as hf
from holdfast._models.views.family import OUTPUT, View, as_published, is_known, language_model, view_of
from holdfast._models.views.hugging_face import HuggingFaceFolder
from holdfast._models.views.mapping import same
from holdfast._models.views.prefixes import prefix_of
from holdfast._models.views.published_model import quantization_of, read_config
from holdfast._models.views.quantized import unpacked_name
from holdfast._models.views.segments import Segment
from holdfast.errors import BadInput, CoverageError, MissingTensors

_LAYER = re.compile(r"\.layers\.(\d+)\.")
OUTPUTS = ("output_layer.weight", OUTPUT)
"""Names of an output layer, Megatron's and transformers'."""


class Piece(NamedTuple):
    """A part of a published tensor: a segment of one of the checkpoint's tensors."""

    spec: TensorSpec
    segment: Segment


@dataclass
class PublishedTensor:
    """A published tensor, and the pieces that make it up."""

    name: str
    code: int
    shape: Dims
    pieces: list[Piece] = field(default_factory=list)
    losses: CastLosses = field(default_factory=CastLosses, init=False, compare=False)
    """What is lost of the values that were cast so far."""

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.code].size

    def stored(self) -> list[PublishedTensor]:
        """Return the tensors of the file, one after the other."""
        return [self]

    def check_infinite(self) -> None:
        """Raise BadInput if a value that was cast is infinite."""
        self.losses.refuse_infinite(self.name, self.code)

    def check_zeros(self) -> None:
        """Raise BadInput if the casts of the whole tensor have left only zeros of it."""
        self.losses.refuse_zeros(self.name, self.code)


class ModelPart(NamedTuple):
    """The weights of a checkpoint that are exported."""

    prefix: str
    """What their names begin with in the checkpoint, besides the model's own names, such as `model.`."""
    specs: list[TensorSpec]
    left_out: list[str]
    """Names of weights without this prefix."""


def config_of(base: LocalStore) -> dict[str, object]:
    """Return the configuration of a published folder. BadInput if it has none."""
    config = read_config(base)
    if config is None:
        raise BadInput(f"{base.url} has no {hf.CONFIG}.", hint="like= is the folder of the published model.")
    return config


def view_to_export(base: LocalStore) -> View:
    """Map a published folder to megatron-core's names and shapes, by its configuration; only where the
    language model is inside of another one, by the names of its tensors."""
    folder = HuggingFaceFolder.at(base)
    named = shape = None
    if folder is not None:
        named, shape = folder.has, folder.shape
    # inner=False: a multimodal model without a table has more weights than the language model's.
    return view_of(config_of(base), f"{base.url}/{hf.CONFIG}", inner=False, named=named, shape=shape)


def plan_export(
    index: Index,
    base: LocalStore,
    dtype: str | None,
    strict: bool,
    in_framework: bool,
    alike: Callable[[TensorSpec, TensorSpec], bool],
    prefix: str | None = None,
) -> tuple[list[PublishedTensor], list[str], ModelPart]:
    """Return the published tensors that the checkpoint's weights make up, in the natural order of their
    names, the names in the published folder that the checkpoint lacks, and which weights were taken.

    base: the published folder. A tensor of the checkpoint with a name from there is written unchanged.
    dtype: the dtype to write; None: as in that folder or, `in_framework`, as stored.
    strict: raise MissingTensors for missing tensors (`in_framework`, not for layers that predict further
        tokens, if it has none of them), and BadInput for a folder without weights.
    alike: whether two tensors of the checkpoint hold the same elements; asked for an output layer that the
        published model ties to its embedding.
    prefix: of the names in the checkpoint; None: find it.
    """
    if dtype is not None and dtype not in WRITTEN_AS:
        raise BadInput(f"dtype={dtype!r} is none of {', '.join(WRITTEN_AS)}.")
    config, folder = config_of(base), HuggingFaceFolder.at(base)
    if in_framework or folder is None or is_known(language_model(config)):
        view = view_to_export(base)
    else:
        view = as_published(config, f"{base.url}/{hf.CONFIG}", folder.has)
    is_quantized = quantization_of(config) is not None
    stored = filter(folder.is_weight, folder.names()) if folder is not None else ()
    published = set(map(unpacked_name, stored))
    said = [CODE_OF[str(name)] for name in map(config.get, hf.CONFIG_DTYPES) if name in WRITTEN_AS]

    def wanted_code(name: str) -> int | None:
        if dtype is not None:
            return CODE_OF[dtype]
        return None if in_framework else published_float(folder, name) or next(iter(said), None)

    by_name: dict[str, PublishedTensor] = {}
    part = _model_part(index, view, published, base, prefix)
    for spec in part.specs:
        name = spec.name.removeprefix(part.prefix)
        segments = (
            # It already has a published name (an import, or transformers' modules).
            same([name], spec.shape, {})
            if (name in published or (folder is None and not view.knows(name)))
            and not _is_in_another_layout(name, spec.shape, folder, view)
            else view.segments(name, spec.shape, whole(spec.shape))
        )
        for segment in segments:
            if segment.is_copy:
                continue
            check_kind(spec, segment.name, folder, index, base.url, is_quantized)
            code = code_to_write(spec, wanted_code(segment.name), dtype is None)
            tensor = by_name.setdefault(segment.name, PublishedTensor(segment.name, code, segment.published))
            tensor.pieces.append(Piece(spec, segment))
            if code != tensor.code:
                tensor.code = _more_exact(tensor, spec, code)
    tensors = sorted(by_name.values(), key=lambda tensor: natural(tensor.name))
    for tensor in tensors:
        if view.is_tied:
            _leave_out_tied_output(tensor, part.prefix, index.where, alike)
        _check_covered(tensor, index.where)
    if folder is None:
        if strict:
            raise BadInput(
                f"{base.url} holds no weights, so whether the checkpoint has all of the model can't be told.",
                hint="Give a folder with weights, or strict=False (--partial).",
            )
        _check_layers(tensors, view, base.url)
        return tensors, [], part
    missing = _missing(tensors, folder, base.url)
    needed = missing
    if in_framework:
        # A model may be trained without any of the layers that predict further tokens, not without some.
        has_some = any(view.predicts_further(tensor.name) for tensor in tensors)
        needed = [name for name in missing if not view.predicts_further(name)]
        needed += [name for name in missing if has_some and view.is_predictor(name)]
    if needed and strict:
        raise MissingTensors(
            f"The checkpoint has nothing for {amount(len(needed), 'tensor')} of {base.url}: "
            f"{counted(needed)}.",
            hint="Layers that predict further tokens may be left out with strict=False (--partial).",
            details={"missing": needed[:100]},
        )
    return tensors, missing, part


def _model_part(
    index: Index, view: View, published: set[str], base: LocalStore, prefix: str | None
) -> ModelPart:
    """Return the weights of a checkpoint. BadInput for weights that map to no published tensor."""
    names = [name for name in index.names() if is_weight(name) and not hf.is_constant(name)]
    specs = [spec for spec in index.select(index.find(names)).specs() if spec.kind == TENSOR]
    weights = [spec.name for spec in specs]

    def fits(name: str) -> bool:
        # A folder without weights does not list the published names; the table does.
        return name in published or view.knows(name) or (not published and view.names(name))

    if prefix is None:
        hint = 'Choose one with prefix= (--prefix), such as prefix="model".'
        prefix = prefix_of(weights, fits, index.where, hint)
    elif prefix:
        prefix = prefix.removesuffix(".") + "."
        if not any(name.startswith(prefix) for name in weights):
            near = nearest(prefix, {name.partition(".")[0] + "." for name in weights})
            raise BadInput(
                f"{index.where} holds no weight under {prefix.removesuffix('.')!r}.",
                hint=f"The nearest there is {near.removesuffix('.')!r}." if near else "",
            )
    part = ModelPart(
        prefix,
        [spec for spec in specs if spec.name.startswith(prefix)],
        [name for name in weights if not name.startswith(prefix)],
    )
    unknown = [spec.name for spec in part.specs if not fits(spec.name.removeprefix(prefix))]
    if unknown:
        if view.is_of_no_table:
            view_to_export(base)  # raises BadInput, with the nearest type
        raise BadInput(
            f"{index.where} holds {amount(len(unknown), 'weight')} that the family {view.family.name!r} has "
            f"no place for: {counted(unknown)}.",
            hint="An adapter must be merged into the weights first; scales of quantized weights are not "
            "exported; a checkpoint of another model needs that model's folder.",
            details={"unknown": unknown[:100]},
        )
    return part


def _is_in_another_layout(name: str, shape: Dims, folder: HuggingFaceFolder | None, view: View) -> bool:
    """Return whether a tensor with a published name is published in another layout."""
    return folder is not None and view.has_layouts(name) and folder.shape(name) != shape


def _leave_out_tied_output(
    tensor: PublishedTensor, prefix: str, where: str, alike: Callable[[TensorSpec, TensorSpec], bool]
) -> None:
    """Leave out an output layer that the published model ties to its embedding, if the checkpoint has both.

    Raises BadInput if they differ.
    """
    outputs = [piece for piece in tensor.pieces if piece.spec.name.removeprefix(prefix) in OUTPUTS]
    others = [piece for piece in tensor.pieces if piece not in outputs]
    if not outputs or not others:
        return
    output, embedding = outputs[0].spec, others[0].spec
    if not alike(output, embedding):
        raise BadInput(
            f"{where} holds {output.name!r} and {embedding.name!r}, which are not equal bit for bit, and the "
            "published model's output is its embedding (tie_word_embeddings).",
            hint="If the model was trained so, set tie_word_embeddings to false in the published "
            "config.json.",
            details={"tensors": [output.name, embedding.name]},
        )
    tensor.pieces = others


def _more_exact(tensor: PublishedTensor, spec: TensorSpec, code: int) -> int:
    """Return the more exact of the dtypes of a tensor and of one more piece. BadInput if they can't be
    converted into each other."""
    if code in FLOATS and tensor.code in FLOATS:
        return min(code, tensor.code, key=FLOATS.index)
    raise BadInput(
        f"{tensor.name!r} is made up of {tensor.pieces[0].spec.name!r} in {DTYPES[tensor.code].name} and "
        f"{spec.name!r} in {DTYPES[code].name}, which an export does not convert into each other.",
        hint="Save both in one dtype.",
        details={"tensors": [tensor.pieces[0].spec.name, spec.name]},
    )


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
            hint="Layers or experts are missing from the checkpoint, or the folder is another model's.",
            details={"tensor": tensor.name},
        )


def _check_layers(tensors: Sequence[PublishedTensor], view: View, where: str) -> None:
    """Raise MissingTensors if a whole layer is missing that the configuration announces: transformers would
    give it random elements."""
    if view.is_of_no_table:
        return
    inner = (_LAYER.search(tensor.name) for tensor in tensors if view.is_of_language_model(tensor.name))
    numbers = {int(found[1]) for found in inner if found}
    lacking = next(number for number in count() if number not in numbers)
    if numbers and lacking < view.sizes["num_hidden_layers"]:
        raise MissingTensors(
            f"The checkpoint has nothing for layer {lacking}, and {where}/{hf.CONFIG} says that there are "
            f"{view.sizes['num_hidden_layers']} layers.",
            hint="Give the config.json of the model as it was trained.",
        )


def _missing(tensors: Sequence[PublishedTensor], folder: HuggingFaceFolder, where: str) -> list[str]:
    """List the tensors of the published folder that the checkpoint lacks. BadInput for exported tensors that
    the folder lacks, or has in another shape."""
    names = {unpacked_name(name) for name in folder.names() if folder.is_weight(name)}
    mine = {tensor.name for tensor in tensors}
    extra, missing = sorted(mine - names), sorted(names - mine, key=natural)
    if extra:
        near = nearest(extra[0], missing or sorted(names))
        raise BadInput(
            f"The checkpoint makes up {amount(len(extra), 'tensor')} that {where} does not have: "
            f"{counted(extra)}.",
            hint=f"The nearest there is {near!r}." if near else "",
        )
    for tensor in tensors:
        shape = folder.shape(tensor.name)
        if shape is not None and shape != tensor.shape:
            raise BadInput(
                f"{tensor.name!r} has shape {list(shape)} in {where}, and the checkpoint's weights "
                f"make {list(tensor.shape)} of it."
            )
    return missing


def share_among_files(
    tensors: Sequence[PublishedTensor], limit: int
) -> list[tuple[str, list[PublishedTensor]]]:
    """Distribute tensors over files, with transformers' file names."""
    parts = list(batches(tensors, limit)) or [[]]
    if len(parts) == 1:
        return [(hf.WEIGHTS, parts[0])]
    return [
        (f"model-{number:05d}-of-{len(parts):05d}.safetensors", part) for number, part in enumerate(parts, 1)
    ]
