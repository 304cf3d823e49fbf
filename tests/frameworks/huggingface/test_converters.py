"""Types whose models megatron-core alone can't build: every tensor is that of Megatron-Bridge's own converter,
and all that is published is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from tests.frameworks.huggingface import converter_jobs
from tests.frameworks.huggingface.models import Tiny, publish
from tests.support.processes import ProcessWorld

pytest.importorskip("transformers")
SANDWICH = {"head_dim": 8, "query_pre_attn_scalar": 8, "pad_token_id": 0, "sliding_window": 16}
CONVERTED = {
    "gemma": Tiny("GemmaConfig", {"head_dim": 8, "pad_token_id": 0}),
    "gemma2": Tiny("Gemma2Config", SANDWICH),
    "gemma3_text": Tiny("Gemma3TextConfig", SANDWICH),
    "gemma3": Tiny("Gemma3Config", SANDWICH, text="gemma3_text"),
    "nemotron": Tiny("NemotronConfig", {"head_dim": 8, "mlp_bias": True, "attention_bias": True}),
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp("published") / name for name in CONVERTED}
    for name, tiny in CONVERTED.items():
        publish(tiny, folders[name])
    return folders


@pytest.mark.parametrize("name", CONVERTED)
def test_transformers_own_modules_are_filled(name: str, published: dict[str, Path]) -> None:
    stock = CONVERTED[name].auto.from_pretrained(published[name])
    ours = CONVERTED[name].auto.from_config(CONVERTED[name].configuration()).float()
    holdfast.load(ours.state_dict(), published[name])
    for key, value in stock.state_dict().items():
        assert torch.equal(value, ours.state_dict()[key]), key


def test_every_tensor_is_that_of_megatron_bridges_converter(published: dict[str, Path]) -> None:
    pytest.importorskip("megatron.bridge")
    with ProcessWorld(1, preload="bridges") as world:
        for name, folder in published.items():
            made, unlike, unused = world.run(converter_jobs.compare, name, str(folder), timeout=100)[0]
            assert made > 4 * 6, name
            assert unlike == [], name
            assert unused == [], name
