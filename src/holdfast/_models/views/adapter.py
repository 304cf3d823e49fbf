"""An adapter as PEFT writes it, and which published tensors of its base model it changes. No torch.

PEFT names an adapter's tensors by transformers' modules. Where these are published otherwise, as experts that
transformers keeps in one tensor, the table of the model's type locates them, as it does for a load.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from holdfast._core.base.values import amount
from holdfast._core.format.digest import digest, hex_digest
from holdfast._core.layout.box import whole
from holdfast._core.layout.tensor import DTYPES, FLOATS, Dims, counted
from holdfast._core.store.base import Store
from holdfast._models.views.adapter_config import read_adapter_config
from holdfast._models.views.adapter_targets import tell_left_out
from holdfast._models.views.family import language_model
from holdfast._models.views.hub_format import Place
from holdfast._models.views.hugging_face import HuggingFaceFolder
from holdfast._models.views.mapping import same, shape_made
from holdfast._models.views.published_model import PublishedModel
from holdfast._models.views.quantized import IN_8_BITS
from holdfast._models.views.segments import Segment
from holdfast.errors import BadInput, ShapeMismatch

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What all names of an adapter's tensors begin with: PEFT's wrappers around the model."""
_PICKLED = "adapter_model.bin"
_BASE = ".base_layer"
"""What a wrapper of PEFT's calls the module inside of it."""
_LORA = re.compile(
    r"(?P<module>.+?)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?P<end>weight|bias))?"
)
_TURNED = ("gpt_oss", "openai_privacy_filter")
"""Model types of which transformers declares that experts have inputs along rows (`is_transposed`)."""
_WRAPPED = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"\.(?P<adapter>[^.]+)(?P<end>\.weight|\.bias)?"
)
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")
"""In a model that PEFT has wrapped, names have that of the adapter in them, such as `default`."""
_INCOMPLETE = "The file is incomplete, or written from shards of parameters; save the adapter again."
_METHODS = re.compile(r"\.(hada|lokr|vera|oft|ia3|lora_E|prompt|boft|hra|randlora)[_.]")


class Product(NamedTuple):
    """What is added to a weight: the product of two matrices, scaled."""

    a: Place
    """[rank, inputs]; of experts, [experts * rank, inputs]; of an embedding, [rank, words]."""
    b: Place
    """[outputs, rank]; of experts, [outputs, rank * experts], where experts take turns."""
    scale: float
    experts: int = 0
    """How many experts the tensor has; 0: it is a matrix."""
    is_turned: bool = False
    """Does the tensor have inputs along rows, as an embedding has words?"""
    magnitude: Place | None = None
    """DoRA: the norms that rows have after the merge."""
    is_rounded: bool = False
    """Is the product rounded to the weight's dtype before it is added? PEFT does so for embeddings, and for
    parameters without a module."""


class Vector(NamedTuple):
    """What is added to a bias: a vector, scaled."""

    vector: Place
    scale: float


class Trained(NamedTuple):
    """A tensor that was trained itself, and takes the place of the base model's."""

    tensor: Place


class Change(NamedTuple):
    """A change of a part of a published tensor."""

    segment: Segment
    """Which part, and which part of the tensor that the adapter was made for."""
    by: Product | Vector | Trained


class Adapter:
    """The folder of an adapter. Its matrices are read whole where they are needed."""

    def __init__(self, store: Store) -> None:
        """Raises BadInput for a folder without an adapter, for pickled weights, and for a method that is not
        read."""
        self.config = read_adapter_config(store)
        if store.stat(ADAPTER_WEIGHTS) is None:
            pickled = store.stat(_PICKLED) is not None
            if pickled:
                raise BadInput(
                    f"{store.url} holds its weights pickled ({_PICKLED}), and loading a pickle "
                    "may run code that it holds.",
                    hint="Have PEFT write it as safetensors: from_pretrained, then save_pretrained.",
                )
            raise BadInput(
                f"{store.url} holds no {ADAPTER_WEIGHTS}.",
                hint="Give the folder that PEFT's save_pretrained wrote.",
            )
        self.url, self.weights = store.url, HuggingFaceFolder(store, ADAPTER_WEIGHTS)
        self._is_told = False
        self._identity = f"{self.weights.identity} {self.config.identity}"

    def identity_with(self, base: str) -> str:
        """Return an identity of the adapter, without its elements, together with that of its base model."""
        return hex_digest(digest(f"{base} {self._identity}".encode()))

    def identity_of_elements(self) -> str:
        """Return an identity of the adapter, its elements included, which are read for it."""
        digests = [hex_digest(digest(self.weights.read_rows(name))) for name in self.weights.names()]
        return hex_digest(digest(" ".join([self._identity, *digests]).encode()))

    def files(self) -> dict[str, str]:
        """Return the file of each of its tensors."""
        return dict.fromkeys(self.weights.names(), ADAPTER_WEIGHTS)

    @cached_property
    def trained(self) -> frozenset[str]:
        """The names of the base model's tensors that were trained in place, such as biases."""
        inner = [name.removeprefix(PREFIX) for name in self.weights.names()]
        return frozenset(name.replace(_BASE, "") for name in inner if not _LORA.fullmatch(name))

    def changes(self, base: PublishedModel) -> dict[str, list[Change]]:
        """Return the changes of published tensors, by their names.

        Raises BadInput for what the base model does not have, ShapeMismatch for another shape than it has.
        """
        changes: dict[str, list[Change]] = defaultdict(list)
        unknown: list[str] = []
        for name, by, experts in self._by_tensor(base):
            segments = _segments(base, name, _shape_of(by, experts))
            if segments is None:
                unknown.append(name)
                continue
            for segment in segments:
                self._check(base, name, segment, by)
                changes[segment.name].append(Change(segment, by))
        if unknown:
            raise BadInput(
                f"The adapter {self.url} changes {amount(len(unknown), 'tensor')} that {base.where} does not "
                f"have: {counted(unknown)}.",
                hint="It is of another model, or was trained with a version of transformers that calls these "
                "otherwise.",
                details={"unknown": unknown[:100]},
            )
        self._refuse_tied(base, changes)
        if not self._is_told:
            self._is_told = tell_left_out(self.url, self.config, base, changes)
        for some in changes.values():  # a copy of the base model's own comes before what is added to it
            some.sort(key=lambda change: not isinstance(change.by, Trained))
        return dict(changes)

    def _by_tensor(self, base: PublishedModel) -> Iterator[tuple[str, Product | Vector | Trained, int]]:
        """Yield the names of transformers' tensors with their changes, and how many experts they have."""
        modules: dict[str, dict[str, Place]] = defaultdict(dict)
        for name in self.weights.names():
            place = self.weights.place(name)
            assert place is not None
            if _METHODS.search(name) or not name.startswith(PREFIX):
                raise BadInput(
                    f"{self.weights.where} holds {name[:200]!r}, which is no name of LoRA's.",
                    hint="Give the folder that PEFT's save_pretrained wrote.",
                    details={"tensor": name[:200]},
                )
            if place.code not in FLOATS:
                raise BadInput(
                    f"{self.weights.where} holds {name!r} in {DTYPES[place.code].name}; an adapter is read "
                    "in floating point only.",
                    details={"tensor": name},
                )
            match = _LORA.fullmatch(name.removeprefix(PREFIX))
            if match is None:
                yield name.removeprefix(PREFIX).replace(_BASE, ""), Trained(place), 0
                continue
            end = ".bias" if match["end"] == "bias" else ""
            modules[match["module"]][match["part"] + end] = place
        if not modules:  # it would be merged into nothing
            raise BadInput(f"{self.weights.where} does not hold any matrices of LoRA.", hint=_INCOMPLETE)
        nested: dict[str, list[str]] = defaultdict(list)
        for module in modules:
            nested[module.replace(_BASE, "")].append(module)
        for module, wrappers in nested.items():
            if len(wrappers) > 1 or not self._is_module(base, module, modules[wrappers[0]]):
                yield from self._of_parameters(base, module, [modules[one] for one in wrappers])
            else:
                yield from self._of_module(module, modules[wrappers[0]])

    @staticmethod
    def _is_module(base: PublishedModel, module: str, parts: dict[str, Place]) -> bool:
        """Return whether a module of this name has a weight, and is not only the owner of parameters."""
        return _published_shape(base, f"{module}.weight") is not None or "lora_A" not in parts

    def _of_module(self, module: str, parts: dict[str, Place]) -> Iterator[tuple[str, Product | Vector, int]]:
        is_embedding = "lora_embedding_A" in parts
        a, b = self._pair(module, parts, "lora_embedding_A" if is_embedding else "lora_A")
        magnitude = parts.get("lora_magnitude_vector")
        if (magnitude is not None) != self.config.use_dora or (magnitude is not None and is_embedding):
            what = "an embedding" if is_embedding else f"use_dora={self.config.use_dora}"
            raise BadInput(
                f"{self.weights.where} {'holds' if magnitude else 'lacks'} a lora_magnitude_vector of "
                f"{module!r}, with {what}: Holdfast does not read this.",
                hint="Merge it into its model (PEFT: merge_and_unload, then save_pretrained).",
            )
        scale = self._scale(module, a, b, 1)
        yield f"{module}.weight", Product(a, b, scale, 0, is_embedding, magnitude, is_embedding), 0
        if "lora_B.bias" in parts:
            yield f"{module}.bias", Vector(parts["lora_B.bias"], scale), 0

    def _of_parameters(
        self, base: PublishedModel, module: str, wrappers: list[dict[str, Place]]
    ) -> Iterator[tuple[str, Product, int]]:
        """Yield the changes of parameters of a module. The file does not name them: they are those of
        `target_parameters` that matrices of these shapes fit."""
        names = [
            f"{module}.{last}" for last in sorted({one.rpartition(".")[2] for one in self.config.parameters})
        ]
        shapes = {name: shape for name in names if (shape := _published_shape(base, name)) is not None}
        for parts in wrappers:
            a, b = self._pair(module, parts, "lora_A")
            fitting: list[tuple[str, Product, int]] = []
            for name, shape in shapes.items():
                experts = shape[0] if len(shape) == 3 else 1
                rank = self.config.rank(name)
                if a.shape[0] != experts * rank or b.shape[1] != experts * rank:
                    continue
                turned = len(shape) == 3 and language_model(base.config).get("model_type") in _TURNED
                if shape[-2:] == ((b.shape[0], a.shape[1]), (a.shape[1], b.shape[0]))[turned]:
                    scale = self._scale(name, a, b, experts)
                    many = experts if len(shape) == 3 else 0
                    fitting.append((name, Product(a, b, scale, many, turned, is_rounded=True), many))
            if len(fitting) != 1:
                said = "none of its parameters" if not fitting else "more than one of its parameters"
                raise BadInput(
                    f"{self.weights.where} holds matrices of {list(b.shape)} and {list(a.shape)} for "
                    f"{module!r}, which fit {said}{f' ({counted(names)})' if names else ''}, so which one "
                    f"they change can't be told.",
                    hint="The base model may be another one. Otherwise merge it into its model (PEFT: "
                    "merge_and_unload, then save_pretrained).",
                    details={"tensor": a.name},
                )
            yield fitting[0]

    def _pair(self, module: str, parts: dict[str, Place], first: str) -> tuple[Place, Place]:
        a, b = parts.get(first), parts.get(first.replace("_A", "_B"))
        if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2:
            raise BadInput(
                f"{self.weights.where} does not hold two matrices, {first} and {first.replace('_A', '_B')}, "
                f"for {module!r}.",
                hint=_INCOMPLETE,
                details={"module": module},
            )
        return a, b

    def _scale(self, name: str, a: Place, b: Place, experts: int) -> float:
        rank = self.config.rank(name) * experts
        if not a.shape[0] == b.shape[1] == rank:
            raise ShapeMismatch(
                f"{self.weights.where} holds matrices of {list(b.shape)} and {list(a.shape)} for {name!r}, "
                f"and {self.config.where} says that their rank is {rank}.",
                hint="Give the configuration that the adapter was saved with.",
                details={"tensor": a.name},
            )
        return self.config.scale(name)

    def _check(
        self, base: PublishedModel, name: str, segment: Segment, by: Product | Vector | Trained
    ) -> None:
        place = base.place(segment.name)
        if place is None:
            base.refuse_quantized(segment.name)
            raise BadInput(
                f"{base.where} does not hold {segment.name!r} in a form to which an adapter is added.",
                hint="Give the folder of the model before it was quantized.",
                details={"tensor": segment.name},
            )
        base.refuse_quantized(segment.name)
        dora = isinstance(by, Product) and by.magnitude is not None
        if segment.split or (dora and place.code == IN_8_BITS) or place.code not in (*FLOATS, IN_8_BITS):
            form = "gate and up taking turns" if segment.split else DTYPES[place.code].name
            raise BadInput(
                f"{base.where} holds {segment.name!r} with {form}, into which {self.url} can't be merged"
                f"{' by DoRA' if dora else ''}.",
                hint="Give the folder of the model in bfloat16, or merge it with PEFT.",
                details={"tensor": segment.name},
            )
        ours = _shape_of(by, by.experts if isinstance(by, Product) else 0)
        if segment.published != place.shape:
            raise ShapeMismatch(
                f"The adapter {self.url} is for {name!r} with shape {list(ours)}, and {base.where} holds "
                f"{segment.name!r} with shape {list(place.shape)}.",
                hint="It is of another base model, or was trained after the embedding had been resized; such "
                "an embedding is not merged."
                if "embed" in name or "lm_head" in name
                else "It is of another base model.",
                details={"tensor": segment.name},
            )
        if dora and by.magnitude.shape != place.shape[:1]:  # type: ignore[union-attr]
            raise ShapeMismatch(
                f"The lora_magnitude_vector of {name!r} in {self.url} has another length than {ours[0]}."
            )

    def _refuse_tied(self, base: PublishedModel, changes: dict[str, list[Change]]) -> None:
        if base.tied is not None and (touched := changes.keys() & {*base.tied}):
            raise BadInput(
                f"The adapter {self.url} changes {min(touched)!r}, and {base.where} holds the output and the "
                "embedding, and ties them: which of the two are changed depends on how it was trained.",
                hint="Set tie_word_embeddings to false in config.json, if only the named one was trained.",
                details={"tensors": sorted(touched)},
            )


def stored_name(name: str) -> str:
    """Return the name in an adapter's file, or in the base model, of a tensor of a model that PEFT has
    wrapped; the same name for any other."""
    inner = name.removeprefix(PREFIX)
    if inner == name:
        return name
    _, saved = _of_adapter(name)
    return saved or inner.replace(".original_module.", ".").replace(_BASE, "")


def file_name(name: str, adapter: str, bias: str) -> str | None:
    """Return the name in an adapter's file of a tensor of a model that PEFT has wrapped, whose name may have
    more before PEFT's; None if it is not of the adapter.

    adapter: its name in the model. bias: as in its configuration, which biases were trained.
    """
    before, prefix, after = name.partition(PREFIX)
    if not prefix or (before and not before.endswith(".")):
        return None
    whose, saved = _of_adapter(prefix + after)
    if saved:
        return saved if whose == adapter else None
    trained = {"all": ".bias", "lora_only": f"{_BASE}.bias"}.get(bias)
    is_bias = trained is not None and after.endswith(trained) and ".original_module." not in after
    return prefix + after if is_bias else None


def _of_adapter(name: str) -> tuple[str, str]:
    """Return the adapter that a tensor of a wrapped model belongs to, and its name in the adapter's file; two
    empty texts if it is the base model's."""
    if match := _WRAPPED.fullmatch(name):
        end = "" if match["part"] == "lora_magnitude_vector" else match["end"] or ""
        return match["adapter"], f"{match['module']}.{match['part']}{end}"
    if match := _SAVED.fullmatch(name):
        return match["adapter"], f"{match['module']}.{match['rest']}"
    return "", ""


def _shape_of(by: Product | Vector | Trained, experts: int) -> Dims:
    """Return the shape of the tensor that a change is for."""
    if isinstance(by, Trained):
        return by.tensor.shape
    if isinstance(by, Vector):
        return by.vector.shape
    sides = by.b.shape[0], by.a.shape[1]
    return (*((experts,) if experts else ()), *(sides[::-1] if by.is_turned else sides))


def _published_shape(base: PublishedModel, name: str) -> Dims | None:
    """Return the shape of a tensor by transformers' name; None if it is not known."""
    if (place := base.place(name)) is not None:
        return place.shape
    view = base.view_if_known
    found = view.find(name) if view is not None else None
    if view is None or found is None:
        return None
    entry, numbers, axes = found
    if any(axis != "expert" for axis in axes):
        return None
    rule, published = view.rule(entry, {**dict.fromkeys(axes, 0), **numbers})
    places = [base.place(one) for one in published]
    shapes = [place.shape for place in places if place is not None]
    if len(shapes) < len(places):
        return None
    return (*(view.sizes["num_experts"] for _ in axes), *shape_made(rule.way, shapes, view.sizes))


def _segments(base: PublishedModel, name: str, shape: Dims) -> list[Segment] | None:
    """Return the published parts that make up a tensor by transformers' name; None if it is not known."""
    if base.has(name):
        return same([name], shape, {})
    view = base.view_if_known
    if view is None or not view.knows(name):
        return None
    return [segment for segment in view.segments(name, shape, whole(shape)) if not segment.is_copy]
