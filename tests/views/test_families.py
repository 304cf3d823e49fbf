"""Every entry of every table covers both sides exactly once, whatever the sizes and the cuts."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import BadInput, ShapeMismatch
from holdfast.layout.box import Box, whole
from holdfast.layout.coverage import tiles
from holdfast.views.family import Family, View, families, view_of
from holdfast.views.mapping import WAYS, Segment

FAMILIES = {family.name: family for family in families().values()}
LAYERS, EXPERTS = 3, 4
MOST_AXES = 2


@st.composite
def models(draw: st.DrawFn) -> tuple[View, str, tuple[int, ...]]:
    """A family with sizes, a name of it, and the global shape that it has then."""
    family = FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))]
    groups, heads, head = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    sizes = {
        "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS,
        "num_key_value_heads": groups,
        "num_attention_heads": groups * heads,
        "vocab_size": draw(st.integers(5, 9)),
    }
    view = View(family, sizes)
    name = draw(st.sampled_from(family.names()))
    found = family.find(name)
    assert found is not None
    entry, _, axes = found
    rows = {
        "grouped": groups * (heads + 2) * head,
        "gated": groups * (2 * heads + 2) * head,
        "padded": sizes["vocab_size"] + draw(st.integers(0, 4)),
    }.get(entry.rule.way, 2 * draw(st.integers(1, 4)))
    is_vector = name.endswith("bias") or "norm" in name or entry.rule.way == "lowered"
    tail = (rows,) if is_vector else (rows, draw(st.integers(1, 4)))
    lead = tuple({"layer": 1 if name.startswith("mtp") else LAYERS, "expert": EXPERTS}[axis] for axis in axes)
    return view, name, (*lead, *tail)


def boxes_of(segments: list[Segment]) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    return (
        np.asarray([segment.box.offset for segment in segments], np.int64),
        np.asarray([segment.box.shape for segment in segments], np.int64),
    )


@settings(max_examples=300)
@given(models())
def test_both_sides_are_covered_exactly_once(model: tuple[View, str, tuple[int, ...]]) -> None:
    view, name, shape = model
    segments = list(view.segments(name, shape, whole(shape)))
    covered = shape
    if view.is_padded(name):
        covered = (view.sizes["vocab_size"], *shape[1:])
    assert tiles(covered, *boxes_of(segments))
    published: dict[str, list[Segment]] = defaultdict(list)
    for segment in segments:
        published[segment.name].append(segment)
    for parts in published.values():
        theirs = [part.theirs(part.box) for part in parts]
        offsets = np.asarray([box.offset for box in theirs], np.int64)
        sizes = np.asarray([box.shape for box in theirs], np.int64)
        assert {part.whole for part in parts} == {parts[0].whole}
        assert tiles(parts[0].whole, offsets, sizes)


@settings(max_examples=300)
@given(models(), st.data())
def test_a_cut_takes_its_own_part_and_finds_it_back(
    model: tuple[View, str, tuple[int, ...]], data: st.DataObject
) -> None:
    """Any box: its segments are those of the whole that lie in it, place by place."""
    view, name, shape = model
    offset = tuple(data.draw(st.integers(0, side - 1)) for side in shape)
    size = tuple(data.draw(st.integers(1, side - low)) for side, low in zip(shape, offset, strict=True))
    box = Box(offset, size)
    of_whole = {}
    for segment in view.segments(name, shape, whole(shape)):
        for index in np.ndindex(*segment.box.shape):
            at = tuple(a + b for a, b in zip(segment.box.offset, index, strict=True))
            of_whole[at] = segment.name, segment.theirs(Box(at, (1,) * len(at))).offset
    seen = 0
    for segment in view.segments(name, shape, box):
        assert segment.box.within(shape)
        assert segment.box.intersect(box) == segment.box
        for index in np.ndindex(*segment.box.shape):
            at = tuple(a + b for a, b in zip(segment.box.offset, index, strict=True))
            one = segment.theirs(Box(at, (1,) * len(at)))
            assert of_whole[at] == (segment.name, one.offset)
            assert segment.ours(one) == Box(at, (1,) * len(at))
            seen += 1
    inside = [at for at in of_whole if all(o <= a < o + s for a, o, s in zip(at, offset, size, strict=True))]
    assert seen == len(inside)


def test_every_way_is_used_or_proven_here() -> None:
    used = {
        found[0].rule.way
        for family in FAMILIES.values()
        for name in family.names()
        if (found := family.find(name)) is not None
    }
    assert set(WAYS) - used == {"gated", "lowered"}


@pytest.mark.parametrize("way", ["gated", "lowered"])
def test_ways_that_no_table_has_yet(way: str) -> None:
    sizes = {"num_key_value_heads": 2, "num_attention_heads": 6}
    names = {"gated": ["q", "k", "v"], "lowered": ["norm"]}[way]
    shape = (2 * (2 * 3 + 2) * 4, 5) if way == "gated" else (7,)
    segments = WAYS[way](names, shape, sizes)
    assert tiles(shape, *boxes_of(segments))
    for name in names:
        theirs = [segment.theirs(segment.box) for segment in segments if segment.name == name]
        expected = next(segment.whole for segment in segments if segment.name == name)
        offsets = np.asarray([box.offset for box in theirs], np.int64)
        assert tiles(expected, offsets, np.asarray([box.shape for box in theirs], np.int64))


def test_numbers_that_do_not_fit_are_told() -> None:
    view = View(
        Family("qwen3_moe"),
        {"num_hidden_layers": 4, "num_experts": 8, "num_key_value_heads": 2, "num_attention_heads": 4},
    )
    fc1 = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    with pytest.raises(ShapeMismatch, match="has 3 layers, and the published model 4"):
        list(view.segments(fc1, (3, 8, 4, 4), whole((3, 8, 4, 4))))
    with pytest.raises(ShapeMismatch, match="has 6 experts, and the published model 8"):
        list(view.segments(fc1, (4, 6, 4, 4), whole((4, 6, 4, 4))))
    with pytest.raises(BadInput, match="5 rows can't be made of 2 equal parts"):
        list(view.segments(fc1, (4, 8, 5, 4), whole((4, 8, 5, 4))))
    with pytest.raises(BadInput, match=r"has no .*linear_fc3.*The nearest of its names"):
        list(view.segments(fc1.replace("fc1", "fc3"), (4, 8, 4, 4), whole((4, 8, 4, 4))))


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("mtp.layers.0.enorm.weight", (8,), "does not say num_hidden_layers"),
        ("output_layer.weight", (8, 8), "does not say vocab_size"),
        ("decoder.final_layernorm.weight", (), "has too few axes"),
    ],
)
def test_what_a_configuration_or_a_shape_lacks_is_named(
    name: str, shape: tuple[int, ...], words: str
) -> None:
    view = view_of({"model_type": "deepseek_v3", "num_attention_heads": 4}, "config.json")
    with pytest.raises(BadInput, match=words):
        list(view.segments(name, shape, whole(shape)))
