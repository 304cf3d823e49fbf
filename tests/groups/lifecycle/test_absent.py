"""Which ranks keep a warm-up, by what they say of their places: without a process group."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast._core.protocol.liveness import STALLED
from holdfast._core.roster.lost import Seen
from holdfast._core.roster.presence import Vitals
from holdfast._core.roster.process import Identity
from holdfast._groups.lifecycle.absent import Plan, WarmUpPlace, may_be_explained, who_did_not_come
from holdfast.errors import DeadlineExceeded, RankFailed

PLAN = Plan({"g": ("a group", [0, 1, 2])}, {rank: ["g"] for rank in range(3)}, {"g": 0})


def seen(rank: int, state: str = "") -> Seen:
    who = Identity(rank, "h", 100 + rank, token=str(rank))
    return Seen(Vitals(who, {"k": {"title": "warm-up", "phase": "acting"}}, beat=1), state=state)


def at(operation: int, issued: bool | None, position: int = 0) -> WarmUpPlace:
    return WarmUpPlace(position=position, operation=operation, issued=issued)


@pytest.mark.parametrize(
    ("places", "states", "missing", "said"),
    [
        (
            [at(0, True), at(0, True), at(0, False)],
            {},
            [2],
            "ranks 0, 1 issued the collective, rank 2 did not",
        ),
        (
            [at(0, True), at(0, False), at(1, False)],
            {},
            [1],
            "ranks 0, 2 issued the collective, rank 1 did not",
        ),
        ([at(1, False), at(0, True), at(1, True)], {}, [1], "its collective did not end"),
        ([at(0, True)] * 3, {}, [0, 1, 2], "its collective did not end"),
        ([at(0, False)] * 3, {}, [0, 1, 2], "its collective did not end"),
        ([at(0, None)] * 3, {}, [0, 1, 2], "its collective did not end"),
        ([at(0, True)] * 3, {1: "T"}, [1], "it is stopped by a signal (state T)"),
        ([at(0, True), at(0, True), at(0, None, -1)], {}, [2], "ranks 0, 1 arrived, rank 2 did not"),
    ],
)
def test_who_keeps_the_others(
    places: list[WarmUpPlace], states: dict[int, str], missing: list[int], said: str
) -> None:
    shown = {rank: seen(rank, states.get(rank, "")) for rank in range(3)}
    error = who_did_not_come(RankFailed(""), shown, "k", dict(enumerate(places)), PLAN, 5.0)
    assert error is not None
    assert [info.rank for info in error.missing] == missing
    assert said in error.message
    assert error.rank == (missing[0] if len(missing) == 1 else None)


@pytest.mark.parametrize(
    ("error", "explained"),
    [
        (DeadlineExceeded("late"), True),
        (RankFailed("no progress", details={STALLED: True}), True),
        (RankFailed("a circle"), False),
        (RankFailed("its process has ended"), False),
    ],
)
def test_only_a_wait_without_end_is_explained(error: Any, explained: bool) -> None:
    assert may_be_explained(error) is explained
