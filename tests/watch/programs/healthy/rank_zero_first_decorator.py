"""A decorator lets rank 0 build the vocabulary first and the others read what it has built."""

import functools
import os
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def rank_zero_first(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        result = None
        if dist.get_rank() == 0:
            result = function(*args, **kwargs)
        dist.barrier()
        if dist.get_rank() != 0:
            result = function(*args, **kwargs)
        dist.barrier()
        return result

    return wrapper


@rank_zero_first
def build_vocabulary(folder: Path) -> list[str]:
    path = folder / "vocabulary.txt"
    if path.exists():
        return path.read_text().split("\n")
    Path(os.environ["READY"]).touch()
    pairs: Counter[str] = Counter()
    begun = time.monotonic()
    text = "low lower lowest new newer newest wide wider widest " * 30
    while time.monotonic() - begun < 9:
        for left, right in pairwise(text):
            pairs[left + right] += 1
    path.write_text("\n".join(pair for pair, _ in pairs.most_common(50)))
    return path.read_text().split("\n")


def train_one_epoch(model, optimizer, size: int) -> None:
    for step in range(4):
        optimizer.zero_grad(set_to_none=True)
        model(torch.full((2, size), float(step))).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        optimizer.step()


def run() -> None:
    vocabulary = build_vocabulary(Path(os.environ["RUN_FOLDER"]))
    model = torch.nn.Linear(len(vocabulary), 2)
    train_one_epoch(model, torch.optim.SGD(model.parameters(), lr=0.01), len(vocabulary))


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
run()
dist.destroy_process_group()
