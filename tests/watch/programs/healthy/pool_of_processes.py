"""`map` with two processes, as data sets have it: rank 0 waits for its pool, the others for rank 0."""

import multiprocessing as mp
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def normalise(part: tuple[list[str], float]) -> list[str]:
    lines, seconds = part
    ends = time.monotonic() + seconds
    while True:
        found = [" ".join(sorted(set(line.lower().split()))) for line in lines]
        if time.monotonic() >= ends:
            return found


def mapped(lines: list[str], processes: int = 2) -> list[str]:
    parts = [(lines[start::4], 4.3) for start in range(4)]
    with mp.get_context("fork").Pool(processes) as pool:
        return sum(pool.imap(normalise, parts), [])  # noqa: RUF017


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    lines = ["The quick brown Fox jumps over the lazy dog"] * 100
    found = [None]
    if dist.get_rank() == 0:
        Path(os.environ["READY"]).touch()
        found = [mapped(lines)]
    dist.broadcast_object_list(found, src=0)
    lengths = torch.tensor([len(line) for line in found[0]], dtype=torch.float32)
    dist.all_reduce(lengths)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
