"""A pipeline of four stages passes activations with send and recv; the process of stage 2 is stopped.

who: 2
why: stopped
Rank 2 has SIGSTOP; rank 3 waits to receive from it, rank 1 to send to it, and rank 0 to send to rank 1.
"""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def stage(rank: int, last: int, micro: int) -> None:
    activations = torch.full((4,), float(micro))
    if rank > 0:
        dist.recv(activations, src=rank - 1)
    if micro == 60:
        Path(os.environ["READY"]).touch()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
    activations = activations * 1.5
    time.sleep(0.05)
    if rank < last:
        dist.send(activations, dst=rank + 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    for number in range(10_000):
        stage(dist.get_rank(), dist.get_world_size() - 1, number)
