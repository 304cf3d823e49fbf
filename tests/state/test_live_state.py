"""A state that is built once, before the first step: each save and each load looks again at what there is by
then."""

from __future__ import annotations

import copy
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast._tools.checkpoints.inspect import describe
from tests.docs.pages import text
from tests.state.optimizers import equal_states, equal_weights, model_of, train

STEPS = 5


def state_of(model: nn.Module, optimizer: Any, **how: Any) -> dict[str, Any]:
    model_state, optim_state = holdfast.get_state_dict(model, optimizer, **how)
    return {"model": model_state, "optim": optim_state}


def loop_of_the_docs() -> str:
    """What stands in the session's block of docs/groups.md."""
    found = re.search(r"with holdfast\.session\(.*\) as s:\n((?:    .*\n)+)", text("docs/groups.md"))
    assert found is not None
    return "\n".join(line[4:] for line in found[1].split("\n"))


@pytest.mark.parametrize("flat", [False, True])
def test_the_loop_of_the_docs_goes_on_where_it_was(
    flat: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is built once in each life, and nobody calls set_state_dict: the loop doesn't, either."""
    monkeypatch.chdir(tmp_path)
    loop = loop_of_the_docs()
    assert "restore(state)" in loop
    assert "save(step, state)" in loop

    def live(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer, list[int]]:
        model, trained = model_of(seed), list[int]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / seed)

        def step(number: int, *groups: Any) -> None:
            trained.append(number)
            train(model, optimizer, [number])

        opened: list[holdfast.Checkpoints] = []

        def checkpoints(run: str, keep: int) -> holdfast.Checkpoints:
            opened.append(holdfast.Checkpoints(run, keep=keep, job=holdfast.Job(no_dist=True)))
            return opened[-1]

        space = {
            "s": SimpleNamespace(checkpoints=checkpoints, groups={"tp": None, "edp": None}),
            "state": state_of(model, optimizer, flatten_optimizer_state_dict=flat),
            "train": step,
            "steps": steps,
        }
        exec(loop, space)
        opened[0].close()
        return model, optimizer, trained

    live(1, 3)
    assert "optim.state.0.weight.exp_avg" in {f.name for f in describe("run/step-00000002").shown}
    model, optimizer, trained = live(2, STEPS)
    assert trained[-1] == STEPS - 1
    assert trained[0] in (2, 3)
    other = model_of(1)
    alone = torch.optim.AdamW(other.parameters(), lr=0.1)
    train(other, alone, [0, 1, 2, *trained])
    equal_weights(model, other)
    equal_states(model, optimizer, other, alone)
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("flat", [False, True])
def test_what_has_changed_since_is_saved(flat: bool, tmp_path: Path) -> None:
    """Moments that were replaced, a rate that a schedule has set, a group that was added."""
    model = model_of(1)
    more = nn.Parameter(torch.ones(3))
    whole = nn.ModuleDict({"model": model})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = state_of(whole, optimizer, flatten_optimizer_state_dict=flat)
    holdfast.save(state, tmp_path / "0", job=holdfast.Job(no_dist=True))
    train(model, optimizer, [0])
    holdfast.save(state, tmp_path / "1", job=holdfast.Job(no_dist=True))
    whole.register_parameter("more", more)
    optimizer.add_param_group({"params": [more], "lr": 0.5})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    train(model, optimizer, [1])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # other tensors, other dicts
    train(model, optimizer, [2])
    schedule.step()
    more.grad = torch.ones(3)
    optimizer.step()
    holdfast.save(state, tmp_path / "2", job=holdfast.Job(no_dist=True))
    other = model_of(2)
    fresh_whole = nn.ModuleDict({"model": other})
    fresh_whole.register_parameter("more", nn.Parameter(torch.zeros(3)))
    fresh = torch.optim.AdamW(
        [
            {"params": list(other.parameters()), "lr": 1.0},
            {"params": [fresh_whole.get_parameter("more")], "lr": 1.0},
        ]
    )
    holdfast.load(
        state_of(fresh_whole, fresh, flatten_optimizer_state_dict=flat),
        tmp_path / "2",
        job=holdfast.Job(no_dist=True),
    )
    equal_states(whole, optimizer, fresh_whole, fresh)
    assert [group["lr"] for group in fresh.param_groups] == pytest.approx([0.01, 0.05])
    assert fresh.param_groups[0]["initial_lr"] == 0.1  # the schedule's own; a fresh optimizer has none


def test_what_the_user_has_put_there_is_saved_as_it_is(tmp_path: Path) -> None:
    model = model_of(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, [0])
    state = state_of(model, optimizer)
    mine = torch.full((4, 3), 7.0)
    state["optim"]["state"]["0.weight"]["exp_avg"] = mine
    state["optim"]["param_groups"][0]["lr"] = 5.0
    del state["optim"]["state"]["0.bias"]
    state["model"]["0.bias"] = torch.full((4,), 9.0)
    train(model, optimizer, [1])
    for _ in range(2):
        holdfast.save(state, tmp_path, job=holdfast.Job(no_dist=True))
    loaded: dict[str, Any] = {
        "model": {"0.bias": torch.zeros(4)},
        "optim": {"state": {"0.weight": {"exp_avg": torch.zeros(4, 3), "exp_avg_sq": torch.zeros(4, 3)}}},
    }
    loaded["optim"]["param_groups"] = []
    holdfast.load(loaded, tmp_path, job=holdfast.Job(no_dist=True))
    assert torch.equal(loaded["optim"]["state"]["0.weight"]["exp_avg"], mine)
    assert torch.equal(
        loaded["optim"]["state"]["0.weight"]["exp_avg_sq"], optimizer.state[model[0].weight]["exp_avg_sq"]
    )
    assert torch.equal(loaded["model"]["0.bias"], torch.full((4,), 9.0))
    assert loaded["optim"]["param_groups"][0]["lr"] == 5.0
    assert not [
        f.name
        for f in describe(tmp_path).shown  # type: ignore[union-attr]
        if f.name.startswith("optim.state.0.bias")
    ]
    assert optimizer.param_groups[0]["lr"] == 0.1


class Counting(nn.Module):
    """Replaces its buffer, and has a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.words: list[str] = []

    def count(self, word: str) -> None:
        self.seen = self.seen + 1
        self.words = [*self.words, word]

    def get_extra_state(self) -> list[str]:
        return self.words

    def set_extra_state(self, state: list[str]) -> None:
        self.words = state


def test_a_models_buffers_and_extra_state_are_looked_at_again(tmp_path: Path) -> None:
    model = Counting()
    state = {"model": holdfast.get_state_dict(model)[0]}
    for word in ("one", "two"):
        model.count(word)
        holdfast.save(state, tmp_path, job=holdfast.Job(no_dist=True))
    other = Counting()
    holdfast.load({"model": holdfast.get_state_dict(other)[0]}, tmp_path, job=holdfast.Job(no_dist=True))
    assert (float(other.seen), other.words) == (2.0, ["one", "two"])


def test_a_load_of_the_model_alone_leaves_the_optimizer_as_it_is(tmp_path: Path) -> None:
    model = model_of(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, [0, 1])
    state = state_of(model, optimizer)
    holdfast.save(state, tmp_path, job=holdfast.Job(no_dist=True))
    train(model, optimizer, [2])
    kept = copy.deepcopy(optimizer.state_dict())
    state["optim"]["param_groups"][0]["lr"] = 5.0
    holdfast.load(state, tmp_path, job=holdfast.Job(no_dist=True), include=["model"])
    assert str(optimizer.state_dict()) == str(kept)


class Resuming:
    """As a data loader: what it is given says where it goes on."""

    def __init__(self, at: int) -> None:
        self.at, self.resumed = at, list[int]()

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.resumed.append(state["at"])


def test_what_is_left_out_of_a_load_is_not_touched(tmp_path: Path) -> None:
    model = model_of(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, [0])
    state = {"model": model, "optim": optimizer, "data": Resuming(5), "tuple": (torch.ones(1), 3)}
    holdfast.save(state, tmp_path, job=holdfast.Job(no_dist=True))
    fresh, groups = Resuming(2), optimizer.param_groups
    state["data"] = fresh
    for arguments in ({"include": ["model"]}, {"exclude": ["data", "optim"]}):
        holdfast.load(state, tmp_path, job=holdfast.Job(no_dist=True), **arguments)
        assert not fresh.resumed
        assert optimizer.param_groups is groups
    holdfast.load(state, tmp_path, job=holdfast.Job(no_dist=True), include=["data", "optim.state*"])
    assert fresh.resumed == [5]
    again = torch.optim.AdamW(model.parameters(), lr=0.1)  # whose states are not there yet
    holdfast.load({"optim": again}, tmp_path, job=holdfast.Job(no_dist=True), include=["optim.state*"])
    assert torch.equal(again.state[model[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_a_state_that_comes_into_being_later_is_not_lost_by_set_state_dict() -> None:
    model = model_of(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = state_of(model, optimizer)
    train(model, optimizer, [0])
    kept = copy.deepcopy(optimizer.state_dict())
    holdfast.set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    assert str(optimizer.state_dict()) == str(kept)


def test_a_copy_is_what_was_there() -> None:
    """Plain dicts, which torch.save and its weights-only reader take."""
    model = model_of(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = state_of(model, optimizer)
    before = copy.deepcopy(state)
    train(model, optimizer, [0])
    optimizer.param_groups[0]["lr"] = 0.5
    after = copy.deepcopy(state)
    for found in (before, after):
        assert type(found["model"]) is dict
        assert type(found["optim"]["state"]["0.weight"]) is dict
        assert type(found["optim"]["param_groups"]) is list
        file = io.BytesIO()
        torch.save(found, file)
        file.seek(0)
        assert str(torch.load(file, weights_only=True)) == str(found)
    assert before["optim"]["state"]["0.weight"] == {}
    assert set(after["optim"]["state"]["0.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert after["optim"]["param_groups"][0]["lr"] == 0.5


def test_a_load_leaves_what_the_user_has_put_there(tmp_path: Path) -> None:
    model = model_of(1)
    state = state_of(model, torch.optim.AdamW(model.parameters()))
    state["model"]["ema"] = torch.ones(2)
    holdfast.save(state, tmp_path, job=holdfast.Job(no_dist=True))
    state["model"]["ema"].zero_()
    holdfast.load(state, tmp_path, job=holdfast.Job(no_dist=True))
    assert state["model"]["ema"].tolist() == [1, 1]
    holdfast.save(state, tmp_path, job=holdfast.Job(no_dist=True))  # it has not vanished
