"""A cache is written under a file lock; rank 2 keeps it while it waits in a collective for rank 1, who wants it.

who: 1
why: unproven
Rank 1 waits for the lock file, and has not come; rank 2 holds the lock in the all_gather, with ranks 0 and 3.
"""

import fcntl
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Cache:
    def __init__(self, root: str) -> None:
        self.file = open(os.path.join(root, "lock"), "a", encoding="ascii")  # noqa: SIM115

    def __enter__(self) -> "Cache":
        fcntl.flock(self.file, fcntl.LOCK_EX)
        return self

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self.file, fcntl.LOCK_UN)


def sizes(mine: int) -> list[int]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    rank = dist.get_rank()
    root = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(root)
    cache = Cache(root[0])
    for step in range(1000):
        if step != 30:
            sizes(step)
        elif rank == 2:
            with cache:
                Path(os.environ["READY"]).touch()
                sizes(step)
        elif rank == 1:
            time.sleep(0.5)
            with cache:
                Path(root[0], "entry").touch()
            sizes(step)
        else:
            sizes(step)
        time.sleep(0.06)


if __name__ == "__main__":
    main()
