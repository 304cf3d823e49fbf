"""Small models and how they are trained, compared and saved, for tests of optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from holdfast._core.state.subclasses import inner_tensors, is_wrapper

Optimizer = torch.optim.Optimizer


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False))


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    """A step for each number, on data of its own."""
    wide = next(model.parameters()).shape[1]
    for number in steps:

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            rows = torch.linspace(-1, 1, 5 * wide).view(5, wide)
            loss = model(rows * (number + 1)).square().sum()  # noqa: B023
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)  # type: ignore[arg-type]
        else:
            closure()
            optimizer.step()


def equal(one: Any, other: Any) -> bool:
    """Are they the same, in type, and bit for bit?"""
    if type(one) is not type(other):
        return False
    if is_wrapper(one):
        pairs = zip(inner_tensors(one), inner_tensors(other), strict=True)
        return all(a == b and equal(mine, theirs) for (a, mine), (b, theirs) in pairs)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def equal_weights(model: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


def equal_states(model: nn.Module, optimizer: Optimizer, other: nn.Module, fresh: Optimizer) -> None:
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        mine, theirs = optimizer.state.get(a, {}), fresh.state.get(b, {})
        assert mine.keys() == theirs.keys(), (name, mine.keys(), theirs.keys())
        for key, value in mine.items():
            assert equal(value, theirs[key]), (name, key, value, theirs[key])
