"""Experts exchange tokens with all_to_all; rank 1 counts with an old router, and its sizes do not fit the others'.

who: 1
why: mismatch
The sizes of rank 1 do not fit: its all_to_all has failed, and it waits; the others are still in theirs.
"""

import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Router:
    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def sends(self, step: int) -> list[int]:
        return [1 + (step + self.rank + peer) % 3 for peer in range(self.world)]

    def receives(self, step: int) -> list[int]:
        if self.rank == 1 and step == 50:
            step += 1
        return [1 + (step + peer + self.rank) % 3 for peer in range(self.world)]


def dispatch(router: Router, step: int) -> torch.Tensor:
    sends, receives = router.sends(step), router.receives(step)
    tokens = torch.randn(sum(sends), 2048)
    found = torch.zeros(sum(receives), 2048)
    dist.all_to_all_single(found, tokens, receives, sends)
    return found


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    router = Router(dist.get_rank(), dist.get_world_size())
    for step in range(10_000):
        if step == 50:
            Path(os.environ["READY"]).touch()
        try:
            dispatch(router, step)
        except RuntimeError as error:
            print(f"step {step}: {error}, waiting for an operator")
            threading.Event().wait()
        time.sleep(0.05)


if __name__ == "__main__":
    main()
