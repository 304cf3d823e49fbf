"""Uploads of logs are retried with exponential backoff; on rank 0 the pause has become a day.

who: 0
why: unproven
Rank 0 sleeps between two attempts of an upload that always fails; ranks 1-3 are in the broadcast of the config.
"""

import functools
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def with_retries(attempts: int, base: float):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            for attempt in range(attempts):
                try:
                    return function(*args, **kwargs)
                except ConnectionError:
                    time.sleep(base**attempt)
            raise RuntimeError(f"{function.__name__} failed {attempts} times")

        return wrapper

    return decorate


@with_retries(attempts=10, base=300.0)
def upload(step: int) -> None:
    if step == 30:
        raise ConnectionResetError("the bucket does not answer")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    for step in range(10_000):
        rates = torch.full((3,), 1.0 / (step + 1)) if dist.get_rank() == 0 else torch.zeros(3)
        dist.broadcast(rates, src=0)
        if step == 30:
            Path(os.environ["READY"]).touch()
        if dist.get_rank() == 0:
            upload(step)
        time.sleep(0.08)


if __name__ == "__main__":
    main()
