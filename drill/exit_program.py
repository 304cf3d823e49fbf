"""A rank of a training job that ends in one way or another: python -m drill.exit_program HOW SECONDS ENDING.

HOW is `stock` or `install`, SECONDS the timeout of its collectives.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import holdfast
from tests.frameworks.megatron.cpu import use_cpu
from tests.groups.session.jobs import dawdle, end_with

AFTER_END_S = 6.0
"""What `install` is given: nothing else of it is reached."""
BEGINS = "the end begins at "
"""Before the seconds of the monotonic clock, on the terminal."""
FOREVER = 100_000.0
THREAD, ALONE = "thread", "alone"


def train(seconds: float) -> None:
    """Groups as Megatron makes them, and a first step."""
    use_cpu()
    from megatron.core import parallel_state

    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    parallel_state.initialize_model_parallel(2)
    dist.all_reduce(torch.ones(1))


def end(ending: str, rank: int, seconds: float) -> None:
    if ending == THREAD:
        if rank == 1:
            threading.Thread(target=upload, name="uploader").start()
    elif ending == ALONE:
        if rank == 0:
            dist.all_reduce(torch.ones(1))
        dawdle(2 * seconds)  # none of the others comes to it; they are at work elsewhere
    else:
        end_with(ending, rank, None)


def upload() -> None:
    """As a client library's thread, which nobody ends."""
    time.sleep(FOREVER)


if __name__ == "__main__":
    how, seconds, ending = sys.argv[1:]
    torch.set_num_threads(1)
    if how == "install":
        holdfast.install(after_end=AFTER_END_S)
    train(float(seconds))
    os.write(1, f"{BEGINS}{time.monotonic()}\n".encode())  # at once: others write there, too
    end(ending, int(os.environ["RANK"]), float(seconds))
