"""All ranks together hold all of a model, and each what its place says, in every family."""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast.layout.box import Box, union, whole
from holdfast.layout.grid import Grid
from holdfast.layout.tensor import CODE_OF, TensorSpec
from holdfast.views.family import View, families, view_of
from holdfast.views.needs import Needs, of_published, of_stored, sizes_published, sizes_stored, together
from holdfast.views.rank_share import how_cut, share_of, stages_of

FAMILIES = sorted(families())
CONFIG = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "vocab_size": 16,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
}
GRIDS = [Grid(8, tp=2, pp=2, ep=2, etp=1), Grid(8, tp=2, pp=2, ep=2), Grid(8, pp=2, vpp=2, ep=4), Grid(1)]


def specs_of(view: View) -> dict[str, TensorSpec]:
    """A published model that has a tensor of every name of its family."""
    found: dict[str, TensorSpec] = {}
    for entry in view.family.entries():
        if not entry.name.startswith(("embedding.", "decoder.", "output_layer.", "mtp.")):
            continue
        for layer in range(4 if entry.name.startswith("decoder.layers") else 1):
            for expert in range(4):
                vector = "norm" in entry.name or entry.name.endswith(("bias", "offset"))
                shape: tuple[int, ...] = (16,) if vector else (16, 16)
                if entry.rule.way.startswith("of_experts"):
                    shape = (4, *shape)
                for name in view.published(entry, {"layer": layer, "expert": expert}):
                    if ".k_proj." in name or ".v_proj." in name:
                        shape = (8, *shape[1:])
                    found[name] = TensorSpec(name, CODE_OF["bfloat16"], shape)
    return found


def needs_of(view: View, specs: dict[str, TensorSpec], grid: Grid) -> list[Needs]:
    sizes = sizes_published(view, specs, 16)
    stages = stages_of(grid, sizes.layers, None)
    return [of_published(view, specs, share_of(grid, rank, sizes, stages)) for rank in range(grid.world)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
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
    for entry in families()[family].entries():
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
        report = holdfast.fetch(folder, [rank], grid, out)
        assert report.bytes < report.bytes_in_all / 6
        share = share_of(grid, rank, sizes, stages_of(grid, layers, None))
        for key, shape in shapes.items():
            for box in share.boxes(key, shape, 2):
                parts = [holdfast.Shard(torch.zeros(box.shape), shape, box.offset) for _ in range(2)]
                holdfast.load({key: parts[0]}, folder, no_dist=True)
                holdfast.load({key: parts[1]}, out, no_dist=True)
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
