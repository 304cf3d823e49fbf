"""How an inference engine holds published tensors in its parameters: forms, and the tables that name them.

A form gives the segments (`mapping.Segment`) of one parameter on one rank: which boxes of which published
tensors it consists of. The rest of a parameter is padding. `engines/vllm.toml` has the forms of vLLM's
parameters; a family's table names the parts of it that its models consist of. No torch here.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import msgspec

from holdfast._core.layout.box import Box, whole
from holdfast._core.layout.tensor import Dims, nearest
from holdfast._core.ready import ready
from holdfast._models.views import tables
from holdfast._models.views.segments import Segment
from holdfast.errors import BadInput

ZERO = "zero"
"""A change of elements: zeros. The results of all ranks are added, and another rank has the elements."""


class Misfit(Exception):
    """A parameter is not as the engine's loader fills it."""


class Layer(NamedTuple):
    """What the module of a parameter says of itself, on this rank."""

    rank: int
    """Among the ranks that share the module's parameters."""
    size: int
    """Number of these ranks."""
    numbers: Mapping[str, int]
    """Of the module, and of the model's configuration."""
    output_sizes: tuple[int, ...] = ()
    """Rows of each of the tensors that are joined in the module, over all ranks."""
    vocabulary: tuple[int, int, int] = (0, 0, 0)
    """First and last row of this rank, and their number over all ranks, without padding."""
    experts: tuple[int, ...] = ()
    """The experts in the module, in its order."""
    all_experts: int = 0


Form = Callable[[Sequence[str], Dims, Layer], list[Segment]]


def replicated(names: Sequence[str], shape: Dims, layer: Layer) -> list[Segment]:
    """The published tensor itself, on every rank."""
    return [Segment(whole(shape), names[0], (0,) * len(shape), tuple(range(len(shape))), shape)]


def rows(names: Sequence[str], shape: Dims, layer: Layer) -> list[Segment]:
    """Of each tensor an equal share of its rows by rank, one below the other."""
    _check_axes(shape, 1, 2)
    sizes = layer.output_sizes if len(names) > 1 else (shape[0] * layer.size,)
    return _stacked([(name, size) for name, size in zip(names, sizes, strict=False)], shape, layer)


def columns(names: Sequence[str], shape: Dims, layer: Layer) -> list[Segment]:
    """An equal share of the columns by rank; a bias whole."""
    _check_axes(shape, 1, 2)
    if len(shape) == 1:
        return replicated(names, shape, layer)
    return [_cut(names[0], shape, 1, (0, shape[1]), layer.rank * shape[1], layer.size * shape[1])]


def heads(names: Sequence[str], shape: Dims, layer: Layer) -> list[Segment]:
    """Queries, keys and values of some heads; of keys and values several ranks may have the same. They are
    published in three tensors, or all of each below the other in one."""
    _check_axes(shape, 1, 2)
    of = layer.numbers
    sides = (of["head_size"], of["head_size"], of.get("v_head_size", of["head_size"]))
    mine = (of["num_heads"], of["num_kv_heads"], of["num_kv_heads"])
    total = (of["total_num_heads"], of["total_num_kv_heads"], of["total_num_kv_heads"])
    place = layer.rank // of["num_kv_head_replicas"]
    if sum(side * many for side, many in zip(sides, mine, strict=True)) != shape[0]:
        raise Misfit
    segments, first, above = [], 0, 0
    everything = sum(side * many for side, many in zip(sides, total, strict=True))
    for part, (side, many, whole_of) in enumerate(zip(sides, mine, total, strict=True)):
        start = (layer.rank if part == 0 else place) * many * side
        name, all_rows = (names[part], whole_of * side) if len(names) == 3 else (names[0], everything)
        start += above if len(names) == 1 else 0
        segments.append(_cut(name, shape, 0, (first, many * side), start, all_rows))
        first, above = first + many * side, above + whole_of * side
    return segments


def vocabulary(names: Sequence[str], shape: Dims, layer: Layer) -> list[Segment]:
    """A share of the rows by rank, and padding below."""
    _check_axes(shape, 1, 2)
    start, stop, total = layer.vocabulary
    if shape[0] < stop - start or not total:
        raise Misfit
    return [_cut(names[0], shape, 0, (0, stop - start), start, total)] if stop > start else []


def delta_rows(names: Sequence[str], shape: Dims, layer: Layer) -> list[Segment]:
    """Of the queries, the keys and the values of a gated delta net a share by rank; they are published one
    below the other in one tensor."""
    of = layer.numbers
    keys = of["linear_num_key_heads"] * of["linear_key_head_dim"]
    parts = (keys, keys, of["linear_num_value_heads"] * of["linear_value_head_dim"])
    segments = _stacked([(names[0], size) for size in parts], shape, layer)
    above = [sum(parts[:part]) for part in range(len(parts))]
    return [
        one._replace(start=(one.start[0] + more, *one.start[1:]), whole=(sum(parts), *shape[1:]))
        for one, more in zip(segments, above, strict=True)
    ]


def expert_rows(names: Sequence[str], shape: Dims, layer: Layer) -> list[Segment]:
    """Experts, each of several tensors one below the other, of which a rank has a share of the rows."""
    _check_axes(shape, 2, 3)
    if shape[1] % len(names):
        raise Misfit
    many = shape[1] // len(names)
    inside = (many, *shape[2:])
    return [
        Segment(
            Box((slot, part * many, *(0,) * len(shape[2:])), (1, *inside)),
            name.format(expert=expert),
            (layer.rank * many, *(0,) * len(shape[2:])),
            (-1, *range(len(inside))),
            (many * layer.size, *shape[2:]),
        )
        for slot, expert in _experts(shape, layer)
        for part, name in enumerate(names)
    ]


def expert_columns(names: Sequence[str], shape: Dims, layer: Layer) -> list[Segment]:
    """Experts, of each of which a rank has a share of the columns."""
    _check_axes(shape, 3, 3)
    return [
        Segment(
            Box((slot, 0, 0), (1, *shape[1:])),
            names[0].format(expert=expert),
            (0, layer.rank * shape[2]),
            (-1, 0, 1),
            (shape[1], shape[2] * layer.size),
        )
        for slot, expert in _experts(shape, layer)
    ]


def experts_turned_rows(names: Sequence[str], shape: Dims, layer: Layer) -> list[Segment]:
    """Experts, of each of which a rank has a share of the rows. All are published in one tensor, with inputs
    along rows."""
    _check_axes(shape, 2, 3)
    axes = (0, 2, 1) if len(shape) == 3 else (0, 1)
    total = (layer.all_experts, *shape[2:], shape[1] * layer.size)
    return [
        Segment(
            Box((slot, *(0,) * len(shape[1:])), (1, *shape[1:])),
            names[0],
            (expert, *(0,) * len(shape[2:]), layer.rank * shape[1]),
            axes,
            total,
        )
        for slot, expert in _experts(shape, layer)
    ]


def experts_turned_columns(names: Sequence[str], shape: Dims, layer: Layer) -> list[Segment]:
    """Experts, of each of which a rank has a share of the columns. All are published in one tensor, with
    inputs along rows."""
    _check_axes(shape, 3, 3)
    total = (layer.all_experts, shape[2] * layer.size, shape[1])
    return [
        Segment(
            Box((slot, 0, 0), (1, *shape[1:])),
            names[0],
            (expert, layer.rank * shape[2], 0),
            (0, 2, 1),
            total,
        )
        for slot, expert in _experts(shape, layer)
    ]


def experts_added(names: Sequence[str], shape: Dims, layer: Layer) -> list[Segment]:
    """All experts' biases, published in one tensor, on the first of the ranks whose results are added; zeros
    on the others."""
    return [
        Segment(
            Box((slot, 0), (1, *shape[1:])),
            names[0],
            (expert, 0),
            (0, 1),
            (layer.all_experts, *shape[1:]),
            change=ZERO if layer.rank else "",
        )
        for slot, expert in _experts(shape, layer)
    ]


FORMS: dict[str, Form] = {
    form.__name__: form
    for form in (
        *(replicated, rows, columns, heads, vocabulary, delta_rows),
        *(expert_rows, expert_columns, experts_turned_rows, experts_turned_columns, experts_added),
    )
}


def _check_axes(shape: Dims, least: int, most: int) -> None:
    if not least <= len(shape) <= most:
        raise Misfit


def _stacked(parts: Sequence[tuple[str, int]], shape: Dims, layer: Layer) -> list[Segment]:
    """Return a share by rank of the rows of each part: (published name, number of all its rows)."""
    if not shape or sum(size for _, size in parts) != shape[0] * layer.size:
        raise Misfit
    segments, first = [], 0
    for name, size in parts:
        many = size // layer.size
        segments.append(_cut(name, shape, 0, (first, many), layer.rank * many, size))
        first += many
    return segments


def _cut(name: str, shape: Dims, axis: int, ours: tuple[int, int], start: int, total: int) -> Segment:
    """Make a segment that is cut along one axis. ours: first index and number in the parameter. start: the
    first index in the published tensor, which has `total`."""
    offset, sides, begin = [0] * len(shape), list(shape), [0] * len(shape)
    offset[axis], sides[axis] = ours
    begin[axis] = start
    theirs = (*shape[:axis], total, *shape[axis + 1 :])
    return Segment(Box(tuple(offset), tuple(sides)), name, tuple(begin), tuple(range(len(shape))), theirs)


def _experts(shape: Dims, layer: Layer) -> Iterator[tuple[int, int]]:
    if shape[0] != len(layer.experts):
        raise Misfit
    return enumerate(layer.experts)


# -- tables ------------------------------------------------------------------------------------------------


class FormEntry(NamedTuple):
    """An entry of a part, for names that match `pattern`."""

    pattern: re.Pattern[str]
    form: Form
    names: tuple[str, ...]
    """Published names, with `{layer}` and `{expert}`."""


class Modules(msgspec.Struct, frozen=True):
    """What else an engine says of a module."""

    unquantized: tuple[str, ...]
    """Classes of methods whose parameters are as they were loaded."""
    processed: tuple[str, ...]
    """Attributes of modules whose parameters were changed after loading."""
    as_loaded: tuple[str, ...]
    """Backends whose kernels take experts as they were loaded."""


class _Part(NamedTuple):
    entries: tuple[FormEntry, ...]
    within: str = ""
    """The beginning of the language model's parameters."""
    inside: Mapping[str, str] = {}
    """Beginnings of its published names, and what they are inside of this model."""


class EngineForms:
    """The forms of all parameters of a model, by the parts that its tables name. outer: parts of the model
    that contains the language model."""

    def __init__(self, parts: Sequence[_Part], outer: Sequence[_Part] = ()) -> None:
        # Of two entries for a parameter, the one of the later part applies.
        self._entries = [entry for part in reversed(parts) for entry in part.entries]
        self._outer = [entry for part in reversed(outer) for entry in part.entries]
        wraps = [part for part in outer if part.within]
        self._within, self._inside = (wraps[0].within, wraps[0].inside) if wraps else ("", {})

    def find(self, parameter: str) -> tuple[Form, list[str]] | None:
        """Return the form of a parameter, and the published names; None if there is none."""
        inner = parameter.removeprefix(self._within)
        if self._within and inner == parameter:
            return _found(self._outer, parameter)
        found = _found(self._entries, inner)
        return found and (found[0], [self._placed(name) for name in found[1]])

    def _placed(self, name: str) -> str:
        for beginning, other in self._inside.items():
            if name.startswith(beginning):
                return other + name[len(beginning) :]
        return name


def _found(entries: Sequence[FormEntry], parameter: str) -> tuple[Form, list[str]] | None:
    module, _, leaf = parameter.rpartition(".")
    for name, ending in ((parameter, ""), (module, f".{leaf}")):
        for entry in entries if not ending or leaf in ("weight", "bias") else ():
            if match := entry.pattern.fullmatch(name):
                places = {**match.groupdict(), "expert": "{expert}"}
                return entry.form, [one.format(**places) + ending for one in entry.names]
    return None


@cache
def _table() -> dict[str, dict[str, object]]:
    text = (files("holdfast._models.views") / "engines" / "vllm.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def modules() -> Modules:
    """Return what vLLM says of modules besides their parameters."""
    return msgspec.convert(_table()["modules"], ready(Modules))


@cache
def _parts() -> dict[str, _Part]:
    parts = {}
    for name, said in _table().items():
        if name == "modules":
            continue
        sections = {key: rules for key, rules in said.items() if key.endswith("*")}
        entries = [
            _entry(key.removesuffix("*"), rules, ours, text)
            for key, rules in msgspec.convert(sections, ready(dict[str, dict[str, str]])).items()
            for ours, text in rules.items()
            if ours != "published"
        ]
        inside = msgspec.convert(said.get("inside", {}), ready(dict[str, str]))
        parts[name] = _Part(tuple(entries), str(said.get("within", "")), inside)
    return parts


_ENTRY = re.compile(r"(?P<form>\w+)(?:\((?P<names>[^()]+)\))?")


def _entry(section: str, rules: Mapping[str, str], ours: str, text: str) -> FormEntry:
    match = _ENTRY.fullmatch(text)
    if match is None or match["form"] not in FORMS:
        raise BadInput(f"{text!r} of {ours!r} is no form.", hint=f"Write one of {', '.join(FORMS)}.")
    prefix = rules.get("published", section).removesuffix("*")
    names = tuple(prefix + name.strip() for name in (match["names"] or ours).split(","))
    pattern = re.escape(section + ours).replace(r"\{layer\}", r"(?P<layer>\d+)")
    return FormEntry(re.compile(pattern), FORMS[match["form"]], names)


def forms_of(config: Mapping[str, object], language_model: Mapping[str, object]) -> EngineForms:
    """Return the forms of a model of this configuration, and of the language model in it, which may be the
    same. BadInput if there are none."""
    inner = _of_type(str(language_model.get("model_type")))
    return EngineForms(inner, _of_type(str(config.get("model_type"))) if config is not language_model else ())


def _of_type(kind: str) -> list[_Part]:
    known, parts = tables.by_model_type(), _parts()
    if kind not in known or not known[kind].engine:
        others = sorted(kind for kind in known if known[kind].engine)
        raise BadInput(
            f"How vLLM holds a model of the type {kind!r} is in no table. Holdfast has it for "
            f"{', '.join(others)}.",
            hint="docs/engine.md shows how to add it.",
        )
    for name in known[kind].engine:
        if name not in parts:
            near = nearest(name, parts)
            raise BadInput(
                f"{known[kind].file}, engine: vLLM's models have no part {name!r}.",
                hint=f"The nearest is {near!r}." if near else f"They have {', '.join(parts)}.",
            )
    return [parts[name] for name in known[kind].engine]
