"""A trainer that survives lost connections: it waits for the operator. Rank 2 was killed, as for its memory.

who: 2
why: error
Rank 2 was ended by SIGKILL in the middle of training; the others have seen the lost connection and wait.
"""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Resilient:
    """Runs steps; when the connection to a peer is lost, it waits for a file that says to go on."""

    def __init__(self, go_on: Path) -> None:
        self.go_on = go_on

    def wait_for_operator(self) -> None:
        while not self.go_on.exists():
            time.sleep(1.0)

    def run(self, step_function, steps: int) -> None:
        for step in range(steps):
            try:
                step_function(step)
            except RuntimeError as error:
                print(f"step {step}: {error}")
                self.wait_for_operator()


def step(number: int) -> None:
    if number == 60:
        Path(os.environ["READY"]).touch()
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    gradient = torch.randn(32)
    dist.all_reduce(gradient)
    time.sleep(0.06)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    Resilient(Path(os.environ["READY"] + ".go-on")).run(step, 10_000)
