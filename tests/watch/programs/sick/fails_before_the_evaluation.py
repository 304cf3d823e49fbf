"""One rank can't read its configuration of the evaluation and ends with a traceback; others open a new group.

who: 1
why: error
Rank 1 raised a KeyError and its process has ended with code 1; ranks 0, 2, 3 wait in new_group until it takes part.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

SETTINGS = {0: {"beams": 4}, 1: {"beam": 4}, 2: {"beams": 4}, 3: {"beams": 2}}


class Evaluator:
    def __init__(self, settings: dict[str, int]) -> None:
        self.beams = settings["beams"]
        self.group = dist.new_group(group_desc="evaluation")

    def run(self) -> None:
        dist.barrier(group=self.group)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    for _ in range(80):
        dist.all_reduce(torch.rand(2, 2))
        time.sleep(0.05)
    Path(os.environ["READY"]).touch()
    Evaluator(SETTINGS[dist.get_rank()]).run()


if __name__ == "__main__":
    main()
