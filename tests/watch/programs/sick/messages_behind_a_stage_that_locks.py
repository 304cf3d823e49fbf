"""Stages of a pipeline exchange with isend and irecv; stage 1 waits for a lock file that a dead process has left.

who: 1
why: unproven
Rank 0 waits for the gradient of rank 1, ranks 2 and 3 for activations, all in handles. There is no collective.
"""

import fcntl
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

HOLDS = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(flush=True); time.sleep(600)"


def spill(folder: Path, is_held: bool) -> None:
    path = folder / "spill.lock"
    if is_held:
        holder = subprocess.Popen([sys.executable, "-c", HOLDS, str(path)], stdout=subprocess.PIPE)
        assert holder.stdout is not None
        holder.stdout.readline()
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


class Stage:
    def __init__(self) -> None:
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        if self.rank > 0:
            received = dist.irecv(activation, self.rank - 1)
            received.wait()
        return torch.tanh(activation)

    def send(self, tensor: torch.Tensor, to: int) -> dist.Work | None:
        return dist.isend(tensor, to) if 0 <= to <= self.last else None

    def backward(self, gradient: torch.Tensor) -> None:
        if self.rank < self.last:
            received = dist.irecv(gradient, self.rank + 1)
            received.wait()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    stage, folder = Stage(), Path(tempfile.mkdtemp())
    for step in range(1000):
        if step == 40:
            Path(os.environ["READY"]).touch()
        output = stage.forward(torch.rand(64))
        if stage.rank == 1:
            spill(folder, is_held=step == 40)
        sent = stage.send(output, stage.rank + 1)
        gradient = torch.rand(64)
        stage.backward(gradient)
        back = stage.send(gradient, stage.rank - 1)
        for handle in (sent, back):
            if handle is not None:
                handle.wait()
        time.sleep(0.02)


if __name__ == "__main__":
    main()
