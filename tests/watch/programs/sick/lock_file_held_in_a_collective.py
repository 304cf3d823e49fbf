"""Ranks of one host extract an archive under a file lock; rank 0 calls a barrier while it holds the lock.

who: 1,2,3
why: unproven
Ranks 1-3 want the lock, which rank 0 holds while it waits in the barrier for them: none of them will come.
"""

import contextlib
import fcntl
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


@contextlib.contextmanager
def locked(path: str):
    with open(path, "w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def prepare(folder: str) -> None:
    with locked(os.path.join(folder, ".lock")):
        done = Path(folder, "extracted")
        if not done.exists():
            done.touch()
            Path(os.environ["READY"]).touch()
            dist.barrier()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    rank = dist.get_rank()
    where = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(where)
    for _ in range(40):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.05)
    if rank:
        time.sleep(0.5)
    prepare(where[0])
    dist.barrier()


if __name__ == "__main__":
    main()
