"""Values of ranks (`PerRank`) that a rule makes, where other ranks saved than load."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import BadInput, HoldfastError, LoadFailed
from tests.loading.test_rest import job_of
from tests.support.threads import on_ranks

ALONE = holdfast.Job(no_dist=True)


def value_of(rank: int) -> dict[str, Any]:
    return {
        "read": 100 + rank,
        "seen": torch.full((3,), rank),
        "workers": {0: {"at": 10 * rank}, 1: {"at": 10 * rank + 1}},
        "python": random.Random(rank).getstate(),
        "parts": (torch.full((2,), float(rank)), "x"),
    }


def save(ranks: int, path: Path) -> None:
    def of_rank(roster: Any) -> None:
        state = {"w": torch.ones(4), "data": holdfast.PerRank(value_of(roster.rank))}
        holdfast.save(state, path, job=job_of(roster))

    on_ranks(ranks, of_rank)


def load(roster: Any, path: Path, merge: Any, **given: Any) -> Any:
    state = {"w": torch.zeros(4), "data": holdfast.PerRank(value_of(50), merge=merge)}
    try:
        report = holdfast.load(state, path, job=job_of(roster), **given)
    except HoldfastError as error:
        return error, state
    return report, state


@pytest.mark.parametrize("ranks", [1, 2, 6])
def test_a_rule_gets_the_values_of_all_ranks_that_saved_and_its_result_is_the_value(
    tmp_path: Path, ranks: int
) -> None:
    save(4, tmp_path / "it")

    def job(roster: Any) -> Any:
        given: list[Mapping[int, Any]] = []

        def merge(values: Mapping[int, Any]) -> Any:
            given.append(values)
            total = sum(value["read"] for value in values.values())
            return values[roster.rank % 4] | {"read": total // ranks, "seen": values[3]["seen"] + 1}

        report, state = load(roster, tmp_path / "it", merge)
        return given, report, state

    for rank, (given, report, state) in enumerate(on_ranks(ranks, job)):
        (values,) = given  # called once
        assert list(values) == [0, 1, 2, 3]
        for saver, value in values.items():
            assert value["workers"] == value_of(saver)["workers"]
            assert value["python"] == value_of(saver)["python"]
            assert torch.equal(value["seen"], torch.full((3,), saver))
        mine, source = state["data"].value, value_of(rank % 4)
        assert mine["read"] == (100 + 101 + 102 + 103) // ranks
        assert torch.equal(mine["seen"], torch.full((3,), 4))
        assert torch.equal(mine["parts"][0], source["parts"][0])
        assert (mine["workers"], mine["python"]) == (source["workers"], source["python"])
        assert torch.equal(state["w"], torch.ones(4))
        assert (report.unasked, report.missing) == ((), ())


def test_a_rule_is_not_called_where_the_same_ranks_load(tmp_path: Path) -> None:
    save(2, tmp_path / "it")
    for rank, (report, state) in enumerate(
        on_ranks(2, lambda roster: load(roster, tmp_path / "it", pytest.fail))
    ):
        assert isinstance(report, holdfast.LoadReport)
        assert state["data"].value["read"] == 100 + rank


def test_a_value_that_some_ranks_hold_is_theirs_where_the_same_ranks_load(tmp_path: Path) -> None:
    """A rule would give it twice."""

    def state(rank: int, value: int) -> dict[str, Any]:
        mine = {"data": holdfast.PerRank(value, merge=pytest.fail)} if rank % 2 else {}
        return {"w": torch.ones(4), **mine}

    def job(roster: Any) -> Any:
        holdfast.save(state(roster.rank, roster.rank), tmp_path / "it", job=job_of(roster))
        mine = state(roster.rank, 70)
        holdfast.load(mine, tmp_path / "it", job=job_of(roster))
        return mine.get("data") and mine["data"].value

    assert on_ranks(4, job) == [None, 1, None, 3]


def forgets(values: Mapping[int, Any]) -> None:
    pass


BAD: dict[str, tuple[Any, str]] = {
    "raises": (lambda values: values[7], "KeyError: 7"),
    "nothing": (forgets, "it returned None. Nothing was put into the state of this rank."),
    "without a part": (lambda values: {"read": 1}, "without 'parts.0'"),
    "more": (lambda values: values[0] | {"more": 1}, "with 'data@0.more', which the state has not"),
    "shape": (lambda values: values[0] | {"seen": torch.ones(4, dtype=torch.int64)}, "int64[4]"),
    "dtype": (lambda values: values[0] | {"seen": torch.ones(3)}, "float32[3]"),
    "kind": (lambda values: values[0] | {"read": torch.ones(3)}, "a Tensor for 'data@0.read'"),
    "key": (lambda values: values[0] | {"workers": {object(): 1}}, "names are made of text"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_rule_that_fails_on_one_rank_fails_the_load_on_all(tmp_path: Path, what: str) -> None:
    save(4, tmp_path / "it")
    bad, text = BAD[what]

    def job(roster: Any) -> Any:
        return load(roster, tmp_path / "it", (lambda values: values[1]) if roster.rank else bad)

    for rank, (error, state) in enumerate(on_ranks(2, job)):
        assert isinstance(error, LoadFailed)
        assert "The rule (PerRank, merge) of 'data' failed on rank 0" in str(error)
        assert text.replace("'parts.0'", "'data@0.parts.0'") in str(error)
        if rank == 0:  # what the rank had stays
            assert state["data"].value["read"] == 150
            assert torch.equal(state["w"], torch.zeros(4))
    # The checkpoint is whole.
    for report, _ in on_ranks(4, lambda roster: load(roster, tmp_path / "it", bad)):
        assert isinstance(report, holdfast.LoadReport)


def test_a_rule_makes_a_bare_value_a_generator_and_a_loader(tmp_path: Path) -> None:
    class Loader:
        def __init__(self, at: int) -> None:
            self.at = {0: at, 1: at + 1}

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at = state["at"]

    def state(rank: int, merge: Any = None, loads: Any = None) -> dict[str, Any]:
        torch_state = torch.Generator().manual_seed(rank)
        return {
            "w": torch.ones(4),
            "bare": holdfast.PerRank(rank, merge=merge),
            "generator": holdfast.PerRank(torch_state, merge=merge),
            "loader": holdfast.PerRank(Loader(rank), merge=loads),
        }

    on_ranks(3, lambda roster: holdfast.save(state(roster.rank), tmp_path / "it", job=job_of(roster)))
    into = state(
        9,
        lambda values: values[2],
        lambda values: {"at": {key: at + 5 for key, at in values[2]["at"].items()}},
    )
    loader = into["loader"].value
    holdfast.load(into, tmp_path / "it", job=ALONE)
    assert into["bare"].value == 2
    assert torch.equal(into["generator"].value.get_state(), torch.Generator().manual_seed(2).get_state())
    assert loader.at == {0: 7, 1: 8}


def test_a_rule_follows_restore_rename_and_patterns(tmp_path: Path) -> None:
    save(4, tmp_path / "run" / "step-00000003")
    state: dict[str, Any] = {
        "w": torch.zeros(4),
        "mine": holdfast.PerRank(value_of(9), merge=lambda values: values[3]),
    }
    with holdfast.Checkpoints(tmp_path / "run", job=ALONE) as run:
        moved = lambda name: name.replace("data@", "mine@")  # noqa: E731
        assert run.restore(state, rename=moved) is not None
        assert state["mine"].value["read"] == 103
        state["mine"].value["read"] = 0
        run.restore(state, rename=moved, include=["w"])
        assert state["mine"].value["read"] == 0
        with pytest.raises(BadInput, match=r"select a part of 'mine'"):
            run.restore(state, rename=moved, exclude=["*.read"])


def test_what_no_rule_can_make_is_refused(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(module.parameters())
    state = {"w": torch.ones(4), "optim": holdfast.PerRank(optimizer, merge=lambda values: values[0])}
    on_ranks(
        2,
        lambda roster: holdfast.save(
            {"w": state["w"], "optim": holdfast.PerRank(7)}, tmp_path / "it", job=job_of(roster)
        ),
    )
    with pytest.raises(BadInput, match=r"makes plain values only"):
        holdfast.load(state, tmp_path / "it", job=ALONE)
    with pytest.raises(BadInput, match=r"merge must be a function"):
        holdfast.PerRank(1, merge=True)  # type: ignore[arg-type]
