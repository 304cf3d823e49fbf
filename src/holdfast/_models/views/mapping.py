"""Maps the elements of a tensor to published tensors: the ways in which models split and join them.

A way takes the names of published tensors and the shape of ours, and gives segments (`segments`) that cover
ours exactly once. It computes nothing with elements, so every way also works backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast._core.layout.box import Box, whole
from holdfast._core.layout.tensor import Dims
from holdfast._models.views.segments import MINUS_ONE, Segment, Sizes, Way, equal_share, some_rows
from holdfast.errors import BadInput


def same(names: Sequence[str], shape: Dims, sizes: Sizes) -> list[Segment]:
    """The published tensor itself."""
    return [Segment(whole(shape), names[0], (0,) * len(shape), tuple(range(len(shape))), shape)]


def joined(names: Sequence[str], shape: Dims, sizes: Sizes) -> list[Segment]:
    """As `same`, of a gate above its up projection."""
    return same(names, shape, sizes)


def concat(names: Sequence[str], shape: Dims, sizes: Sizes) -> list[Segment]:
    """Equal parts, one below the other: gate and up."""
    rows = equal_share(shape[0], len(names), names)
    return [some_rows(name, shape, (index * rows, rows), 0, rows) for index, name in enumerate(names)]


def grouped(names: Sequence[str], shape: Dims, sizes: Sizes) -> list[Segment]:
    """Attention by groups of queries: of each group its queries, its key, its value."""
    return _in_groups(names, shape, sizes["num_attention_heads"], sizes["num_key_value_heads"])


def grouped_tied(names: Sequence[str], shape: Dims, sizes: Sizes) -> list[Segment]:
    """As `grouped`, of a global layer whose keys are its values, too: ours has a copy of the keys in the
    place of the values, which the model does not use. There are `num_global_key_value_heads` groups."""
    groups = sizes.get("num_global_key_value_heads", sizes["num_key_value_heads"])
    parts = _in_groups((*names, names[-1]), shape, sizes["num_attention_heads"], groups)
    return [part._replace(is_copy=place % 3 == 2) for place, part in enumerate(parts)]


def grouped_sized(names: Sequence[str], shape: Dims, sizes: Sizes) -> list[Segment]:
    """As `grouped`, with `head_dim` rows for a head of queries and keys, and `v_head_dim` for one of values.
    Layers may differ in the number of groups, which follows from the rows."""
    heads, key, value = sizes["num_attention_heads"], sizes["head_dim"], sizes["v_head_dim"]
    groups, rest = divmod(shape[0] - heads * key, key + value)
    if rest or groups < 1 or heads % groups:
        raise BadInput(
            f"{shape[0]} rows can't be made of {', '.join(names)}: they are not {heads} heads of {key} rows "
            f"and groups of {key + value}.",
            hint="Build the model with the sizes of config.json.",
        )
    return _of_groups(names, shape, groups, (heads // groups * key, key, value))


def _in_groups(names: Sequence[str], shape: Dims, all_heads: int, groups: int) -> list[Segment]:
    heads = all_heads // groups
    row = equal_share(shape[0], groups * (heads + 2), names)
    return _of_groups(names, shape, groups, (heads * row, row, row))


def _of_groups(names: Sequence[str], shape: Dims, groups: int, rows: Dims) -> list[Segment]:
    """Make the segments of all groups, of which each has these rows of the tensors `names`."""
    segments, first = [], 0
    for group in range(groups):
        for name, many in zip(names, rows, strict=True):
            segments.append(some_rows(name, shape, (first, many), group * many, groups * many))
            first += many
    return segments


def grouped_joined(names: Sequence[str], shape: Dims, sizes: Sizes) -> list[Segment]:
    """As `grouped`, of one tensor: all queries above all keys, these above all values."""
    heads, groups = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    row = equal_share(shape[0], heads + 2 * groups, names)
    above = {"queries": 0, "keys": heads * row, "values": (heads + groups) * row}
    return [
        some_rows(
            names[0],
            shape,
            (part.box.offset[0], part.box.shape[0]),
            above[part.name] + part.start[0],
            shape[0],
        )
        for part in grouped([*above], shape, sizes)
    ]


def gated(names: Sequence[str], shape: Dims, sizes: Sizes) -> list[Segment]:
    """As `grouped`, with a gate for each query: published, each head's query has its gate below it; ours, a
    group has all its queries, then all its gates."""
    groups = sizes["num_key_value_heads"]
    heads = sizes["num_attention_heads"] // groups
    row = equal_share(shape[0], groups * (2 * heads + 2), names)
    queries, *others = names
    segments, first = [], 0
    for group in range(groups):
        for part in range(2):
            for head in range(group * heads, (group + 1) * heads):
                start = (2 * head + part) * row
                segments.append(some_rows(queries, shape, (first, row), start, 2 * groups * heads * row))
                first += row
        for name in others:
            segments.append(some_rows(name, shape, (first, row), group * row, groups * row))
            first += row
    return segments


def padded(names: Sequence[str], shape: Dims, sizes: Sizes) -> list[Segment]:
    """The vocabulary, padded at its end to a number that ranks can share."""
    words = sizes["vocab_size"]
    if shape[0] < words:
        raise BadInput(
            f"{names[0]!r} has {words} rows, and the model has only {shape[0]}.",
            hint="Build the model with the vocabulary of config.json, padded or not.",
        )
    return [some_rows(names[0], shape, (0, words), 0, words)]


def lowered(names: Sequence[str], shape: Dims, sizes: Sizes) -> list[Segment]:
    """A norm's weight, of which ours is the difference to one."""
    return [segment._replace(change=MINUS_ONE) for segment in same(names, shape, sizes)]


def of_experts(names: Sequence[str], shape: Dims, sizes: Sizes) -> list[Segment]:
    """One expert's part of all experts' in one tensor."""
    published, axes = (sizes["num_experts"], *shape), tuple(range(1, len(shape) + 1))
    return [Segment(whole(shape), names[0], (sizes["expert"], *(0,) * len(shape)), axes, published)]


def of_experts_joined(names: Sequence[str], shape: Dims, sizes: Sizes) -> list[Segment]:
    """As `of_experts`, of a gate above its up projection."""
    return of_experts(names, shape, sizes)


def of_experts_turned(names: Sequence[str], shape: Dims, sizes: Sizes) -> list[Segment]:
    """As `of_experts`, with inputs along rows."""
    published = (sizes["num_experts"], shape[1], shape[0])
    return [Segment(whole(shape), names[0], (sizes["expert"], 0, 0), (2, 1), published)]


def of_experts_joined_turned(names: Sequence[str], shape: Dims, sizes: Sizes) -> list[Segment]:
    """As `of_experts_turned`, of a gate above its up projection: left of it, as published."""
    return of_experts_turned(names, shape, sizes)


def one_row(names: Sequence[str], shape: Dims, sizes: Sizes) -> list[Segment]:
    """Published as the only row of a matrix."""
    return [
        Segment(whole(shape), names[0], (0,) * (len(shape) + 1), tuple(range(1, len(shape) + 1)), (1, *shape))
    ]


def turned(names: Sequence[str], shape: Dims, sizes: Sizes) -> list[Segment]:
    """Published with inputs along rows."""
    return [Segment(whole(shape), names[0], (0, 0), (1, 0), (shape[1], shape[0]))]


def first_row(names: Sequence[str], shape: Dims, sizes: Sizes) -> list[Segment]:
    """The first of the two rows of a matrix."""
    return _row(names[0], shape, 0)


def second_row(names: Sequence[str], shape: Dims, sizes: Sizes) -> list[Segment]:
    """The second of the two rows of a matrix."""
    return _row(names[0], shape, 1)


def _row(name: str, shape: Dims, which: int) -> list[Segment]:
    """Ours has one axis, or a first one of one row."""
    axes = (0, 1)[-len(shape) :]
    return [Segment(whole(shape), name, (which, 0), axes, (2, shape[-1]))]


def _third(names: Sequence[str], shape: Dims, which: int) -> list[Segment]:
    return [some_rows(names[0], shape, (0, shape[0]), which * shape[0], 3 * shape[0])]


def first_of_three(names: Sequence[str], shape: Dims, sizes: Sizes) -> list[Segment]:
    """The first of three equal parts, one below the other."""
    return _third(names, shape, 0)


def second_of_three(names: Sequence[str], shape: Dims, sizes: Sizes) -> list[Segment]:
    """The second of three equal parts, one below the other."""
    return _third(names, shape, 1)


def third_of_three(names: Sequence[str], shape: Dims, sizes: Sizes) -> list[Segment]:
    """The third of three equal parts, one below the other."""
    return _third(names, shape, 2)


def of_experts_mixed(names: Sequence[str], shape: Dims, sizes: Sizes) -> list[Segment]:
    """One expert's gate above its up; published, inputs lie along rows, and gate and up take turns along
    columns. A bias has columns only."""
    rows, inputs = equal_share(shape[0], 2, names), shape[1:]
    segments = []
    for part in range(2):
        box = Box((part * rows, *(0,) * len(inputs)), (rows, *inputs))
        start = (sizes["expert"], *(0,) * len(inputs), 0, part)
        axes = (2, 1) if inputs else (1,)
        segments.append(
            Segment(box, names[0], start, axes, (sizes["num_experts"], *inputs, rows, 2), split=True)
        )
    return segments


def shape_made(way: str, shapes: Sequence[Dims], sizes: Sizes) -> Dims:
    """Return the shape of our tensor, from the shapes of the published tensors that it is made of."""
    first = shapes[0]
    if way in _HEADS:
        rows_of, part, _ = _HEADS[way]
        parts, heads = rows_of(sizes)
        return (parts[part] * heads, *first[1:])
    if way == "grouped_tied":
        shapes = (*shapes, shapes[-1])
    if way in ("concat", "grouped", "grouped_sized", "grouped_tied", "gated"):
        return (sum(shape[0] if shape else 1 for shape in shapes), *first[1:])
    # With too few axes, the result has too few as well, and `View.segments` refuses it.
    if way in ("of_experts", "of_experts_joined", "one_row", "first_row", "second_row"):
        return first[1:]
    if way in ("of_experts_turned", "of_experts_joined_turned"):
        return (*first[2:], *first[1:2])
    if way == "turned":
        return first[::-1]
    if way.endswith("_of_three"):
        return (first[0] // 3 if first else 0, *first[1:])
    if way == "of_experts_mixed":
        return (*first[-1:], *first[1:-1])
    return first


def _by_key_heads(sizes: Sizes) -> tuple[Dims, int]:
    keys, key = sizes["linear_num_key_heads"], sizes["linear_key_head_dim"]
    value = sizes["linear_num_value_heads"] // keys * sizes["linear_value_head_dim"]
    return (key, key, value, value), keys


def _by_value_heads(sizes: Sizes) -> tuple[Dims, int]:
    keys = sizes["linear_num_key_heads"]
    many = sizes["linear_num_value_heads"] // keys
    return (many, many), keys


def _stacked(sizes: Sizes) -> tuple[Dims, int]:
    key = sizes["linear_num_key_heads"] * sizes["linear_key_head_dim"]
    return (key, key, sizes["linear_num_value_heads"] * sizes["linear_value_head_dim"]), 1


def _mamba(sizes: Sizes) -> tuple[Dims, int]:
    inner, heads = sizes["mamba_num_heads"] * sizes["mamba_head_dim"], sizes["mamba_num_heads"]
    state = sizes["n_groups"] * sizes["ssm_state_size"]
    return (inner, inner, state, state, heads), 1


def _conv(sizes: Sizes) -> tuple[Dims, int]:
    (_, *parts, _), heads = _mamba(sizes)
    return tuple(parts), heads


_HEADS: dict[str, tuple[Callable[[Sizes], tuple[Dims, int]], int, str]] = {
    "delta_query": (
        _by_key_heads,
        0,
        "The queries of a gated delta net. Published, rows go by key heads: of each its query, its key, its "
        "values, their gates.",
    ),
    "delta_key": (_by_key_heads, 1, "As `delta_query`: the keys."),
    "delta_value": (_by_key_heads, 2, "As `delta_query`: the values."),
    "delta_gate": (_by_key_heads, 3, "As `delta_query`: the gates."),
    "delta_beta": (
        _by_value_heads,
        0,
        "One row for each value head. Published, of each key head those of its value heads, then as many "
        "others.",
    ),
    "delta_alpha": (_by_value_heads, 1, "As `delta_beta`: the others."),
    "stacked_query": (
        _stacked,
        0,
        "The queries of a gated delta net. Published, all queries stand above all keys, these above all "
        "values.",
    ),
    "stacked_key": (_stacked, 1, "As `stacked_query`: the keys."),
    "stacked_value": (_stacked, 2, "As `stacked_query`: the values."),
    "mamba_gate": (
        _mamba,
        0,
        "The gates (z) of a Mamba layer's input projection. Published, all gates stand above all inputs (x), "
        "these above B, C and the time steps (dt).",
    ),
    "mamba_input": (_mamba, 1, "As `mamba_gate`: the inputs."),
    "mamba_b": (_mamba, 2, "As `mamba_gate`: B."),
    "mamba_c": (_mamba, 3, "As `mamba_gate`: C."),
    "mamba_step": (_mamba, 4, "As `mamba_gate`: the time steps."),
    "conv_input": (
        _conv,
        0,
        "The inputs (x) of a Mamba layer's convolution. Published, all inputs stand above B, these above C.",
    ),
    "conv_b": (_conv, 1, "As `conv_input`: B."),
    "conv_c": (_conv, 2, "As `conv_input`: C."),
}
"""By way, for gated delta nets and Mamba layers: a function that returns the rows of each part of a head and
the number of heads; the index of the part; and a description. In published tensors, the parts of a head are
stacked."""


def _of_heads(way: str) -> Way:
    rows_of, part, about = _HEADS[way]

    def take(names: Sequence[str], shape: Dims, sizes: Sizes) -> list[Segment]:
        parts, heads = rows_of(sizes)
        mine, each = parts[part], sum(parts)
        if shape[0] != mine * heads:
            raise BadInput(
                f"{shape[0]} rows can't be the {mine * heads} that {names[0]!r} has of them.",
                hint="Build the model with the sizes of config.json.",
            )
        return [
            some_rows(names[0], shape, (head * mine, mine), head * each + sum(parts[:part]), heads * each)
            for head in range(heads)
        ]

    take.__doc__ = about
    return take


_PLAIN = (
    *(same, joined, concat, grouped, grouped_sized, grouped_tied, grouped_joined, gated, padded, lowered),
    *(of_experts, of_experts_joined, of_experts_turned, of_experts_joined_turned, of_experts_mixed, one_row),
    *(turned, first_row, second_row, first_of_three, second_of_three, third_of_three),
)
WAYS: dict[str, Way] = {way.__name__: way for way in _PLAIN} | {name: _of_heads(name) for name in _HEADS}
