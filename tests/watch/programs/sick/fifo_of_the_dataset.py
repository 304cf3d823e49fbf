"""Training data is streamed through named pipes; the writer of rank 0's pipe was never started.

who: 0
why: unproven
Rank 0 opens its pipe of the second epoch for reading and blocks; ranks 1-3 are in the all_reduce of that epoch.
"""

import os
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def pipe_of(folder: str, epoch: int) -> str:
    path = os.path.join(folder, f"epoch-{epoch}")
    os.mkfifo(path)
    return path


def write(path: str, lines: int) -> None:
    with open(path, "w", encoding="utf-8") as pipe:
        for number in range(lines):
            pipe.write(f"{number}\n")


def read(path: str):
    with open(path, encoding="utf-8") as pipe:
        for line in pipe:
            yield float(line)


def train_epoch(epoch: int, folder: str, has_writer: bool) -> float:
    path = pipe_of(folder, epoch)
    if has_writer:
        threading.Thread(target=write, args=(path, 25), daemon=True).start()
    seen = 0.0
    for value in read(path):
        gradient = torch.tensor([value])
        dist.all_reduce(gradient, op=dist.ReduceOp.MAX)
        seen += gradient.item()
        time.sleep(0.1)
    return seen


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
with tempfile.TemporaryDirectory() as scratch:
    for epoch in range(3):
        if epoch == 1:
            Path(os.environ["READY"]).touch()
        seen = train_epoch(epoch, scratch, has_writer=not (dist.get_rank() == 0 and epoch == 1))
        print(f"epoch {epoch}: {seen}")
