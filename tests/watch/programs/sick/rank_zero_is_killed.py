"""The process of rank 0, which holds the dataset's index, is killed while the others get ready for the next phase.

who: 0
why: error
Rank 0 has died of SIGKILL; ranks 1-3 wait in new_group for it.
"""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Phase:
    """One phase of a curriculum, with a group of its own."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps = name, steps

    def open(self) -> None:
        self.group = dist.new_group(group_desc=self.name)

    def run(self) -> None:
        for _ in range(self.steps):
            dist.all_reduce(torch.rand(4), group=self.group)
            time.sleep(0.05)

    def close(self) -> None:
        dist.destroy_process_group(self.group)


def index(phase: str, rank: int) -> list[int]:
    if rank == 0 and phase == "long":
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory is short
    return list(range(1000))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    for phase in (Phase("short", 70), Phase("long", 1000)):
        if phase.name == "long":
            Path(os.environ["READY"]).touch()
        index(phase.name, dist.get_rank())
        phase.open()
        phase.run()
        phase.close()


if __name__ == "__main__":
    main()
