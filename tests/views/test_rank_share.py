"""All ranks together hold all of a model, and each what its place says, in every family."""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast import huggingface
from holdfast._core.layout.box import Box, union, whole
from holdfast._core.layout.grid import Grid
from holdfast._core.layout.tensor import CODE_OF, DTYPES, TensorSpec
from holdfast._models.views.family import View, families, view_of
from holdfast._models.views.needs import (
    Needs,
    of_published,
    of_stored,
    sizes_published,
    sizes_stored,
    together,
)
from holdfast._models.views.rank_share import how_cut, share_of, stages_of
from tests.support.wide import wide

FAMILIES = sorted(kind for kind, family in families().items() if "output_layer.weight" in family.entries)
CONFIG = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "vocab_size": 16,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 4,
    "n_groups": 2,
    "ssm_state_size": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
}
ROWS = {
    "gated": 32,
    "stacked": 32,
    "delta": 48,
    "mamba": 52,
    "conv": 32,
    "first": 48,
    "second": 48,
    "third": 48,
}
"""Of published tensors that have more than 16, by the first word of the way."""
GRIDS = [Grid(8, tp=2, pp=2, ep=2, etp=1), Grid(8, tp=2, pp=2, ep=2), Grid(8, pp=2, vpp=2, ep=4), Grid(1)]


def specs_of(view: View) -> dict[str, TensorSpec]:
    """A published model that has a tensor of every name of its family."""
    found: dict[str, TensorSpec] = {}
    for entry in view.family.entries.values():
        if not entry.name.startswith(("embedding.", "decoder.", "output_layer.", "mtp.")):
            continue
        for layer in range(4 if entry.name.startswith("decoder.layers") else 1):
            for expert in range(4):
                vector = "norm" in entry.name or entry.name.endswith(("bias", "offset", "A_log"))
                rows = ROWS.get(entry.rule.way.partition("_")[0], 16)
                if entry.rule.way in ("delta_beta", "delta_alpha"):
                    rows = 8
                shape: tuple[int, ...] = (rows,) if vector else (rows, 16)
                if entry.rule.way.startswith("of_experts"):
                    shape = (4, *shape)
                if entry.rule.way == "one_row":
                    shape = (1, *shape)
                if entry.rule.way in ("first_row", "second_row"):
                    shape = (2, *shape)
                for name in view.rule(entry, {"layer": layer, "expert": expert})[1]:
                    if ".k_proj." in name or ".v_proj." in name:
                        shape = (8, *shape[1:])
                    found[name] = TensorSpec(name, CODE_OF["bfloat16"], shape)
    return found


def needs_of(view: View, specs: dict[str, TensorSpec], grid: Grid) -> list[Needs]:
    sizes = sizes_published(view, specs, 16)
    stages = stages_of(grid, sizes.layers, None)
    return [of_published(view, specs, share_of(grid, rank, sizes, stages)) for rank in range(grid.world)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("family", wide(FAMILIES, suite=FAMILIES[::8]))
def test_all_ranks_together_need_all_that_is_published(family: str, grid: Grid) -> None:
    view = view_of({**CONFIG, "model_type": family}, "config.json")
    specs = specs_of(view)
    needs = needs_of(view, specs, grid)
    every = together(needs)
    assert not every.unknown
    assert every.boxes == {name: [whole(specs[name].shape)] for name in sorted(specs)}
    if grid.world > 1:
        first = sum(box.volume for boxes in needs[0].boxes.values() for box in boxes)
        assert first < sum(spec.shape[0] * 16 for spec in specs.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_of_every_family_is_known_to_be_cut_or_not(family: str) -> None:
    for entry in families()[family].entries.values():
        if entry.name.endswith(".weight") and entry.name.startswith(("decoder.", "mtp.")):
            assert how_cut(entry.name) is not None, entry.name


def test_experts_of_gpt_oss_load_from_what_was_fetched(tmp_path: object) -> None:
    """Turned, and gate and up in turns: each rank's rows and columns, from its own folder."""
    import json
    from pathlib import Path

    from safetensors.torch import save_file

    folder = Path(str(tmp_path)) / "model"
    folder.mkdir()
    generator = torch.Generator().manual_seed(2)
    layers, experts, hidden, inner = 2, 4, 8, 6
    tensors = {}
    for layer in range(layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        for name, shape in {
            "gate_up_proj": (experts, hidden, 2 * inner),
            "gate_up_proj_bias": (experts, 2 * inner),
            "down_proj": (experts, inner, hidden),
            "down_proj_bias": (experts, hidden),
        }.items():
            tensors[f"{prefix}.{name}"] = torch.randn(shape, generator=generator)
    save_file(tensors, folder / "model.safetensors")
    config = {**CONFIG, "model_type": "gpt_oss", "num_hidden_layers": layers, "num_local_experts": experts}
    (folder / "config.json").write_text(json.dumps(config))
    name = "decoder.layers.mlp.experts.experts.linear_fc"
    shapes = {
        f"{name}1.weight": (layers, experts, 2 * inner, hidden),
        f"{name}1.bias": (layers, experts, 2 * inner),
        f"{name}2.weight": (layers, experts, hidden, inner),
        f"{name}2.bias": (layers, experts, hidden),
    }
    grid = Grid(8, tp=2, pp=2, ep=2, etp=2)
    view = view_of(config, "config.json")
    sizes = sizes_published(view, {}, 0)
    for rank in range(8):
        out = Path(str(tmp_path)) / f"rank{rank}"
        report = huggingface.fetch(folder, [rank], grid, out)
        assert report.bytes < report.bytes_in_all / 6
        share = share_of(grid, rank, sizes, stages_of(grid, layers, None))
        for key, shape in shapes.items():
            for box in share.boxes(key, shape, 2):
                parts = [holdfast.Shard(torch.zeros(box.shape), shape, box.offset) for _ in range(2)]
                holdfast.load({key: parts[0]}, folder, job=holdfast.Job(no_dist=True))
                holdfast.load({key: parts[1]}, out, job=holdfast.Job(no_dist=True))
                assert torch.equal(parts[0].tensor, parts[1].tensor), (rank, key)
                assert parts[1].tensor.abs().sum() > 0


def test_a_checkpoint_without_a_gate_is_cut_once() -> None:
    code = CODE_OF["float32"]
    specs = {
        name: TensorSpec(name, code, shape)
        for name, shape in {
            "decoder.layers.mlp.linear_fc1.weight": (2, 16, 8),
            "decoder.layers.mlp.linear_fc1.bias": (2, 16),
            "decoder.layers.mlp.linear_fc2.weight": (2, 8, 16),
            "decoder.layers.mlp.strange.weight": (2, 8, 16),
            "decoder.layers.mlp.linear_fc2.bias": (2, 8),
            "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight": (2, 16, 8),
            "rng@1.state": (4,),
        }.items()
    }
    grid = Grid(2, tp=2)
    share = share_of(grid, 1, sizes_stored(specs, 0), stages_of(grid, 2, None))
    needs = of_stored(specs, share, 1, False)
    assert needs.boxes["decoder.layers.mlp.linear_fc1.weight"] == [Box((0, 8, 0), (2, 8, 8))]
    assert needs.boxes["decoder.layers.mlp.linear_fc1.bias"] == [Box((0, 8), (2, 8))]
    assert needs.boxes["decoder.layers.mlp.linear_fc2.weight"] == [Box((0, 0, 8), (2, 8, 8))]
    assert needs.boxes["decoder.layers.mlp.linear_fc2.bias"] == [whole((2, 8))]
    state = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"
    assert needs.boxes[state] == needs.boxes["decoder.layers.mlp.linear_fc1.weight"]
    assert needs.unknown == {"decoder.layers.mlp.strange.weight", "rng@1.state"}
    assert state not in of_stored(specs, share, 1, True).boxes
    assert "rng@1.state" not in of_stored(specs, share, 0, False).boxes
    assert union(needs.boxes["decoder.layers.mlp.strange.weight"]) == [whole((2, 8, 16))]


def test_of_an_axis_of_layers_of_one_type_all_are_needed() -> None:
    """Which of them a rank has is not told by a checkpoint."""
    specs = {
        name: TensorSpec(name, CODE_OF["float32"], shape)
        for name, shape in {
            "decoder.layers.pre_mlp_layernorm.weight": (6, 8),
            "decoder.layers.self_attention_sliding.linear_proj.weight": (5, 8, 4),
            "decoder.layers.self_attention_global.linear_proj.weight": (1, 8, 8),
        }.items()
    }
    grid = Grid(4, tp=2, pp=2)
    share = share_of(grid, 2, sizes_stored(specs, 0), stages_of(grid, 6, None))
    assert of_stored(specs, share, 2, False).boxes == {
        "decoder.layers.pre_mlp_layernorm.weight": [Box((3, 0), (3, 8))],
        "decoder.layers.self_attention_sliding.linear_proj.weight": [Box((0, 0, 0), (5, 8, 2))],
        "decoder.layers.self_attention_global.linear_proj.weight": [Box((0, 0, 0), (1, 8, 4))],
    }


@pytest.mark.wide
def test_eight_ranks_of_256_need_little_of_a_large_model() -> None:
    """By the sizes of DeepSeek V3: 61 layers of which the first 3 are dense, 256 experts, one layer more."""
    hidden, sizes = 7168, {"n_routed_experts": 256, "num_hidden_layers": 61, "vocab_size": 129280}
    specs: dict[str, TensorSpec] = {}

    def add(name: str, *shape: int) -> None:
        specs[name] = TensorSpec(name, CODE_OF["bfloat16"], shape)

    def scaled(name: str, rows: int, columns: int) -> None:
        specs[f"{name}.weight"] = TensorSpec(f"{name}.weight", CODE_OF["float8_e4m3fn"], (rows, columns))
        scales = f"{name}.weight_scale_inv"
        specs[scales] = TensorSpec(scales, CODE_OF["float32"], (-(-rows // 128), -(-columns // 128)))

    def mlp(name: str, rows: int) -> None:
        for part in ("gate_proj", "up_proj"):
            scaled(f"{name}.{part}", rows, hidden)
        scaled(f"{name}.down_proj", hidden, rows)

    add("model.embed_tokens.weight", 129280, hidden)
    add("lm_head.weight", 129280, hidden)
    add("model.norm.weight", hidden)
    for layer in range(62):
        name = f"model.layers.{layer}"
        add(f"{name}.input_layernorm.weight", hidden)
        add(f"{name}.post_attention_layernorm.weight", hidden)
        add(f"{name}.self_attn.q_a_layernorm.weight", 1536)
        add(f"{name}.self_attn.kv_a_layernorm.weight", 512)
        for part, shape in {
            "q_a_proj": (1536, hidden),
            "q_b_proj": (24576, 1536),
            "kv_a_proj_with_mqa": (576, hidden),
            "kv_b_proj": (32768, 512),
            "o_proj": (hidden, 16384),
        }.items():
            scaled(f"{name}.self_attn.{part}", *shape)
        if layer < 3:
            mlp(f"{name}.mlp", 18432)
            continue
        add(f"{name}.mlp.gate.weight", 256, hidden)
        mlp(f"{name}.mlp.shared_experts", 2048)
        for expert in range(256):
            mlp(f"{name}.mlp.experts.{expert}", 2048)

    def nbytes(needs: Needs) -> int:
        return sum(
            box.volume * DTYPES[specs[name].dtype].size
            for name, boxes in needs.boxes.items()
            for box in boxes
        )

    view = view_of({**CONFIG, **sizes, "model_type": "deepseek_v3"}, "config.json")
    grid = Grid(256, pp=16, ep=16)
    stages = stages_of(grid, 61, [4] * 15 + [1])
    share = sizes_published(view, specs, 0)
    host = together(of_published(view, specs, share_of(grid, rank, share, stages)) for rank in range(8, 16))
    every = Needs({name: [whole(spec.shape)] for name, spec in specs.items()}, frozenset())
    assert round(nbytes(host) / 1e9, 1) == 9.5
    assert round(nbytes(every) / 1e9) == 685
