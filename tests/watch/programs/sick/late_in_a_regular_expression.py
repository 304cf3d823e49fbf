"""Texts are filtered with a regular expression; a text of rank 3 makes it backtrack for hours, with the GIL held.

who: 3
why: unproven
Rank 3 is inside one call of `re`, and no other thread of it can run; the others are in the all_reduce.
"""

import os
import re
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

CLEAN = re.compile(r"^(\w+\s?)*$")


def texts(rank: int):
    for number in range(100_000):
        bad = rank == 3 and number == 60
        yield "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!" if bad else "a clean text"


def keep(text: str) -> bool:
    return CLEAN.match(text) is not None


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    kept = 0
    for number, text in enumerate(texts(dist.get_rank())):
        if number == 60:
            Path(os.environ["READY"]).touch()
        kept += keep(text)
        count = torch.tensor(kept)
        dist.all_reduce(count)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
