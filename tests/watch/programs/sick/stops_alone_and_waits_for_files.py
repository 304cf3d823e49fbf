"""Each rank decides for itself to stop, saves, and waits for the files of the others; only rank 1 has stopped.

who: 1
why: unproven
Rank 1 looks for the others' checkpoint files in a loop; ranks 0, 2, 3 are in the all_reduce of the next step.
"""

import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Checkpoint:
    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.folder, self.rank, self.world = folder, rank, world

    def save(self, weights: torch.Tensor) -> None:
        torch.save(weights, self.folder / f"rank-{self.rank}.pt")
        while len(list(self.folder.glob("rank-*.pt"))) < self.world:
            time.sleep(0.2)


def has_converged(rank: int, step: int) -> bool:
    drift = 1e-3 * (rank == 1)
    return 0.061 - 0.001 * step < drift


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    rank = dist.get_rank()
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    weights = torch.zeros(4)
    for step in range(10_000):
        if has_converged(rank, step):
            Path(os.environ["READY"]).touch()
            break
        gradients = torch.rand(4)
        dist.all_reduce(gradients)
        weights -= gradients
        time.sleep(0.05)
    Checkpoint(Path(folder[0]), rank, dist.get_world_size()).save(weights)


if __name__ == "__main__":
    main()
