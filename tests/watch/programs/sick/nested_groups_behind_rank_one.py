"""Groups of two in a row: 2 and 3, 1 and 3, all. Rank 1 reads from storage that does not answer.

who: 1
why: unproven
Rank 3 waits for rank 1 in the pair (1, 3), rank 2 for rank 3 in (2, 3), rank 0 for all in the world.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Storage:
    """Stands for a mount whose server is gone: a pipe without a writer's end in use."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def read(self, is_gone: bool) -> bytes:
        if not is_gone:
            os.write(self.writer, b"block")
        return os.read(self.reader, 5)


def reduce(group: dist.ProcessGroup | None) -> None:
    dist.all_reduce(torch.ones(3), group=group)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lower = dist.new_group([1, 3], group_desc="lower")
    upper = dist.new_group([2, 3], group_desc="upper")
    holdfast.install(checkpoints=False, guard=False)
    rank, storage = dist.get_rank(), Storage()
    for step in range(1000):
        if step == 25:
            Path(os.environ["READY"]).touch()
        storage.read(is_gone=(rank, step) == (1, 25))
        if rank in (1, 3):
            reduce(lower)
        if rank in (2, 3):
            reduce(upper)
        reduce(None)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
