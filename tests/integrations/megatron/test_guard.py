"""Barriers and object collectives of a framework's function, over the roster."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

import tests.integrations.megatron.preload  # noqa: F401 (imports megatron-core without its warnings)
from holdfast.errors import BadInput, HoldfastError, RankFailed
from tests.support.collectives import counted
from tests.support.processes import ProcessWorld
from tests.support.waiting import AT_ONCE, SLACK


class Framework:
    """Waits and talks as the save functions of frameworks do."""

    def save(self, rank: int, groups: list[Any]) -> list[Any]:
        dist.barrier()
        everyone: list[Any] = [None] * 8
        dist.all_gather_object(everyone, {"rank": rank, "shape": (rank, 2)})
        told = [f"from {rank}", rank]
        dist.broadcast_object_list(told, src=3)
        some: list[Any] | None = [None] * 8 if rank == 0 else None
        dist.gather_object(rank * 10, some, dst=0)
        pair = groups[rank // 2]
        dist.barrier(group=pair)
        both: list[Any] = [None, None]
        dist.all_gather_object(both, rank, group=pair)
        return [everyone, told, some, both]


def guarded_job(rank: int) -> tuple[list[Any], list[str], bool]:
    from holdfast import megatron

    groups = [dist.new_group([first, first + 1]) for first in range(0, 8, 2)]
    original, barrier = Framework.save, dist.barrier
    megatron.install(
        timeout=20, stall_timeout=10, guard=["tests.integrations.megatron.test_guard.Framework.save"]
    )
    answers: list[Any] = []
    try:
        seen = counted(lambda: answers.extend(Framework().save(rank, groups)))
    finally:
        megatron.uninstall()
    return answers, seen, Framework.save is original and dist.barrier is barrier


def test_they_do_what_the_collectives_do(mcore_world: ProcessWorld) -> None:
    found = mcore_world.run(guarded_job)
    for rank, (answers, seen, put_back) in enumerate(found):
        assert answers[0] == [{"rank": other, "shape": (other, 2)} for other in range(8)]
        assert answers[1] == ["from 3", 3]
        assert answers[2] == ([other * 10 for other in range(8)] if rank == 0 else None)
        assert answers[3] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert seen == []
        assert put_back


def unspeakable_job(rank: int) -> tuple[str, float]:
    from holdfast import megatron

    begun = time.monotonic()
    told = [threading.Lock() if rank == 3 else None]
    try:
        with megatron.guarded("the end of a save", timeout=60, stall_timeout=30.0):
            dist.broadcast_object_list(told, src=3)
    except HoldfastError as error:
        return str(error), time.monotonic() - begun
    return "passed", 0.0


def test_what_one_rank_cant_send_fails_on_all(mcore_world: ProcessWorld) -> None:
    for said, took in mcore_world.run(unspeakable_job):
        assert "what a collective carries" in said
        assert took < AT_ONCE


def absent_job(rank: int) -> tuple[str, float]:
    from holdfast import megatron

    begun = time.monotonic()
    if rank == 5:
        return "elsewhere", 0.0
    try:
        with megatron.guarded("the end of a save", timeout=60, stall_timeout=2.0):
            dist.barrier()
    except RankFailed as error:
        return f"{error.rank}: {error}", time.monotonic() - begun
    return "passed", 0.0


def test_who_never_comes_is_named(mcore_world: ProcessWorld) -> None:
    for rank, (said, took) in enumerate(mcore_world.run(absent_job)):
        if rank != 5:
            assert said.startswith("5: ")
            assert "barrier in the end of a save" in said
            assert took < 2.0 + SLACK


class Kinds:
    @staticmethod
    def static(x: int) -> int:
        return x

    @classmethod
    def of_class(cls, x: int) -> tuple[type, int]:
        return cls, x

    def inherited(self) -> str:
        return "here"


class Derived(Kinds): ...


def test_methods_of_all_kinds_are_guarded_and_put_back() -> None:
    from holdfast import megatron

    here = "tests.integrations.megatron.test_guard"
    before = dict(vars(Kinds)), dict(vars(Derived))
    megatron.install(guard=[f"{here}.Kinds.static", f"{here}.Kinds.of_class", f"{here}.Derived.inherited"])
    try:
        assert Kinds().static(1) == 1
        assert Derived.of_class(2) == (Derived, 2)
        assert Derived().inherited() == "here"
        with pytest.raises(BadInput):
            megatron.install(guard=[f"{here}.Kinds.static", "nowhere.at.all"])
        assert "__wrapped__" in vars(vars(Kinds)["static"].__func__), "the install before stays"
    finally:
        megatron.uninstall()
    assert (dict(vars(Kinds)), dict(vars(Derived))) == before


def test_guards_of_two_threads_leave_nothing_behind() -> None:
    from holdfast import megatron

    barrier, entered, leave = dist.barrier, threading.Event(), threading.Event()

    def other() -> None:
        with megatron.guarded("another"):
            entered.set()
            leave.wait(5)

    thread = threading.Thread(target=other)
    with megatron.guarded("one"):
        thread.start()
        entered.wait(5)
    leave.set()
    thread.join(5)
    assert dist.barrier is barrier


@pytest.mark.parametrize("place", ["nowhere.at.all", "os.path.nothing", "json"])
def test_a_name_that_is_none(place: str) -> None:
    from holdfast import megatron

    with pytest.raises(BadInput, match="guard="):
        megatron.install(guard=[place])
