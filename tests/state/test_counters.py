"""The counter of an optimizer's steps, saved as one kind of number and loaded where another one is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import ShapeMismatch

ALONE = holdfast.Job(no_dist=True)
KINDS: dict[str, Callable[[int], object]] = {
    "int": int,
    "float": float,
    "float32": lambda count: torch.tensor(float(count)),
    "float64": lambda count: torch.tensor(float(count), dtype=torch.float64),
    "bfloat16": lambda count: torch.tensor(float(count), dtype=torch.bfloat16),
    "int64": torch.tensor,
}
Way = Callable[[torch.nn.Module, torch.optim.Optimizer], dict[str, Any]]
WAYS: dict[str, Way] = {
    "optimizer": lambda model, optimizer: {"model": model, "optim": optimizer},
    "nested": lambda model, optimizer: named(model, optimizer, False),
    "flat": lambda model, optimizer: named(model, optimizer, True),
}


def named(model: torch.nn.Module, optimizer: torch.optim.Optimizer, flat: bool) -> dict[str, Any]:
    weights, states = holdfast.get_state_dict(model, optimizer, flatten_optimizer_state_dict=flat)
    return {"model": weights, "optim": states}


def take_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(3)).square().sum().backward()
    optimizer.step()


def trained(kind: type[Any], count: object = None, **given: Any) -> tuple[torch.nn.Module, Any]:
    """A model and an optimizer that has taken a step, and counts from `count` on."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    optimizer = kind(model.parameters(), **given)
    take_step(model, optimizer)
    for state in optimizer.state.values() if count is not None else ():
        state["step"] = count.clone() if isinstance(count, torch.Tensor) else count
    return model, optimizer


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("into", KINDS)
@pytest.mark.parametrize("saved", KINDS)
def test_a_counter_may_change_its_kind(tmp_path: Path, saved: str, into: str, way: str) -> None:
    holdfast.save(WAYS[way](*trained(torch.optim.AdamW, KINDS[saved](129))), tmp_path / "it", job=ALONE)
    model, optimizer = trained(torch.optim.AdamW, KINDS[into](1))
    holdfast.load(WAYS[way](model, optimizer), tmp_path / "it", job=ALONE)
    take_step(model, optimizer)  # refuses a state that it can't count in
    assert [int(state["step"]) for state in optimizer.state.values()] == [130, 130]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.NAdam, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {}),
    ],
    ids=["foreach", "fused", "NAdam", "Adagrad", "RMSprop"],
)
@pytest.mark.parametrize("fresh", [False, True])
def test_a_counter_that_was_a_number_is_one_that_the_optimizer_steps_with(
    tmp_path: Path, kind: type[Any], given: dict[str, Any], way: str, fresh: bool
) -> None:
    """Versions of torch before 1.12 have counted so."""
    source, saved = trained(kind, 41, **given)
    holdfast.save(WAYS[way](source, saved), tmp_path / "it", job=ALONE)
    model, optimizer = trained(kind, **given)
    if fresh:
        optimizer = kind(model.parameters(), **given)
    holdfast.load(WAYS[way](model, optimizer), tmp_path / "it", job=ALONE)
    saved.__setstate__({})  # what torch makes of such a state
    for _ in range(2):
        take_step(model, optimizer)
        take_step(source, saved)
    assert all(map(torch.equal, model.parameters(), source.parameters()))
    for mine, theirs in zip(optimizer.state.values(), saved.state.values(), strict=True):
        assert (mine["step"].dtype, mine["step"].item()) == (theirs["step"].dtype, 43)


NUMBERS: list[tuple[torch.Tensor, torch.Tensor]] = [
    (torch.tensor((1 << 24) + 1), torch.tensor(0.0)),
    (torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.0)),
    (torch.tensor(1.5), torch.tensor(7)),
    (torch.tensor((1 << 63) - 1), torch.tensor(0.0, dtype=torch.float64)),
    (torch.tensor(300), torch.tensor(7, dtype=torch.uint8)),
    (torch.tensor(float("nan")), torch.tensor(7)),
]


@pytest.mark.parametrize(("stored", "here"), NUMBERS, ids=repr)
def test_a_number_that_another_dtype_can_not_hold_is_refused(
    tmp_path: Path, stored: torch.Tensor, here: torch.Tensor
) -> None:
    holdfast.save({"count": stored}, tmp_path / "it", job=ALONE)
    before = here.clone()
    with pytest.raises(ShapeMismatch, match=r"'count': the checkpoint holds .* which would make it") as error:
        holdfast.load({"count": here}, tmp_path / "it", job=ALONE)
    assert torch.equal(here, before)
    assert "cast=True" in error.value.hint
    holdfast.load({"count": here}, tmp_path / "it", cast=True, job=ALONE)


def test_a_number_that_fits_is_put_into_the_same_tensor(tmp_path: Path) -> None:
    holdfast.save({"a": torch.tensor(1 << 24), "b": torch.tensor(float("nan"))}, tmp_path / "it", job=ALONE)
    state = {"a": torch.tensor(0.0, requires_grad=True), "b": torch.tensor(0.0, dtype=torch.float64)}
    a, version = state["a"], state["a"]._version
    holdfast.load(state, tmp_path / "it", job=ALONE)
    assert state["a"] is a
    assert a.item() == 1 << 24
    assert a._version > version
    assert state["b"].isnan()
    with pytest.raises(ShapeMismatch):  # of weights the dtype is meant
        holdfast.load({"a": torch.zeros(1)}, tmp_path / "it", job=ALONE)
