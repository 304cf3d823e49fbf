"""What ranks do with Megatron-Bridge's own models of Gemma 4; importable by spawned processes."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tests.frameworks.huggingface.framework_jobs import JOB, WRONG, model_of
from tests.frameworks.huggingface.models import COMMON, weights
from tests.frameworks.megatron.models import Layout


def convert(rank: int, folder: str, layout: Layout, saved: str) -> tuple[int, list[str], list[str]]:
    """Fill a model by Megatron-Bridge, then by Holdfast, and save that, if `saved` is not "".

    Returns the number of weights on this rank, those that the two load differently, and the published tensors
    that Megatron-Bridge exports otherwise than they were.
    """
    model = model_of("megatron-bridge", folder, layout)
    from holdfast import megatron  # after megatron-core has found the layers that stand in

    [chunk] = model.chunks
    model.load(folder)
    expected, there = model.weights(), weights(Path(folder))
    exported = dict(model.bridge.export_hf_weights(model.chunks, cpu=True, show_progress=False))
    otherwise = sorted(exported.keys() ^ there.keys())
    otherwise += [name for name in exported if name in there and not torch.equal(exported[name], there[name])]
    for value in chunk.state_dict().values():  # with buffers
        if torch.is_tensor(value) and value.is_floating_point():
            value.fill_(WRONG)
    chunk.load_state_dict(megatron.load(chunk.sharded_state_dict(), folder, job=JOB), strict=False)
    found = model.weights()
    if saved:
        megatron.save(chunk.sharded_state_dict(), saved, job=JOB)
    differ = [name for name, value in expected.items() if not torch.equal(value, found[name])]
    return len(expected), differ, otherwise


def used_rows(rank: int, folder: str, layer: int, rows: list[slice]) -> list[bool]:
    """Whether the logits of a dense model depend on these rows of a layer's linear_qkv."""
    model = model_of("megatron-bridge", folder, Layout())
    [chunk] = model.chunks
    # What stands in for Transformer Engine has no arithmetic.
    attention: Any = import_module("megatron.core.transformer.attention")
    attention.SplitAlongDim = None
    chunk.decoder.final_layernorm.forward = lambda hidden: torch.nn.functional.rms_norm(
        hidden, hidden.shape[-1:], chunk.decoder.final_layernorm.weight, COMMON["rms_norm_eps"]
    )
    model.load(folder)
    tokens, places = torch.arange(16)[None], torch.arange(16)[None]
    mask = torch.ones(16, 16).triu(1).bool()[None, None]
    weight = chunk.decoder.layers[layer].self_attention.linear_qkv.weight
    with torch.no_grad():
        before, kept = chunk.eval()(tokens, places, mask), weight.clone()
        used = []
        for some in rows:
            weight[some] = WRONG
            used.append(not torch.equal(chunk(tokens, places, mask), before))
            weight.copy_(kept)
        assert torch.equal(chunk(tokens, places, mask), before)
    return used
