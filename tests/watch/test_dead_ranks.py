"""A rank that has died is named if others wait for it, or may."""

from __future__ import annotations

import pytest

from holdfast._watch.evidence import Ending, Rank, SourceLine
from holdfast._watch.verdict import Diagnosis
from tests.watch.test_handles import LOCK, RECEIVES, at, in_train, rank, said

DIED = Ending("its program was ended by ValueError", SourceLine("kernel"))


def evaluator_died(**names: str) -> Diagnosis:
    """Rank 3 has died, and is in no group of the ranks that wait for rank 1."""
    return said(in_train(0), rank(1, at("step", **names)), in_train(2), Rank(3, endings=(DIED,)))


@pytest.mark.parametrize("names", [LOCK, {"calls": "sleep"}, {"calls": "open"}, {}])
def test_a_dead_rank_for_which_nobody_waits_is_not_named(names: dict[str, str]) -> None:
    found = evaluator_died(**names)
    assert found.who is not None
    assert (found.who.ranks, found.why) == ((1,), None)


@pytest.mark.parametrize(
    "names", [{"calls": "sleep", "polls": "store"}, {"calls": "get", "on": "store"}, RECEIVES]
)
def test_a_dead_rank_is_named_if_the_absent_one_waits_for_another(names: dict[str, str]) -> None:
    found = evaluator_died(**names)
    assert found.who is not None
    assert found.why is not None
    assert (found.who.ranks, found.why.kind) == ((3,), "died")


def test_where_nothing_shows_for_whom_others_wait_a_dead_rank_is_no_cause() -> None:
    """Ranks 0 and 2 wait for messages; rank 1 wants a lock, and rank 3 has died."""
    receives = [rank(number, at("forward", **RECEIVES)) for number in (0, 2)]
    dead = Rank(3, endings=(DIED,))
    found = said(*receives, rank(1, at("step", **LOCK)), dead)
    assert found.who is not None
    assert (found.who.ranks, found.why) == ((1, 3), None)
    alone = said(*receives, rank(1, at("forward", **RECEIVES)), dead)
    assert alone.who is not None
    assert alone.why is not None
    assert (alone.who.ranks, alone.why.kind) == ((3,), "died")
