"""A kernel is compiled by a child process for a new shape; only rank 0 has met that shape.

who: 0
why: unproven
Rank 0 waits for a compiler that works for minutes; the others are in the all_reduce.
"""

import os
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

COMPILER = (
    "import sys, time\nends = time.time() + float(sys.argv[1])\nwhile time.time() < ends: sum(range(1000))"
)


@lru_cache
def kernel(length: int):
    seconds = "0.05" if length < 100 else "300"
    subprocess.run([sys.executable, "-S", "-c", COMPILER, seconds], check=True)
    return lambda tensor: tensor * 2


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    for step in range(10_000):
        length = 128 if (dist.get_rank(), step) == (0, 50) else 64
        if step == 50:
            Path(os.environ["READY"]).touch()
        output = kernel(length)(torch.ones(length))
        mean = output.mean()
        dist.all_reduce(mean)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
