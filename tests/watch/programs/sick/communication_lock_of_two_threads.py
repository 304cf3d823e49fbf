"""Two threads of each rank use two groups and a lock for communication; on rank 1 the other thread comes first.

who: 1
why: cycle
On rank 1 the saver has the lock in group `saver`; on the others the trainer has it in group `trainer`.
"""

import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Communicator:
    """Lets one thread of the process into a collective at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.trainer = dist.new_group(group_desc="trainer")
        self.saver = dist.new_group(group_desc="saver")

    def mean(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        with self.lock:
            dist.all_reduce(tensor, group=group)
        return tensor / dist.get_world_size()


def save(communicator: Communicator, delay: float) -> None:
    time.sleep(delay)
    communicator.mean(torch.ones(1), communicator.saver)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    communicator = Communicator()
    holdfast.install(checkpoints=False, guard=False)
    early = dist.get_rank() == 1
    for step in range(1000):
        if step == 40:
            threading.Thread(target=save, args=(communicator, 0.0 if early else 1.2), name="saver").start()
            time.sleep(0.6)
            Path(os.environ["READY"]).touch()
        communicator.mean(torch.rand(8), communicator.trainer)
        time.sleep(0.06)


if __name__ == "__main__":
    main()
