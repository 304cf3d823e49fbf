"""Stage 1 passes activations on to stage 0 after a reduction with rank 2, its replica, which somebody has stopped.

who: 2
why: stopped
Rank 1 waits for its handle in a group of two with rank 2; rank 0 waits in recv for rank 1, rank 3 in the barrier.
"""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Stage:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.replicas = dist.new_group([1, 2], group_desc="replicas")

    def reduce(self, gradient: torch.Tensor) -> None:
        if self.rank in (1, 2):
            handle = dist.all_reduce(gradient, group=self.replicas, async_op=True)
            assert handle is not None
            handle.wait()

    def hand_on(self, gradient: torch.Tensor) -> None:
        if self.rank == 1:
            dist.send(gradient, dst=0)
        if self.rank == 0:
            dist.recv(gradient, src=1)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    stage = Stage(dist.get_rank())
    for step in range(1000):
        if (stage.rank, step) == (2, 60):
            Path(os.environ["READY"]).touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        gradient = torch.full((64,), float(step))
        stage.reduce(gradient)
        stage.hand_on(gradient)
        dist.barrier()
        time.sleep(0.05)


if __name__ == "__main__":
    main()
