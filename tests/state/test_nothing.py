"""States with nothing in them, and loads of nothing: what torch does, or one sentence."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

import holdfast
from holdfast._core.roster.memory import Board, MemoryRoster
from holdfast.errors import BadInput, HoldfastError, MissingTensors, SaveFailed
from tests.state.optimizers import model_of, train


def on_two(job: Any) -> list[Any]:
    """`job(rank, roster)` on two ranks; what each returns, or its error."""
    board = Board()

    def run(rank: int) -> Any:
        try:
            return job(rank, MemoryRoster(rank, 2, board))
        except HoldfastError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def test_saving_nothing_is_refused_with_a_sentence(tmp_path: Path) -> None:
    """A checkpoint of nothing would be the newest one."""
    job = holdfast.Job(no_dist=True)
    with pytest.raises(SaveFailed, match="no rank holds anything to save"):
        holdfast.save({}, tmp_path, job=job)


def test_nothing_is_loaded_of_nothing(tmp_path: Path) -> None:
    """torch's own test_no_dist saves {} and loads {}."""
    dcp.save({}, checkpoint_id=str(tmp_path))
    assert holdfast.load({}, tmp_path).tensors == 0
    holdfast.dcp.load({}, checkpoint_id=tmp_path)


def test_the_switched_functions_take_an_empty_dict_as_torchs_do(tmp_path: Path) -> None:
    holdfast.dcp.save({}, checkpoint_id=tmp_path / "a")
    holdfast.dcp.load({}, checkpoint_id=tmp_path / "a")
    with pytest.raises(MissingTensors, match="'w'"):
        holdfast.dcp.load({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "a")
    holdfast.dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "b")
    holdfast.dcp.load({}, checkpoint_id=tmp_path / "b")
    with pytest.raises(BadInput, match="asks for nothing"):
        holdfast.dcp.load({"model": {}}, checkpoint_id=tmp_path / "b")


@pytest.mark.parametrize("state", [{}, {"other": {}}, {"a": {"b": {}}}])
def test_loading_into_nothing_is_an_error(state: Any, tmp_path: Path) -> None:
    holdfast.save(
        {"model": {"w": torch.ones(2), "n": 1}}, tmp_path / "step-00000001", job=holdfast.Job(no_dist=True)
    )
    words = r"The load of .*, which holds 2 names, asks for nothing: no rank has a value in its state\."
    with pytest.raises(BadInput, match=words):
        holdfast.load(state, tmp_path / "step-00000001", job=holdfast.Job(no_dist=True))
    with pytest.raises(BadInput, match=words):
        holdfast.load(state, tmp_path / "step-00000001", job=holdfast.Job(no_dist=True), strict=False)
    with pytest.raises(BadInput, match=words):
        holdfast.Checkpoints(tmp_path, job=holdfast.Job(no_dist=True)).restore(state)


def test_one_rank_may_have_nothing_and_not_all(tmp_path: Path) -> None:
    """A pipeline stage without a part in what is loaded is ordinary; if nobody asks for anything, all ranks
    are told."""
    holdfast.save({"w": torch.ones(2)}, tmp_path, job=holdfast.Job(no_dist=True))
    target = torch.zeros(2)

    def some(rank: int, roster: MemoryRoster) -> int:
        return holdfast.load(
            {"w": target} if rank else {}, tmp_path, job=holdfast.Job(roster=roster, timeout=30)
        ).tensors

    assert on_two(some) == [0, 1]
    assert torch.equal(target, torch.ones(2))
    errors = on_two(
        lambda rank, roster: holdfast.load({}, tmp_path, job=holdfast.Job(roster=roster, timeout=30))
    )
    assert [type(error) for error in errors] == [BadInput, BadInput]
    assert str(errors[0]) == str(errors[1])
    assert errors[0].rank is None  # it is nobody's alone


def test_a_pattern_that_can_match_nothing_is_told_with_an_optimizer_too(tmp_path: Path) -> None:
    model = model_of(1)
    optimizer = torch.optim.AdamW(model.parameters())
    for state in (
        {"model": model, "optim": optimizer},
        {"optim": holdfast.get_state_dict(model, optimizer)[1]},
    ):
        for pattern in ("modle", "modle.*", "optim.stat.*", "optim.param_group"):
            with pytest.raises(BadInput, match=f"include: no name in the state matches '{pattern}"):
                holdfast.save(state, tmp_path, job=holdfast.Job(no_dist=True), include=[pattern])
        holdfast.save(state, tmp_path, job=holdfast.Job(no_dist=True), exclude=["*.exp_avg"], expected=None)
        holdfast.save(
            state, tmp_path, job=holdfast.Job(no_dist=True), exclude=["optim.state.*"], expected=None
        )


def test_an_empty_dict_where_the_checkpoint_has_more_is_told(tmp_path: Path) -> None:
    """Of an optimizer only where there is one."""
    model = model_of(1)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, [0])
    holdfast.save({"model": model, "optim": optimizer}, tmp_path, job=holdfast.Job(no_dist=True))
    with pytest.raises(
        MissingTensors, match=r"'model' is empty in the state, but .* holds 'model.0.bias'"
    ) as caught:
        holdfast.load({"model": {}}, tmp_path, job=holdfast.Job(no_dist=True))
    assert "optimizer" not in str(caught.value)
    assert "state_dict()" in str(caught.value.hint)
    fresh = torch.optim.AdamW(model.parameters()).state_dict()
    with pytest.raises(MissingTensors, match=r"'optim\.state' is empty in the state") as caught:
        holdfast.load({"optim": fresh}, tmp_path, job=holdfast.Job(no_dist=True))
    assert "Put the optimizer itself into the state" in str(caught.value.hint)


def test_an_empty_dict_where_the_checkpoint_has_nothing_is_nothing(tmp_path: Path) -> None:
    """torch DCP stores no name for it."""
    holdfast.save({"w": torch.ones(2)}, tmp_path, job=holdfast.Job(no_dist=True))
    state: dict[str, Any] = {"w": torch.zeros(2), "seen": {}}
    assert holdfast.load(state, tmp_path, job=holdfast.Job(no_dist=True)).missing == ()
    assert torch.equal(state["w"], torch.ones(2))


@pytest.mark.parametrize(
    "value",
    [
        np.array(["x", "y"]),
        np.array([b"x"]),
        np.array([None], dtype=object),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.zeros(2, dtype=[("a", "i4")]),
        [1, {"deep": (np.array(["x"]),)}],
    ],
)
def test_arrays_that_are_not_of_numbers_are_refused_with_a_sentence(value: Any, tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"'a' has a NumPy array of .* in it; only arrays of numbers"
    ) as caught:
        holdfast.save({"a": value}, tmp_path, job=holdfast.Job(no_dist=True))
    assert "\n" not in caught.value.message
    assert "weights_only" not in caught.value.message
    numbers = {"a": np.arange(3.0), "b": [np.int64(3)]}
    holdfast.save(numbers, tmp_path, job=holdfast.Job(no_dist=True))


def test_an_empty_model_state_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    """As torch's set_state_dict does; an empty optimizer state is refused, as there."""
    model, other = model_of(1), model_of(2)
    optimizer, fresh = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, other))
    train(model, optimizer, [0])
    state = holdfast.get_state_dict(model, optimizer)[1]
    before = [parameter.clone() for parameter in other.parameters()]
    holdfast.set_state_dict(other, fresh, model_state_dict={}, optim_state_dict=state)
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    assert torch.equal(fresh.state[other[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
    with pytest.raises(BadInput, match="optim_state_dict is empty, and there are optimizers to set"):
        holdfast.set_state_dict(other, fresh, model_state_dict={}, optim_state_dict={})
    assert fresh.state
    holdfast.set_state_dict(nn.Linear(2, 2), model_state_dict={}, optim_state_dict={})
