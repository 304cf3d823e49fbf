"""At the end of an epoch rank 0 prunes checkpoints and plots, while the others have begun the next epoch's first step."""

import json
import os
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

FOLDER = Path(os.environ["RUN_FOLDER"])


def plot(history: list[float], seconds: float) -> str:
    """Draw a curve as SVG, by one kernel smoother for each of many bandwidths."""
    ends = time.monotonic() + seconds
    text = ""
    bandwidth = 1
    while not text or time.monotonic() < ends:
        curve = [
            sum(value / (1 + abs(at - i) / bandwidth) for i, value in enumerate(history))
            for at in range(len(history))
        ]
        text = "<svg>" + " ".join(f"{x},{y:.3f}" for x, y in enumerate(curve)) + "</svg>"
        bandwidth += 1
    return text


def prune(keep: int) -> None:
    found = sorted(FOLDER.glob("epoch-*"))
    for old in found[:-keep]:
        shutil.rmtree(old)


def end_epoch(epoch: int, history: list[float]) -> None:
    if dist.get_rank() != 0:
        return
    folder = FOLDER / f"epoch-{epoch}"
    folder.mkdir()
    (folder / "history.json").write_text(json.dumps(history))
    prune(2)
    if epoch == 2:
        Path(os.environ["READY"]).touch()
    (folder / "curve.svg").write_text(plot(history, 9.0 if epoch == 2 else 0.0))


def train_epoch(weight: torch.Tensor, history: list[float]) -> None:
    for _ in range(20):
        gradient = torch.randn(8) + weight
        dist.all_reduce(gradient)
        weight -= 0.01 * gradient
        history.append(weight.norm().item())


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
weight, history = torch.ones(8), []
for epoch in range(4):
    train_epoch(weight, history)
    end_epoch(epoch, history)
dist.barrier()
dist.destroy_process_group()
