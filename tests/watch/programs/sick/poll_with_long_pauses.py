"""Rank 1 looks at its handle every five seconds; rank 2, its peer there, wants a lock that is never released.

who: 2
why: unproven
Ranks 0 and 3 wait for both in the all_reduce of all, rank 1 in its loop for rank 2.
"""

import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def share(tensor: torch.Tensor, pair: dist.ProcessGroup) -> torch.Tensor:
    work = dist.all_reduce(tensor, group=pair, async_op=True)
    assert work is not None
    begun = time.monotonic()
    pause = 0.001
    while not work.is_completed():
        time.sleep(pause)
        if time.monotonic() - begun > 0.5:
            pause = 5.0
    return tensor / 2


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    pair, cache, rank = dist.new_group([1, 2], group_desc="experts"), threading.Lock(), dist.get_rank()
    for step in range(1000):
        if step == 40:
            Path(os.environ["READY"]).touch()
            if rank == 2:
                cache.acquire()
                cache.acquire()
        if rank in (1, 2):
            share(torch.rand(8), pair)
        dist.all_reduce(torch.rand(8))
        time.sleep(0.03)


if __name__ == "__main__":
    main()
