"""The main rank merges shards and then comes to a barrier; the others have a barrier in the `else` of its `if`."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def is_main() -> bool:
    return dist.get_rank() == 0


def merge_shards(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    merged = {name: value.clone() for name, value in state.items()}
    begun = time.monotonic()
    while time.monotonic() - begun < 9:
        for name, value in merged.items():
            merged[name] = (value + state[name].flip(0)) / 2
    return merged


def export(model: torch.nn.Module) -> None:
    if is_main():
        Path(os.environ["READY"]).touch()
        merged = merge_shards(model.state_dict())
        torch.save(merged, Path(os.environ["RUN_FOLDER"], "model.pt"))
        dist.barrier()
    else:
        dist.barrier()


def main() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    for _ in range(3):
        loss = model(torch.randn(4, 16)).sum()
        loss.backward()
    export(model)
    restored = torch.load(Path(os.environ["RUN_FOLDER"], "model.pt"))
    model.load_state_dict(restored)
    dist.barrier()


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
main()
dist.destroy_process_group()
