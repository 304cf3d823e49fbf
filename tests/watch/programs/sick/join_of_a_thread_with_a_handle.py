"""Rank 1 joins a thread that waits for its handle in a group with rank 2, which wants a lock before its own.

who: 2
why: unproven
The thread of rank 1 waits for rank 2; its main thread joins it, and ranks 0 and 3 wait for both in the all_reduce.
"""

import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def share(tensor: torch.Tensor, pair: dist.ProcessGroup) -> None:
    handle = dist.all_reduce(tensor, group=pair, async_op=True)
    assert handle is not None
    finisher = threading.Thread(target=finish, args=(handle,), name="finisher")
    finisher.start()
    finisher.join()


def finish(handle: dist.Work) -> None:
    handle.wait()


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
