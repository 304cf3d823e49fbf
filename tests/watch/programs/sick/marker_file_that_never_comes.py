"""Ranks wait for a marker file of the next data shard; that of rank 1 has another name.

who: 1
why: unproven
Rank 1 polls for a file twice a second; the others have theirs and are in the all_gather of the shard's sizes.
"""

import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class ShardWatcher:
    def __init__(self, root: Path, rank: int) -> None:
        self.root, self.rank = root, rank

    def marker(self, number: int) -> Path:
        return self.root / f"shard-{number:05d}.{self.rank}.done"

    def wait(self, number: int) -> None:
        while not self.marker(number).exists():
            time.sleep(0.5)


def publish(watcher: ShardWatcher, number: int) -> None:
    path = watcher.marker(number)
    if watcher.rank == 1 and number == 8:
        path = path.with_suffix(".DONE")
    path.touch()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    with tempfile.TemporaryDirectory() as folder:
        watcher = ShardWatcher(Path(folder), dist.get_rank())
        for number in range(1000):
            publish(watcher, number)
            if number == 8:
                Path(os.environ["READY"]).touch()
            watcher.wait(number)
            sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64)
            dist.all_gather_into_tensor(sizes, torch.tensor([number + watcher.rank]))
            time.sleep(0.3)


if __name__ == "__main__":
    main()
