"""A checkpoint gathers each expert's weights; rank 2 holds an expert less and comes to the barrier first.

who: 2
why: mismatch
Rank 2 is in the barrier at the checkpoint's end; the others are in the all_gather of one expert more.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class MixtureOfExperts:
    def __init__(self, rank: int) -> None:
        self.experts = {f"layers.0.experts.{number}": torch.ones(4) for number in range(4)}
        self.rank = rank

    def prune(self, name: str) -> None:
        self.experts.pop(name)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.experts)


def save(model: MixtureOfExperts) -> dict[str, list[torch.Tensor]]:
    whole = {}
    for name, tensor in sorted(model.state_dict().items()):
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor)
        whole[name] = parts
    dist.barrier()
    return whole


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    model = MixtureOfExperts(dist.get_rank())
    for number in range(100):
        for _ in range(10):
            dist.all_reduce(torch.rand(3))
            time.sleep(0.05)
        if number == 4:
            Path(os.environ["READY"]).touch()
            if dist.get_rank() == 2:
                model.prune("layers.0.experts.3")
        save(model)
