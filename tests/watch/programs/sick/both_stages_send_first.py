"""Stages exchange activations and gradients; after a change of the schedule ranks 1 and 2 both send first.

who: 1,2
why: cycle
Rank 1 waits in send to rank 2, rank 2 in send to rank 1; ranks 0 and 3 wait in the all_reduce at the step's end.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Stage:
    def __init__(self, peer: int, sends_first: bool) -> None:
        self.peer, self.sends_first = peer, sends_first

    def exchange(self, mine: torch.Tensor) -> torch.Tensor:
        theirs = torch.empty_like(mine)
        if self.sends_first:
            dist.send(mine, dst=self.peer)
            dist.recv(theirs, src=self.peer)
        else:
            dist.recv(theirs, src=self.peer)
            dist.send(mine, dst=self.peer)
        return theirs


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    rank = dist.get_rank()
    peers = {0: 3, 1: 2, 2: 1, 3: 0}
    stage = Stage(peers[rank], sends_first=rank < 2)
    for step in range(10_000):
        if step == 40:
            Path(os.environ["READY"]).touch()
            stage.sends_first = stage.sends_first or rank == 2
        received = stage.exchange(torch.rand(1 << 16))
        norm = received.norm()
        dist.all_reduce(norm)
        time.sleep(0.06)


if __name__ == "__main__":
    main()
