"""Every entry of every table covers both sides exactly once, whatever the sizes and the cuts."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._core.layout.box import Box, whole
from holdfast._models.views.family import Tensors, View, families, view_of
from holdfast._models.views.mapping import WAYS
from holdfast._models.views.segments import Segment, Sizes
from holdfast.errors import BadInput, ShapeMismatch
from holdfast.huggingface import mapping_of
from tests.support.boxes import tiles

FAMILIES = {family.name: family for family in families().values()}
LAYERS, EXPERTS = 3, 4
MOST_AXES = 2
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
FLAGS = ("attention_k_eq_v", "enable_moe_block")
MAMBA = {"mamba_num_heads": 3, "mamba_head_dim": 2, "n_groups": 2, "ssm_state_size": 4}


PARTS = ("delta_query", "delta_key", "delta_value", "delta_gate")
PARTS += ("delta_beta", "delta_alpha", "stacked_query", "stacked_key", "stacked_value")
PARTS += ("mamba_gate", "mamba_input", "mamba_b", "mamba_c", "mamba_step", "conv_input", "conv_b", "conv_c")
PARTS += ("first_of_three", "second_of_three", "third_of_three", "first_row", "second_row")
"""Ways that take a part of a published tensor; other names of ours are made of the rest."""


def rows_of_parts(sizes: Sizes) -> dict[str, int]:
    keys, values = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
    queries, all_values = keys * sizes["linear_key_head_dim"], values * sizes["linear_value_head_dim"]
    return {
        **dict.fromkeys(("delta_query", "delta_key", "stacked_query", "stacked_key"), queries),
        **dict.fromkeys(("delta_value", "delta_gate", "stacked_value"), all_values),
        **dict.fromkeys(("delta_beta", "delta_alpha"), values),
        **dict.fromkeys(
            ("mamba_gate", "mamba_input", "conv_input"), MAMBA["mamba_num_heads"] * MAMBA["mamba_head_dim"]
        ),
        **dict.fromkeys(
            ("mamba_b", "mamba_c", "conv_b", "conv_c"), MAMBA["n_groups"] * MAMBA["ssm_state_size"]
        ),
        "mamba_step": MAMBA["mamba_num_heads"],
    }


def _beside(name: str) -> str:
    """What is alike in the names of parts of one published tensor."""
    return name.replace("vision_moe", "text_moe") if "_moe" in name else name.rpartition(".")[0]


def of_the_rest(view: View, name: str, shape: tuple[int, ...]) -> list[Segment]:
    """Segments of the other names that are made of the same published tensor, if `name` is of a part."""
    found = view.family.find(name)
    assert found is not None
    entry, _, axes = found
    rest: list[Segment] = []
    for other in view.family.entries if entry.rule.way in PARTS else ():
        same = view.family.find(other)
        assert same is not None
        siblings = _beside(other) == _beside(name) and other != name
        if siblings and same[0].rule.names == entry.rule.names:
            rows = rows_of_parts(view.sizes).get(same[0].rule.way, shape[len(axes)])
            its = (*shape[: len(axes)], rows, *shape[len(axes) + 1 :])
            rest += view.segments(other, its, whole(its))
    return rest


@st.composite
def models(draw: st.DrawFn) -> tuple[View, str, tuple[int, ...]]:
    """A family with sizes, a name of it, and the global shape that it has then."""
    family = FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))]
    groups, heads, head = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    keys, values = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    key, value = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    global_groups = draw(st.sampled_from([some for some in (1, 2, 3) if groups * heads % some == 0]))
    sizes = {
        "num_global_key_value_heads": global_groups,
        "head_dim": head,
        "v_head_dim": value,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * values,
        "linear_key_head_dim": key,
        "linear_value_head_dim": value,
        "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS,
        "num_key_value_heads": groups,
        "num_attention_heads": groups * heads,
        "vocab_size": draw(st.integers(5, 9)),
        **MAMBA,
    }
    flags = {flag: draw(st.booleans()) for flag in FLAGS}
    view = View(family, sizes, config={"layer_types": TYPES, **flags})
    name = draw(st.sampled_from(list(family.entries)))
    found = family.find(name)
    assert found is not None
    entry, _, axes = found
    rows = {
        "grouped": groups * (heads + 2) * head,
        "grouped_sized": groups * (heads * head + head + value),
        "grouped_tied": (groups * heads + 2 * global_groups) * head,
        "grouped_joined": groups * (heads + 2) * head,
        "gated": groups * (2 * heads + 2) * head,
        "padded": sizes["vocab_size"] + draw(st.integers(0, 4)),
        **rows_of_parts(sizes),
    }.get(view.rule(entry, {"layer": 0, "expert": 0})[0].way, 2 * draw(st.integers(1, 4)))
    is_vector = name.endswith("bias") or "norm" in name or entry.rule.way == "lowered"
    tail = (rows,) if is_vector else (rows, draw(st.integers(1, 4)))
    layers = sum(view.has_layer(entry, layer) for layer in range(LAYERS))
    lead = tuple({"layer": 1 if name.startswith("mtp") else layers, "expert": EXPERTS}[axis] for axis in axes)
    return view, name, (*lead, *tail)


def boxes_of(segments: list[Segment]) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    return (
        np.asarray([segment.box.offset for segment in segments], np.int64),
        np.asarray([segment.box.shape for segment in segments], np.int64),
    )


@settings(max_examples=300)
@given(models())
def test_both_sides_are_covered_exactly_once(model: tuple[View, str, tuple[int, ...]]) -> None:
    check_covered(*model)


@pytest.mark.parametrize(("family", "way"), [("qwen3_5", "stacked"), ("qwen3_next", "delta")])
def test_parts_of_a_published_tensor_make_up_all_of_it(family: str, way: str) -> None:
    """Each of them, whatever examples the test above draws."""
    heads = {"linear_num_key_heads": 3, "linear_num_value_heads": 6}
    sizes = {"num_hidden_layers": 1, **heads, "linear_key_head_dim": 5, "linear_value_head_dim": 7}
    view = View(FAMILIES[family], sizes)
    rows = rows_of_parts(sizes)
    seen = 0
    for name in view.family.entries:
        found = view.family.find(name)
        assert found is not None
        if found[0].rule.way.startswith(way) and name.startswith("decoder"):
            check_covered(view, name, (1, rows[found[0].rule.way], 4))
            seen += 1
    assert seen == 6


def check_covered(view: View, name: str, shape: tuple[int, ...]) -> None:
    segments = list(view.segments(name, shape, whole(shape)))
    covered = shape
    if view.is_padded(name):
        covered = (view.sizes["vocab_size"], *shape[1:])
    assert tiles(covered, *boxes_of(segments))
    published: dict[str, list[Segment]] = defaultdict(list)
    copies = {(segment.name, segment.theirs(segment.box)) for segment in segments if segment.is_copy}
    segments = [segment for segment in segments if not segment.is_copy]
    assert copies <= {(segment.name, segment.theirs(segment.box)) for segment in segments}
    for segment in [*segments, *of_the_rest(view, name, shape)]:
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


def test_every_way_is_used() -> None:
    used = {
        rule.way
        for family in FAMILIES.values()
        for entry in family.entries.values()
        for rule in (entry.rule, entry.rule.otherwise)
        if rule is not None
    }
    assert set(WAYS) == used


@pytest.mark.parametrize("name", ["in_proj.weight.query", "in_proj.weight.beta", "conv1d.weight.value"])
def test_rows_of_a_gated_delta_net_that_the_configuration_does_not_say_are_told(name: str) -> None:
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    view = View(
        FAMILIES["qwen3_next"],
        {"num_hidden_layers": 4, **heads, "linear_key_head_dim": 8, "linear_value_head_dim": 16},
    )
    name, shape = f"decoder.layers.0.self_attention.{name}", (30, 32)
    with pytest.raises(BadInput, match=r"30 rows can't be the \d+ that 'model.layers.0.linear_attn"):
        list(view.segments(name, shape, whole(shape)))


def test_a_rule_takes_its_other_one_where_the_folder_has_that() -> None:
    """Experts of one tensor; and the layers of a language model inside of another model."""
    sizes = {"num_hidden_layers": 1, "num_experts": 2}
    name, shape = "decoder.layers.0.mlp.experts.experts.1.linear_fc2.weight", (4, 6)
    layer = "layers.0.mlp.experts."
    for has, expected in [
        ({f"model.{layer}1.down_proj.weight"}, f"model.{layer}1.down_proj.weight"),
        ({f"model.{layer}down_proj"}, f"model.{layer}down_proj"),
        (set(), f"model.{layer}1.down_proj.weight"),
        (
            {"model.language_model.embed_tokens.weight", f"model.language_model.{layer}down_proj"},
            f"model.language_model.{layer}down_proj",
        ),
    ]:
        view = View(FAMILIES["qwen3_5_moe"], sizes, tensors=Tensors(has.__contains__))
        (segment,) = view.segments(name, shape, whole(shape))
        assert segment.name == expected


def test_numbers_that_do_not_fit_are_told() -> None:
    view = View(
        FAMILIES["qwen3_moe"],
        {"num_hidden_layers": 4, "num_experts": 8, "num_key_value_heads": 2, "num_attention_heads": 4},
    )
    fc1 = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    with pytest.raises(ShapeMismatch, match="has 3 layers, and the published model 4"):
        list(view.segments(fc1, (3, 8, 4, 4), whole((3, 8, 4, 4))))
    with pytest.raises(ShapeMismatch, match="has 6 experts, and the published model 8"):
        list(view.segments(fc1, (4, 6, 4, 4), whole((4, 6, 4, 4))))
    with pytest.raises(BadInput, match="5 rows can't be made of 2 equal parts"):
        list(view.segments(fc1, (4, 8, 5, 4), whole((4, 8, 5, 4))))


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


def test_a_tensor_of_layers_of_one_type_has_these_alone() -> None:
    """As an axis, or one by one: the number in a name is that of the layer among all."""
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    view = View(FAMILIES["gemma4_text"], sizes, config={"layer_types": TYPES})
    sliding, full = (f"self_attention_{kind}.linear_proj.weight" for kind in ("sliding", "global"))

    def published(name: str, *shape: int) -> list[str]:
        return [segment.name for segment in view.segments(name, shape, whole(shape))]

    layers = [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(3)]
    assert published(f"decoder.layers.{sliding}", 2, 4, 4) == [layers[0], layers[2]]
    assert published(f"decoder.layers.{full}", 1, 4, 8) == [layers[1]]
    assert published(f"decoder.layers.2.{sliding}", 4, 4) == [layers[2]]
    with pytest.raises(ShapeMismatch, match="has 3 layers, and the published model 2"):
        published(f"decoder.layers.{sliding}", 3, 4, 4)
    for name in (f"decoder.layers.0.{full}", f"decoder.layers.3.{full}"):
        with pytest.raises(
            BadInput,
            match=r"is a tensor of layers of type 'full_attention', and by layer_types in config\.json these are \[1\]\.",
        ):
            published(name, 4, 8)
    qkv = mapping_of("gemma4_text", "decoder.layers.1.self_attention_global.linear_qkv.weight")
    assert "layers.1.self_attn.k_proj.weight, if attention_k_eq_v is true in config.json)" in qkv
    with pytest.raises(BadInput, match=r"of some layers only, and config\.json has no layer_types"):
        list(
            View(FAMILIES["gemma4_text"], sizes).segments(
                f"decoder.layers.{full}", (1, 4, 8), whole((1, 4, 8))
            )
        )
