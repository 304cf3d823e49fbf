"""Where the ranks of a call meet, when some came late and some missed one."""

from __future__ import annotations

from holdfast.flow.world import meeting_key, rounds
from holdfast.roster.memory import Board, MemoryRoster

BOTH = (0, 1)


def two() -> tuple[MemoryRoster, MemoryRoster]:
    board = Board()
    return MemoryRoster(0, 2, board), MemoryRoster(1, 2, board)


def enter(roster: MemoryRoster, kind: str = "load") -> str:
    return meeting_key(kind, "/run", None, BOTH, roster)[0]


def end(key: str, *rosters: MemoryRoster, state: str = "agreed") -> None:
    rosters[0].claim(f"{key}/outcome", {"state": state, "round": rounds(rosters[0])[BOTH]})
    if state == "agreed":
        for roster in rosters:
            rounds(roster)[BOTH] += 1


def test_the_same_call_meets_and_the_next_one_elsewhere() -> None:
    first, second = two()
    key = enter(first)
    assert enter(second) == key
    end(key, first, second)
    assert enter(first) == enter(second) != key


def test_a_late_rank_finds_the_error_of_its_call() -> None:
    first, second = two()
    key = enter(first)
    end(key, first, state="abandoned")
    assert enter(second) == key


def test_a_rank_that_missed_a_call_joins_the_next_one_if_the_others_are_there() -> None:
    first, second = two()
    end(enter(first), first, state="abandoned")
    assert enter(first) == enter(second)


def test_a_rank_that_missed_a_call_is_not_late_for_it_once_all_did_something_else() -> None:
    first, second = two()
    missed = enter(first)
    end(missed, first, state="abandoned")
    save = enter(first, "save")
    assert enter(second, "save") == save
    end(save, first, second)
    assert enter(second) != missed  # it comes first, so nobody has opened the next one yet
    assert enter(first) == f"{missed.rpartition('/')[0]}/1"


def test_one_rank_alone_meets_nobody() -> None:
    roster, _ = two()
    keys = [meeting_key("load", "/run", None, (0,), roster)[0] for _ in range(2)]
    assert len(set(keys)) == 2
