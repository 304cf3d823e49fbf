"""A worker of a fault-tolerant job ends itself with os._exit(0) after a preemption notice; others wait for a start.

who: 1
why: ended
Rank 1 is gone by os._exit(0); the others have caught the lost connection and wait on the store for a new round.
"""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

preempted = False


def on_notice(number: int, frame: object) -> None:
    global preempted
    preempted = True


class Rounds:
    def __init__(self) -> None:
        self.store = dist.distributed_c10d._get_default_store()
        self.number = 0

    def wait_for_next(self) -> None:
        self.number += 1
        self.store.wait([f"round-{self.number}"], timedelta(hours=1))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    signal.signal(signal.SIGUSR2, on_notice)
    rounds = Rounds()
    for step in range(10_000):
        if step == 60:
            Path(os.environ["READY"]).touch()
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR2)
        if preempted:
            print("preempted, bye", flush=True)
            os._exit(0)
        try:
            dist.all_reduce(torch.ones(4))
        except RuntimeError:
            rounds.wait_for_next()
        time.sleep(0.06)


if __name__ == "__main__":
    main()
