"""A preprocessing command is run with subprocess; on rank 1 it waits for an input that nobody writes.

who: 1
why: unproven
Rank 1 waits for its child process, which reads from a pipe that stays open; ranks 0, 2, 3 are in all_gather.
"""

import os
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def count_lines(shard: int, rank: int) -> int:
    command = ["wc", "-l"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("line\n" * (shard + rank))
        child.stdin.flush()
        if not (rank == 1 and shard == 12):
            child.stdin.close()
        child.wait()
        return int(child.stdout.read())


def exchange(value: int, world: int) -> list[int]:
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(found, torch.tensor([value]))
    return [int(one) for one in found]


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    me, size = dist.get_rank(), dist.get_world_size()
    for shard in range(1000):
        if shard == 12:
            Path(os.environ["READY"]).touch()
        lines = exchange(count_lines(shard, me), size)
        time.sleep(0.2)
