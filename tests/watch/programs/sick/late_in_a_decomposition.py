"""An optimizer with a preconditioner decomposes a matrix now and then; rank 0 owns a far larger one.

who: 0
why: unproven
Rank 0 is in one long call of linear algebra in C, again and again; the others are in the next broadcast.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Shampoo:
    """Each rank decomposes the matrices that it owns, and sends the roots to the others."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def roots(self, scale: int) -> None:
        for owner, size in enumerate(self.sizes):
            result = torch.zeros(4)
            if owner == dist.get_rank():
                matrix = torch.randn(size * scale, size * scale)
                for _ in range(1 if scale == 1 else 20):
                    values, _ = torch.linalg.eigh(matrix @ matrix.T)
                result = values[:4].float()
            dist.broadcast(result, src=owner)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    optimizer = Shampoo([64, 8, 8, 8])
    for step in range(10_000):
        if step == 20:
            Path(os.environ["READY"]).touch()
        optimizer.roots(1 if step != 20 else 60)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
