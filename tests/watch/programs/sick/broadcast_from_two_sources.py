"""The newest checkpoint is broadcast by the rank that has it; rank 3 believes that it has it itself.

who: none
why: mismatch
All are in a broadcast at one line, in three numbers, with two ideas of its source. (Labelled `unproven` before the roll call
read the source.)
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def newest(rank: int, steps: dict[int, int]) -> int:
    """Return the rank that has the newest checkpoint, as this rank believes."""
    return max(steps, key=lambda one: (steps[one], one))


def share(rank: int, steps: dict[int, int], weights: torch.Tensor) -> None:
    source = newest(rank, steps)
    dist.broadcast(weights, src=source)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    rank = dist.get_rank()
    weights = torch.full((16,), float(rank))
    steps = dict.fromkeys(range(dist.get_world_size()), 0)
    for step in range(1000):
        steps[step % 3] = step
        if step == 40:
            Path(os.environ["READY"]).touch()
            if rank == 3:
                steps[3] = step + 1
        share(rank, steps, weights)
        time.sleep(0.08)


if __name__ == "__main__":
    main()
