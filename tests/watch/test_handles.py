"""Ranks that wait for handles, by the stacks and counts that they answer."""

from __future__ import annotations

import msgspec
import pytest

from holdfast._watch.diagnose import diagnose
from holdfast._watch.evidence import (
    ROLL_CALL,
    Evidence,
    Frame,
    GroupOperation,
    Rank,
    Stack,
)
from holdfast._watch.verdict import Diagnosis

TRAIN, PAIR = "0:default_pg", "1:experts"
MEMBERS: dict[str, tuple[int, ...]] = {TRAIN: (0, 1, 2), PAIR: (1, 2)}
MAIN, HELPER = "7", "8"
LOCK = {"calls": "acquire"}
HANDLE = {"calls": "wait", "on": "handle", "handle": "all_reduce", "message": "1"}
RECEIVES = {"calls": "wait", "on": "handle", "handle": "recv", "message": "1"}


def issued(group: str, number: int, thread: str = MAIN, is_done: bool = False) -> GroupOperation:
    state = "completed" if is_done else "started"
    return GroupOperation(group, number, "all_reduce", state, ROLL_CALL, thread=thread, backend="gloo")


def at(function: str, ident: str = MAIN, file: str = "train.py", **names: str) -> Stack:
    name = "MainThread" if ident == MAIN else "helper"
    return Stack(name, (Frame(function, file, 5), Frame("train", "train.py", 9)), ROLL_CALL, names, ident)


def rank(number: int, *stacks: Stack, operations: tuple[GroupOperation, ...] = ()) -> Rank:
    done = tuple(issued(group, 2, is_done=True) for group, ranks in MEMBERS.items() if number in ranks)
    return Rank(number, (*operations, *done), stacks=stacks, later=stacks, busy=0.0)


def in_train(number: int) -> Rank:
    torchs = at("all_reduce", file="torch/distributed/distributed_c10d.py", **{"in": TRAIN})
    return rank(number, torchs, operations=(issued(TRAIN, 3),))


def said(*ranks: Rank) -> Diagnosis:
    return diagnose(Evidence({one.rank: one for one in ranks}, world_size=len(ranks), members=MEMBERS))


def who(*ranks: Rank) -> tuple[int, ...] | None:
    found = said(*ranks).who
    return found.ranks if found is not None else None


# -- threads that are joined --------------------------------------------------------------------------------


@pytest.mark.parametrize("issuer", [MAIN, HELPER])
@pytest.mark.parametrize("waits", [HANDLE, {"calls": "wait"}, {"calls": "sleep", "polls": "handle"}])
def test_a_rank_waits_for_whom_the_thread_that_it_joins_waits(issuer: str, waits: dict[str, str]) -> None:
    """Rank 0 waits for rank 1, whose main thread joins one that waits for a handle, and rank 2 wants a lock."""
    stacks = at("join", file="/usr/lib/python3.13/threading.py", joins=HELPER), at("finish", HELPER, **waits)
    joins = rank(1, *stacks, operations=(issued(PAIR, 3, issuer),))
    assert who(in_train(0), joins, rank(2, at("step", **LOCK))) == (2,)


def test_a_rank_whose_joined_thread_does_something_else_is_named() -> None:
    stacks = at("join", file="/usr/lib/python3.13/threading.py", joins=HELPER), at("finish", HELPER, **LOCK)
    joins = rank(1, *stacks, operations=(issued(PAIR, 3, HELPER),))
    found = said(in_train(0), joins, rank(2, at("step", **LOCK)))
    assert found.who is not None
    assert found.who.ranks == (1, 2)
    assert any("is at finish" in one.text for one in found.who.known)


def test_threads_that_join_each_other_end_the_search() -> None:
    stacks = (
        at("join", file="threading.py", joins=HELPER),
        at("join", HELPER, file="threading.py", joins=MAIN),
    )
    assert who(in_train(0), rank(1, *stacks), in_train(2)) == (1,)


# -- pauses, stores, locks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "named"),
    [
        ({"calls": "sleep", "polls": "handle"}, (2,)),
        ({"calls": "sleep", "polls": "store"}, (1, 2)),
        ({"calls": "sleep"}, (1, 2)),
        ({"calls": "wait"}, (2,)),
        (HANDLE, (2,)),
        ({"calls": "wait", "on": "store"}, (1, 2)),
        ({"calls": "wait", "on": "other"}, (1, 2)),
        ({"calls": "get", "on": "store"}, (1, 2)),
        ({"calls": "open"}, (1, 2)),
    ],
)
def test_a_rank_that_rests_waits_for_its_handle_if_its_call_may_be_that(
    names: dict[str, str], named: tuple[int, ...]
) -> None:
    """Rank 1 has a handle for which rank 2 is missing, and both are missing in the all_reduce."""
    rests = rank(1, at("share", **names), operations=(issued(PAIR, 3),))
    assert who(in_train(0), rests, rank(2, at("step", **LOCK))) == named


# -- messages -----------------------------------------------------------------------------------------------


def test_ranks_that_wait_for_handles_of_messages_wait() -> None:
    ranks = [rank(number, at("forward", **RECEIVES)) for number in (0, 2, 3)]
    assert who(*ranks, rank(1, at("spill", file="cache.py", **LOCK))) == (1,)
    assert who(in_train(0), rank(1, at("forward", **RECEIVES)), rank(2, at("step", **LOCK))) == (2,)


def test_a_rank_that_asks_whether_its_message_has_come_is_named() -> None:
    """Over gloo it never learns that."""
    asks = at("share", **{**RECEIVES, "calls": "sleep", "polls": "handle"})
    handle = issued(PAIR, 3)
    assert who(in_train(0), rank(1, asks, operations=(handle,)), in_train(2)) == (1,)


def test_of_ranks_that_only_wait_for_messages_none_is_named() -> None:
    assert who(in_train(0), rank(1, at("forward", **RECEIVES)), rank(2, at("forward", **RECEIVES))) is None


def test_a_loop_over_messages_goes_on_from_one_to_the_next() -> None:
    first, later = (at("forward", **{**RECEIVES, "message": number}) for number in "12")
    goes_on = msgspec.structs.replace(rank(1, first), later=(later,))
    assert who(in_train(0), goes_on, in_train(2)) == (1,)


def test_a_handle_of_a_message_is_none_of_a_collective() -> None:
    """Its collective, for which rank 2 is missing, is in the background: rank 1 waits for a message of rank 0."""
    receives = rank(1, at("forward", **RECEIVES), operations=(issued(PAIR, 3),))
    busy = msgspec.structs.replace(rank(0, at("compute", file="model.py")), busy=1.0)
    found = said(busy, receives, rank(2, at("step", **LOCK))).who
    assert found is None or "experts" not in found.summary


# -- cycles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "polls", "kind"),
    [
        ((), {}, "cycle"),
        ((issued(TRAIN, 3),), {}, None),
        ((), {"calls": "sleep", "polls": "handle", "on": ""}, None),
    ],
)
def test_handles_close_a_cycle_if_no_other_can_be_meant(
    more: tuple[GroupOperation, ...], polls: dict[str, str], kind: str | None
) -> None:
    members: dict[str, tuple[int, ...]] = {"1:a": (0, 1), "2:b": (0, 1), TRAIN: (0, 1)}
    ranks = {
        number: Rank(number, (issued(group, 3), *more), stacks=stacks, later=stacks, busy=0.0)
        for number, group in enumerate(("1:a", "2:b"))
        if (stacks := (at("share", **{**HANDLE, **polls}),))
    }
    why = diagnose(Evidence(ranks, world_size=2, members=members)).why
    assert (why.kind if why is not None else None) == kind
