"""What the ranks do in the tests of `TrainState`; importable by spawned processes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import holdfast
from holdfast.errors import HoldfastError

JOB = holdfast.Job(timeout=60)


class Loader:
    """A loader whose state has other names in an epoch than before it, and a tensor in it."""

    def __init__(self, rank: int) -> None:
        self.rank, self.read = rank, list[int]()

    def next(self) -> int:
        self.read.append(100 * self.rank + len(self.read))
        return self.read[-1]

    def state_dict(self) -> dict[str, Any]:
        return (
            {"epoch": {"read": tuple(self.read), "left": torch.arange(len(self.read))}} if self.read else {}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = [*state["epoch"]["read"]] if state else []
        assert not state or state["epoch"]["left"].tolist() == [*range(len(self.read))]


def draw() -> list[float]:
    """What Python, NumPy and torch draw next; the normal ones keep a second number for the next call."""
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(()))]


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def share(states: Mapping[int, Any]) -> Any:
    """The rule for another number of ranks: this rank goes on behind all that was read."""
    read = [one for state in states.values() for one in state["epoch"]["read"]]
    mine = [dist.get_rank() * 100, *read]
    return {"epoch": {"read": tuple(mine), "left": torch.arange(len(mine))}}


def make(rank: int, with_loader: bool, merges: bool = False) -> tuple[holdfast.TrainState, Loader]:
    """A rank at its start, whose random states are not those of the run."""
    seed(1000 + rank)
    loader, scaler = Loader(rank), torch.amp.GradScaler("cpu", init_scale=1.0)
    given = loader if with_loader else None
    return holdfast.TrainState(given, scaler=scaler, merge=share if merges else None, job=JOB), loader


def save(rank: int, run: str, with_loader: bool) -> tuple[list[float], int]:
    """Save step 7, and go on; return what comes then."""
    train, loader = make(rank, with_loader)
    assert train.scaler is not None
    seed(rank)
    draw()
    loader.next()
    train.scaler.load_state_dict({**train.scaler.state_dict(), "scale": 1024.0})
    train.step, train.epoch = 7, 2
    with holdfast.Checkpoints(run, job=JOB) as checkpoints:
        checkpoints.save(7, {"w": torch.ones(4), "train": train})
    return draw(), loader.next()


def merged(rank: int, run: str) -> tuple[list[int], int]:
    """Go on from step 7 with a rule; return what the loader is told that was read."""
    train, loader = make(rank, True, merges=True)
    with holdfast.Checkpoints(run, job=JOB) as checkpoints:
        checkpoints.restore({"w": torch.zeros(4), "train": train})
    return loader.read, train.step


def resume(
    rank: int, run: str, with_loader: bool, exclude: list[str] | None = None
) -> tuple[list[float], int, tuple[int, int, float]] | str:
    """Go on from step 7, or return the error and prove that nothing was set."""
    train, loader = make(rank, with_loader)
    with holdfast.Checkpoints(run, job=JOB) as checkpoints:
        try:
            checkpoints.restore({"w": torch.zeros(4), "train": train}, exclude=exclude)
        except HoldfastError as error:
            assert (train.step, train.epoch, loader.read) == (0, 0, [])
            seed(1000 + rank)
            expected = draw()
            seed(1000 + rank)
            assert draw() == expected
            return f"{type(error).__name__}: {error}"
    assert train.scaler is not None
    return draw(), loader.next(), (train.step, train.epoch, train.scaler.state_dict()["scale"])
