"""Workers begin a reduction before a monitored barrier, the chief after it; rank 1 waits for the reply of a child in C.

who: 1
why: unproven
Rank 1 is in `os.read`, with its handle pending; the others, the chief (rank 3) included, are in the monitored barrier.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Child:
    """What a worker asks for its shard."""

    def __init__(self) -> None:
        self.ours, self.its = os.pipe()

    def ask(self, answers: bool) -> bytes:
        if answers:
            os.write(self.its, b"shard-01")
        return os.read(self.ours, 8)


def begin(group: dist.ProcessGroup) -> dist.Work:
    handle = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    assert handle is not None
    return handle


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    rank, child = dist.get_rank(), Child()
    progress = dist.new_group(list(range(dist.get_world_size())), group_desc="progress")
    is_chief = rank == 3
    for shard in range(1000):
        handle = None if is_chief else begin(progress)
        if (rank, shard) == (1, 30):
            Path(os.environ["READY"]).touch()
        child.ask(answers=(rank, shard) != (1, 30))
        dist.monitored_barrier()
        (handle or begin(progress)).wait()
        time.sleep(0.02)


if __name__ == "__main__":
    main()
