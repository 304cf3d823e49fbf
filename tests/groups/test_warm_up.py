"""Groups that are opened and warmed up by real processes, one of which does what it should not."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from holdfast.layout.grid import Grid
from holdfast.testing.processes import ProcessWorld
from tests.groups import jobs

VICTIM = 5


@pytest.fixture
def world() -> Iterator[ProcessWorld]:
    """Eight ranks of its own for each test: groups that were given up stay broken."""
    with ProcessWorld(8) as ranks:
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
        ("never comes", 3.0, 60.0, 5.0),
        ("dies", 20.0, 10.0, 4.0),
        ("stops", 20.0, 2.0, 6.0),
        ("hangs", 3.0, 60.0, 5.0),
        ("has no memory", 20.0, 10.0, 4.0),
    ],
)
def test_a_rank_that_does_not_do_its_part_is_named_on_all_others(
    what: str, timeout: float, stall: float, within: float, world: ProcessWorld
) -> None:
    world.start(jobs.warm_with, 8, VICTIM, what, timeout, stall)
    results = {result.rank: result for result in world.collect_some(timeout + 10)}
    world.signal(VICTIM, signal.SIGCONT)
    assert set(results) >= set(range(8)) - {VICTIM}
    for rank, result in results.items():
        if rank == VICTIM:
            continue
        said, took, culprit, missing = result.get()
        assert took < within, (rank, took, said)
        if (
            what == "hangs"
        ):  # whether a rank waits for others or hangs by itself can't be seen from outside: all are shown
            assert said.startswith("DeadlineExceeded")
            assert VICTIM in missing, said
            assert "time.sleep" in said or "misbehave" in said or "all_reduce" in said
            assert "group" in said
            assert "all its ranks arrived" in said
            continue
        assert culprit == VICTIM, (rank, said)
        assert f"rank {VICTIM} " in said.lower(), said
        expected = {
            "never comes": "it has not entered warm-up of process groups",
            "dies": "its process has ended",
            "stops": "no progress for",
            "has no memory": "OutOfMemoryError: CUDA out of memory",
        }
        assert expected[what] in said, said
        assert said == results[min(set(results) - {VICTIM})].get()[0]


def test_a_rank_that_is_late_is_waited_for(world: ProcessWorld) -> None:
    for said, took, _, _ in world.run(jobs.warm_with, 8, VICTIM, "comes late", 30.0, 60.0, timeout=60):
        assert said == "warm"
        assert took >= 9.0


@pytest.mark.parametrize("how", ["grid", "history"])
def test_ranks_with_other_ideas_of_the_layout_are_told_before_any_group_is_made(
    how: str, world: ProcessWorld
) -> None:
    for said, took in world.run(jobs.another_layout, 8, VICTIM, how, timeout=60):
        assert said.startswith("BadInput"), said
        assert f"on rank {VICTIM}" in said
        assert ("'ep': 1" if how == "grid" else "groups made before: 1 on rank 0, 2 on rank 5") in said
        assert took < 3.0
