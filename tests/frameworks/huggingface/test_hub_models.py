"""Types of which Megatron-Bridge 0.6.2 builds the model, and megatron-core alone does not: its own models are filled as by
itself, every published tensor is used, and all of them come back."""

from __future__ import annotations

import importlib.util
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast._models.views.family import View, view_of
from holdfast._models.views.mapping import shape_made
from holdfast.errors import BadInput, CoverageError, MissingTensors, ShapeMismatch
from holdfast.huggingface import export
from tests.frameworks.huggingface import hub_jobs as jobs
from tests.frameworks.huggingface import models
from tests.frameworks.huggingface.hub_models import HUB, publish
from tests.frameworks.huggingface.models import rewrite, weights
from tests.frameworks.huggingface.test_converters import CONVERTED
from tests.frameworks.megatron.models import Layout
from tests.support.processes import ProcessWorld

pytest.importorskip("transformers")
ALONE = holdfast.Job(no_dist=True)
OURS = ("embedding.", "decoder.", "output_layer.", "mtp.", "lightning_indexers.")


class Folders(dict[str, Path]):
    """Each written when a test first asks for it, by transformers if it has the type."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, name: str) -> Path:
        self[name] = folder = self._root / name.replace(" ", "-")
        if name in HUB:
            publish(name, folder)
        else:
            models.publish(CONVERTED[name.removesuffix(" further")], folder)
        if name.endswith(" further"):
            predict_further(folder)
        return folder


def predict_further(folder: Path) -> None:
    """Add a layer that predicts a further token, which transformers ignores: as layer 1, with norms around it."""
    there = weights(folder)
    layer = "model.language_model.layers.1."
    more = {
        name.replace(layer, "mtp.layers.0."): value + 1
        for name, value in there.items()
        if name.startswith(layer)
    }
    norms = {
        f"mtp.{norm}.weight": torch.rand(32)
        for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    rewrite(folder, there | more | norms | {"mtp.fc.weight": torch.rand(32, 64)})
    config = json.loads((folder / "config.json").read_text())
    models.edit_config(folder, text_config={**config["text_config"], "num_nextn_predict_layers": 1})


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("hub"))


def state_of(view: View, there: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A tensor under each of megatron-core's names that the folder has something for, of those with the same sources only one;
    and other parts as they are published."""
    state: dict[str, torch.Tensor] = {}
    made: set[tuple[str, ...]] = set()
    for entry in view.family.entries.values():
        ranges = [range({"layer": 4, "expert": 8}[hole]) for hole in entry.holes]
        for place in product(*ranges) if entry.name.startswith(OURS) else ():
            numbers = {"layer": 0, "expert": 0, **dict(zip(entry.holes, place, strict=True))}
            rule, sources = view.rule(entry, numbers)
            one = (rule.way, *sources, str(numbers["expert"]))
            if one not in made and {*sources} <= there.keys():
                made.add(one)
                shape = shape_made(rule.way, [tuple(there[name].shape) for name in sources], view.sizes)
                state[entry.name.format(**numbers)] = torch.zeros(shape)
    parts = tuple(view.outer.unchanged.values()) if view.outer else ()
    return state | {name: torch.zeros_like(value) for name, value in there.items() if name.startswith(parts)}


@pytest.mark.parametrize("name", [*HUB, "ernie4_5_vl_moe", "exaone4_5 further", "falcon_h1 norm"])
def test_no_published_tensor_is_left_out(name: str, published: Folders, tmp_path: Path) -> None:
    folder = published[name]
    there = weights(folder)
    view = view_of(json.loads((folder / "config.json").read_text()), "config.json", there.__contains__)
    assert [key for key in there if not view.names(key)] == []
    state = state_of(view, there)
    holdfast.load(state, folder, job=ALONE)
    holdfast.save(state, tmp_path / "saved", job=ALONE)
    export(tmp_path / "saved", tmp_path / "out", like=folder, job=ALONE)
    after = weights(tmp_path / "out")
    assert after.keys() == there.keys()
    assert [key for key, value in there.items() if not torch.equal(value, after[key])] == []
    found = holdfast.same(tmp_path / "saved", folder)
    assert found.same, found


@pytest.mark.parametrize("name", HUB)
def test_the_module_of_a_newer_transformers_is_filled(name: str, published: Folders) -> None:
    import transformers

    kind = str(HUB[name].config["model_type"])
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config: Any = transformers.AutoConfig.from_pretrained(published[name])
    auto: Any = transformers.AutoModelForCausalLM
    if hasattr(config, "text_config"):
        auto = transformers.AutoModelForImageTextToText
    stock, info = auto.from_pretrained(published[name], output_loading_info=True, dtype=torch.float32)
    assert not any(info.values()), info
    state = auto.from_config(config).float().state_dict()
    holdfast.load(state, published[name])
    assert [key for key, value in stock.state_dict().items() if not torch.equal(value, state[key])] == []


def test_the_tower_of_exaone_has_its_own_sizes(published: Folders) -> None:
    """Layers and heads are those of its vision_config."""
    qkv, folder = "vision_model.decoder.layers.self_attention.linear_qkv.weight", published["exaone4_5"]
    state = {qkv: torch.zeros(2, 96, 32)}
    holdfast.load(state, folder, job=ALONE)
    there = weights(folder)["model.visual.blocks.1.attn.qkv.weight"]
    heads = [there[part * 32 + head * 8 :][:8] for head in range(4) for part in range(3)]
    assert torch.equal(state[qkv][1], torch.cat(heads))
    with pytest.raises(ShapeMismatch, match="has 4 layers, and the published model 2"):
        holdfast.load({qkv: torch.zeros(4, 96, 32)}, folder, job=ALONE)


def test_a_model_of_other_heads_and_a_folder_without_sinks_are_refused(
    published: Folders, tmp_path: Path
) -> None:
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    words = r"120 rows can't be made of model.layers.1.self_attn.q_proj.weight, .*: they are not 4 heads of 12 rows and groups of 20"
    with pytest.raises(BadInput, match=words):
        holdfast.load({name: torch.zeros(120, 32)}, published["mimo_v2_flash"], job=ALONE)
    with pytest.raises(ShapeMismatch, match=r"k_proj.weight' with shape \[48, 32\]; .* needs \[24, 32\]"):
        holdfast.load({name: torch.zeros(88, 32)}, published["mimo_v2_flash"], job=ALONE)
    folder = publish("mimo_v2_flash", tmp_path / "hub")
    rewrite(folder, {key: value for key, value in weights(folder).items() if "sink" not in key})
    sinks = "decoder.layers.1.self_attention.core_attention.softmax_offset"
    with pytest.raises(
        MissingTensors, match=r"does not hold 'model.layers.1.self_attn.attention_sink_bias', of which"
    ):
        holdfast.load({sinks: torch.zeros(4)}, folder, job=ALONE)


def lacks_bridge() -> str:
    """Why Megatron-Bridge can't build these models here; "" if it can."""
    found = importlib.util.find_spec("megatron.bridge")
    folders = found.submodule_search_locations if found is not None else None
    if any(Path(folder, "models/mimo_v2_flash").is_dir() for folder in folders or ()):
        return ""
    return "needs a Megatron-Bridge that has these models, such as 0.6.2, which is for Python 3.12"


BRIDGE = pytest.mark.skipif(bool(lacks_bridge()), reason=lacks_bridge())


@BRIDGE
@pytest.mark.parametrize(
    ("name", "layout", "ranks"),
    [
        ("mimo_v2_flash", Layout(tp=2, pp=2, ep=2), 4),
        ("mimo_v2_flash", Layout(pp=2), 2),
        ("mimo_v2_flash", Layout(), 1),
        ("minimax_m3_vl", Layout(tp=2, pp=2, ep=2), 4),
        ("minimax_m3_vl", Layout(ep=2), 2),
        ("minimax_m3_vl", Layout(), 1),
        ("ernie4_5_vl_moe", Layout(tp=2, pp=2, ep=2), 4),
        ("ernie4_5_vl_moe", Layout(ep=2), 2),
        ("ernie4_5_vl_moe", Layout(), 1),
        ("exaone4_5 further", Layout(tp=2, pp=2), 4),
        ("exaone4_5", Layout(tp=2), 2),
        ("exaone4_5", Layout(), 1),
        ("falcon_h1", Layout(pp=2), 2),
        ("falcon_h1 norm", Layout(), 1),
    ],
)
def test_megatron_bridges_own_model_is_filled_as_by_itself_and_comes_back(
    name: str, layout: Layout, ranks: int, published: Folders, tmp_path: Path
) -> None:
    folder = published[name]
    with ProcessWorld(ranks, preload="mixers" if name.startswith("falcon") else "bridges") as world:
        found = world.run(jobs.convert, str(folder), layout, str(tmp_path / "saved"), timeout=200)
    for many, differ, otherwise in found:
        assert many > 15
        assert differ == []
        assert otherwise == []
    export(tmp_path / "saved", tmp_path / "out", like=folder, job=ALONE)
    before, after = weights(folder), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert [key for key, value in before.items() if not torch.equal(value, after[key])] == []


@BRIDGE
def test_falcon_is_filled_under_tensor_parallelism_and_its_save_is_refused(
    published: Folders, tmp_path: Path
) -> None:
    """Megatron-Bridge's model says of each norm that every tensor-parallel rank writes it."""
    folder = str(published["falcon_h1 norm"])
    with ProcessWorld(4, preload="mixers") as world:
        for many, differ, otherwise in world.run(jobs.convert, folder, Layout(tp=2, pp=2), "", timeout=200):
            assert many > 15
            assert differ == []
            assert otherwise == []
    with ProcessWorld(2, preload="mixers") as world:
        words = r"'decoder.final_norm.weight' of shape \[32\] is covered twice"
        with pytest.raises(CoverageError, match=words):
            world.run(jobs.convert, folder, Layout(tp=2), str(tmp_path / "saved"), timeout=200)
