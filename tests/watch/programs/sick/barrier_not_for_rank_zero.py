"""Rank 0 downloads, the others wait in a barrier; rank 0 leaves its barrier out as its cache has the file.

who: 0
why: mismatch
Rank 0 is in the broadcast after the barrier in which the others still are.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Hub:
    def __init__(self) -> None:
        self.cache: set[str] = set()

    def download(self, name: str) -> None:
        time.sleep(0.05)
        self.cache.add(name)

    def fetch(self, name: str) -> None:
        if dist.get_rank() == 0:
            if name in self.cache:
                return
            self.download(name)
        dist.barrier()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    hub = Hub()
    for number in range(1000):
        name = f"adapter-{number if number != 20 else 3}"
        if number == 20:
            Path(os.environ["READY"]).touch()
        hub.fetch(name)
        version = torch.tensor([number])
        dist.broadcast(version, src=0)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
