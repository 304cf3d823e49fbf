"""Groups that are opened and warmed up by real processes, one of which does what it should not."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from holdfast._core.layout.grid import Grid
from tests.groups.lifecycle import jobs
from tests.support.processes import ProcessWorld
from tests.support.waiting import AT_ONCE, SLACK, ended

VICTIM = 5


@pytest.fixture
def world() -> Iterator[ProcessWorld]:
    """Eight ranks of its own for each test: groups that were given up stay broken."""
    with ProcessWorld(8) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[ProcessWorld]:
    """Ranks whose calls are refused before they have done anything."""
    with ProcessWorld(4) as ranks:
        yield ranks


def test_every_group_of_sixteen_ranks_is_opened_warmed_and_used() -> None:
    with ProcessWorld(16) as ranks:
        found = ranks.run(jobs.open_and_use, 16, jobs.LAYOUT, timeout=100)
    grid = Grid(16, **jobs.LAYOUT)
    for rank, (members, first, second) in enumerate(found):
        assert members["tp"] == list(grid.group(rank, "tp"))
        assert members["tp_ep_pp"] == list(grid.group(rank, "etp", "ep", "pp"))
        assert members["embedding"] == list(grid.group(rank, "pp"))
        assert "cp" not in members  # of one rank
        assert not any(group.was_warm for group in first.groups)
        assert all(group.was_warm for group in second.groups)
        assert {group.ranks for group in first.groups} == {tuple(ranks) for ranks in members.values()}
        assert [group.round for group in first.groups] == sorted({group.round for group in first.groups})
        assert first.groups_in_world == 49
        assert first.rounds == 10


@pytest.mark.parametrize(
    ("what", "timeout", "stall", "within"),
    [
        ("never comes", 3.0, 60.0, 3.0 + SLACK),
        ("dies", 60.0, 40.0, AT_ONCE),
        ("stops", 60.0, 2.0, 2.0 + SLACK),
        ("hangs", 3.0, 60.0, 3.0 + SLACK),
        ("hangs", 60.0, 3.0, 3.0 + SLACK),
        ("has no memory", 60.0, 40.0, AT_ONCE),
    ],
)
def test_a_rank_that_does_not_do_its_part_is_named_on_all_others(
    what: str, timeout: float, stall: float, within: float, world: ProcessWorld
) -> None:
    world.start(jobs.warm_with, 8, VICTIM, what, timeout, stall)
    others = set(range(8)) - {VICTIM}
    results = {result.rank: result for result in world.collect_some(within + 20, others)}
    world.signal(VICTIM, signal.SIGCONT)
    assert set(results) == others
    for rank, result in results.items():
        said, took, culprit, missing = result.get()
        assert took < within, (rank, took, said)
        if what == "hangs":  # the others are inside the collective, and it is before it
            assert said.startswith("DeadlineExceeded" if timeout < stall else "RankFailed"), said
            assert missing == [VICTIM], said
            assert f"issued the collective, rank {VICTIM} did not" in said, said
            assert "before all_reduce of group" in said, said
            assert " all_reduce. " in said, said  # where its code is
        assert culprit == VICTIM, (rank, said)
        assert f"rank {VICTIM} " in said.lower(), said
        expected = {
            "never comes": "it has not entered warm-up of process groups",
            "dies": "its process ",  # and how it ended, below
            "stops": "it is stopped by a signal",
            "hangs": "before all_reduce",
            "has no memory": "OutOfMemoryError: CUDA out of memory",
        }
        assert expected[what] in said, said
        assert what != "dies" or ended(said), said
        assert said == results[min(others)].get()[0]


@pytest.mark.wide
def test_twenty_rounds_leave_nothing_behind(world: ProcessWorld) -> None:
    for known, files, threads in world.run(jobs.open_and_close, 8, 20, timeout=120):
        assert set(known) == {1}  # the default group
        assert max(files[2:]) - files[1] <= 2, files
        assert max(threads[2:]) - threads[1] <= 2, threads


def test_a_rank_that_does_not_come_to_the_closing_is_named(world: ProcessWorld) -> None:
    for rank, (said, took) in enumerate(world.run(jobs.closing_without, 8, VICTIM, timeout=60)):
        if rank != VICTIM:
            assert said.startswith("DeadlineExceeded"), said
            assert f"waited for rank {VICTIM} to enter" in said, said
            assert took < 2.0 + SLACK


@pytest.mark.parametrize("ours", [False, True])
def test_groups_of_ranks_with_other_histories(ours: bool) -> None:
    """With use_local_synchronization torch names a group by how many this rank has: the two ranks never meet.
    Ours do."""
    with ProcessWorld(4) as ranks:
        found = ranks.run(jobs.other_histories, ours, timeout=60)
    for rank, (said, took) in enumerate(found):
        if ours or rank in (0, 3):
            assert said == "met", said
        else:
            assert said == "DistStoreError", said
            assert took >= 1.0


def test_a_rank_that_is_late_is_waited_for(world: ProcessWorld) -> None:
    for said, took, _, _ in world.run(jobs.warm_with, 8, VICTIM, "comes late", 30.0, 60.0, timeout=60):
        assert said == "warm"
        assert took >= 1.5


@pytest.mark.parametrize("how", ["grid", "history"])
def test_ranks_with_other_ideas_of_the_layout_are_told_before_any_group_is_made(
    how: str, world: ProcessWorld
) -> None:
    for said, took in world.run(jobs.another_layout, 8, VICTIM, how, timeout=60):
        assert said.startswith("BadInput"), said
        assert f"on rank {VICTIM}" in said
        assert ("'ep': 1" if how == "grid" else "groups made before: 1 on rank 0, 2 on rank 5") in said
        assert took < AT_ONCE


def test_calls_that_cannot_be_honoured(four: ProcessWorld) -> None:
    for said in four.run(jobs.wrong_calls, timeout=60):
        expected = [
            "is alone in its group 'dp', so no communicator was made",
            "has no group 'nothing'",
            "The grid has ranks to 7; the world has 4",
            "There is no group 'tensor'",
            "timeout must be a positive",
            "operations=('reduce',) must be some of",
            "groups='some': give 'all'",
            "memory_budget must be bytes",
            "groups= has 'tp', which is no process group of this rank",
            "give 'all', what open_groups returned, or a list of groups",
        ]
        for sentence, wanted in zip(said, expected, strict=True):
            assert sentence.startswith("BadInput"), sentence
            assert wanted in sentence


def test_ranks_that_warm_up_otherwise_are_told(four: ProcessWorld) -> None:
    for said in four.run(jobs.other_operations, timeout=60):
        assert said.startswith("BadInput: Rank 3 warms up with ['all_to_all'], rank 0 with ['all_reduce']"), (
            said
        )


@pytest.mark.parametrize(
    ("free", "budget", "expected"),
    [
        (
            1 << 30,
            2 << 30,
            "Rank 2 has 1 GiB of GPU memory free, and 3 groups may take 2 GiB (memory_budget)",
        ),
        (
            64 << 30,
            1 << 30,
            "2 groups took 1.172 GiB of GPU memory, more than memory_budget (1 GiB); "
            "the last was group holdfast:",
        ),
        (64 << 30, 8 << 30, "warm"),
    ],
)
def test_a_memory_budget_is_kept(free: int, budget: int, expected: str) -> None:
    """What a GPU says of its memory is told to the code here; the rest is as it is."""
    with ProcessWorld(4) as ranks:
        for said in ranks.run(jobs.short_of_memory, free, budget, timeout=60):
            assert expected in said, said


@pytest.mark.parametrize(("lacks", "has"), [(3, (0, 2)), (0, (1,))])
def test_groups_that_are_listed_on_some_ranks_only(
    lacks: int, has: tuple[int, ...], four: ProcessWorld
) -> None:
    for said in four.run(jobs.listed_on_some, lacks, timeout=60):
        assert said.startswith("BadInput"), said
        assert any(f"on rank {rank} and not on rank {lacks}" in said for rank in has), said


def test_a_grid_that_does_not_fit_on_one_rank_is_told_to_all(four: ProcessWorld) -> None:
    for said, took in four.run(jobs.a_grid_that_does_not_fit, timeout=60):
        assert said.startswith("BadInput"), said
        assert "failed on rank 2" in said, said
        assert "The grid has ranks to 7; the world has 4." in said, said
        assert took < AT_ONCE
