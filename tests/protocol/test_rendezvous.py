"""Where the ranks of a call meet: when some are late, skip a call or gave one up; and what stays in the
message store."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast._core.base.deadline import Deadline
from holdfast._core.protocol.effects import Context, Steps
from holdfast._core.protocol.messages import Outcome, abandoned_by, from_roster, to_message
from holdfast._core.protocol.phases import CHOICE_TRANSITIONS
from holdfast._core.protocol.rendezvous import SWEEP_AFTER, CallSignature, History, history_of, leave, meet
from holdfast._core.protocol.runner import Cancel, perform
from holdfast._core.roster.beacon import Presence
from holdfast._core.roster.memory import Board, MemoryRoster
from holdfast.errors import HoldfastError, from_message
from holdfast.testing.clock import ManualClock

BOTH = (0, 1)
LATE = HoldfastError("rank 1 never came")


class Rank:
    """Meets and leaves as an operation does, one call at a time."""

    def __init__(self, rank: int, board: Board, clock: ManualClock, world: tuple[int, ...] = BOTH) -> None:
        self.roster = MemoryRoster(rank, len(world), board)
        self.clock, self.world = clock, world
        self.history = history_of(self.roster, world)

    def _do(self, steps: Steps) -> Any:
        return perform(steps, self.roster, Presence(self.roster, "test"), Cancel())

    def enter(self, kind: str = "load", **arguments: object) -> Context:
        site = CallSignature(kind, "memory:run", arguments, self.world)
        at = Context(
            self.roster.rank,
            self.world,
            "",
            kind,
            Deadline(60.0, self.clock),
            transitions=CHOICE_TRANSITIONS,
        )
        self.attempt = self._do(meet(at, site, self.history))
        return at

    def end(self, at: Context, state: str = "agreed") -> None:
        """Claim the outcome, and leave; the first one is everyone's."""
        agreed = to_message(Outcome("agreed", at.rank, abandoned=at.abandoned))
        mine = agreed if state == "agreed" else abandoned_by(at.rank, LATE)
        at.known_outcome = from_roster(self.roster.claim(at.outcome_key, mine), Outcome)
        self._do(leave(at, self.history))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
def two(board: Board, clock: ManualClock) -> tuple[Rank, Rank]:
    return Rank(0, board, clock), Rank(1, board, clock)


def together(*ranks: Rank, kind: str = "save") -> None:
    """A call that all bring to a good end; the lowest hears of what the others have seen abandoned."""
    calls = [rank.enter(kind) for rank in ranks]
    for call in calls[1:]:
        calls[0].note_abandoned(call.abandoned)
    for rank, call in zip(ranks, calls, strict=True):
        rank.end(call)


def test_the_same_call_meets_and_the_next_one_elsewhere(two: tuple[Rank, Rank]) -> None:
    first, second = two
    one, other = first.enter(), second.enter()
    assert one.key == other.key
    assert first.attempt == second.attempt
    first.end(one)
    second.end(other)
    assert first.enter().key == second.enter().key != one.key


@pytest.mark.parametrize("arguments", [{"include": ["w"]}, {"include": ("w",)}])
def test_a_list_and_a_tuple_are_the_same_argument(
    two: tuple[Rank, Rank], arguments: dict[str, object]
) -> None:
    assert two[0].enter(include=["w"]).key == two[1].enter(**arguments).key


def test_sets_with_the_same_elements_are_the_same_argument(two: tuple[Rank, Rank]) -> None:
    """Texts in a set have another order in each process; these numbers have it here."""
    assert repr({0, 8}) != repr({8, 0})
    assert two[0].enter(include={0, 8}).key == two[1].enter(include={8, 0}).key


def test_other_arguments_never_meet(two: tuple[Rank, Rank]) -> None:
    assert two[0].enter(include=["w"]).key != two[1].enter(include=["v"]).key


def test_a_late_rank_finds_the_error_of_its_call_and_meets_the_others_in_its_next(
    two: tuple[Rank, Rank],
) -> None:
    first, second = two
    given_up = first.enter()
    first.end(given_up, "abandoned")
    retry = first.enter()  # the others are there already, with their second call
    late = second.enter()
    assert late.key == given_up.key
    (outcome,) = second.roster.get([late.outcome_key])
    assert outcome is not None
    assert str(from_message(outcome["error"])) == str(LATE)
    second.end(late, "abandoned")
    assert second.enter().key == retry.key


def test_a_rank_that_skipped_a_call_is_brought_level_by_the_next_that_all_end(two: tuple[Rank, Rank]) -> None:
    first, second = two
    first.end(first.enter("load"), "abandoned")
    together(first, second, kind="save")
    assert first.enter("load").key == second.enter("load").key


def test_the_one_that_skipped_may_be_the_lowest(two: tuple[Rank, Rank]) -> None:
    first, second = two
    for _ in range(3):
        second.end(second.enter("load"), "abandoned")
    together(first, second)
    assert first.enter("load").key == second.enter("load").key


def test_a_call_that_a_rank_gave_up_is_settled_before_its_next(two: tuple[Rank, Rank]) -> None:
    """Its thread is stuck, so it does not know how the call ended; the others must not go on with it."""
    first, second = two
    one, stuck = first.enter(), second.enter()
    second.history.give_up(stuck.key)
    after = second.enter()
    (outcome,) = first.roster.get([one.outcome_key])
    assert outcome is not None
    assert outcome["state"] == "abandoned"
    first.end(one)  # what it claims now is no more than a claim
    assert one.known_outcome == from_roster(outcome, Outcome)
    assert first.enter().key == after.key


def test_of_a_call_that_was_agreed_the_one_that_gave_it_up_learns_it(two: tuple[Rank, Rank]) -> None:
    first, second = two
    one, stuck = first.enter(), second.enter()
    first.end(one)
    second.history.give_up(stuck.key)
    assert second.enter().key == first.enter().key


def test_nothing_stays_of_a_call_that_all_left(two: tuple[Rank, Rank], board: Board) -> None:
    first, second = two
    together(first, second)
    before = set(board.messages) | set(board.counters)
    for number in range(50):
        together(first, second, kind=f"save{number}")
        calls = [first.enter("load"), second.enter("load")]
        for rank, call in zip((first, second), calls, strict=True):
            rank.end(call, "abandoned")
    assert set(board.messages) | set(board.counters) == before


def test_a_call_that_a_rank_never_came_to_is_swept_by_a_later_good_end(
    two: tuple[Rank, Rank], board: Board, clock: ManualClock
) -> None:
    first, second = two
    given_up = first.enter("load")
    first.end(given_up, "abandoned")
    together(first, second)
    assert given_up.outcome_key in board.messages, "a thread of the other rank may still look"
    clock.advance(SWEEP_AFTER + 1)
    together(first, second)
    assert not [key for key in (*board.messages, *board.counters) if key.startswith(given_up.key)]


def test_a_second_life_on_the_same_store_meets_nothing_of_the_first(board: Board, clock: ManualClock) -> None:
    """A launcher's store outlives the process group: ranks that begin again must not find old outcomes."""
    first = Rank(0, board, clock)
    old = first.enter()
    first.end(old, "abandoned")
    again = Rank(0, board, clock), Rank(1, board, clock)
    Rank(1, board, clock).enter("save")  # it began once before, too
    keys = {rank.enter().key for rank in again}
    assert old.key not in keys
    assert len(keys) == 1


def test_calls_of_different_ranks_are_counted_apart(board: Board, clock: ManualClock) -> None:
    of_two, of_three = Rank(0, board, clock), Rank(0, board, clock, (0, 1, 2))
    assert of_two.enter().key.split("/")[1] != of_three.enter().key.split("/")[1]


def test_counts_of_long_ago_are_forgotten() -> None:
    history = History()
    history.generation = 0
    for number in range(5000):
        key, _ = history.begin(f"save/{number}")
        history.end(key, Outcome("agreed", 0), 0.0)
    assert [history.begin(f"save/{number}")[0] for number in (0, 3000, 4999)] == [
        "save/0/0.0",
        "save/3000/0.0",
        "save/4999/0.1",  # one of lately counts on
    ]
