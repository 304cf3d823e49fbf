"""What ends a wait, and what is told of it: the table, row by row, on a clock that only the test moves."""

from __future__ import annotations

import random
from typing import Any

import pytest

from holdfast._core.base.deadline import Deadline, Limits
from holdfast._core.protocol.effects import Claim, Context, Late, Look, Put
from holdfast._core.protocol.liveness import PeerMonitor
from holdfast._core.roster.lost import Seen
from holdfast._core.roster.presence import Vitals
from holdfast._core.roster.process import Identity
from holdfast.errors import DeadlineExceeded, HoldfastError, IdleRanks, RankFailed
from tests.support.faults import Faults
from tests.support.simulate import SimulatedClock, World, check, run_world
from tests.support.wide import wide

HOUR = 3600.0
KEY = "save/x/0.0/5f1e"


def seen(rank: int, beat: int = 1, ended: str = "", state: str = "", **operations: Any) -> Seen:
    """What is known of a rank; `operations` by a name that stands for a key. At each beat it looks how they
    go."""
    named = {KEY if name == "here" else name: {"looks": beat, **part} for name, part in operations.items()}
    who = Identity(rank, "h", 100 + rank, token=str(rank))
    return Seen(Vitals(who, named, beat=beat), ended, state=state)


class Wait:
    """One wait of rank 0 for rank 1, second by second."""

    def __init__(self, deadline: float = 60.0, moves: bool = False, **limits: Any) -> None:
        self.clock = SimulatedClock()
        self.told: list[Late] = []
        self.claims: dict[str, Any] = {}
        self.context = Context(
            0,
            (0, 1, 2),
            KEY,
            "save of x",
            Deadline(deadline, self.clock, moves=moves),
            Limits(**limits),
            on_late=self.told.append,
            blocks=True,
        )
        self.monitor = PeerMonitor(self.context, "write its part")

    def go(self, seconds: float, show: Any, ranks: tuple[int, ...] = (1,)) -> HoldfastError | None:
        """Wait so long, looking whenever the monitor wants to; return the error that ends it. `show` gives
        what is seen of a rank at a time."""
        ends = self.clock.time + seconds
        while self.clock.time < ends:
            try:
                self._look(show, ranks)
            except HoldfastError as error:
                return error
            self.clock.time += self.monitor.patience()
        return None

    def _look(self, show: Any, ranks: tuple[int, ...]) -> None:
        steps, answer = self.monitor.look(list(ranks)), None
        while True:
            try:
                effect = steps.send(answer)
            except StopIteration:
                return
            match effect:
                case Look(some):
                    answer = {rank: show(self.clock.time, rank) for rank in some}
                case Claim(key, message):
                    answer = self.claims.setdefault(key, message)
                case Put(key, message):
                    answer = self.claims[key] = message
                case _:
                    raise AssertionError(effect)


def alive(now: float, rank: int) -> Seen:
    return seen(rank, beat=int(now))


def silent(now: float, rank: int) -> Seen:
    return seen(rank)


def test_a_process_that_is_gone_ends_the_wait_at_once() -> None:
    wait = Wait(deadline=HOUR)
    error = wait.go(60, lambda now, rank: seen(rank, ended="its process was killed by SIGKILL"))
    assert type(error) is RankFailed
    assert wait.clock.time < 1.0
    assert "rank 1 (host h, pid 101)" in str(error)
    assert "killed by SIGKILL" in str(error)


def test_at_the_end_of_programs_the_word_of_a_rank_that_its_own_has_ended_ends_nothing() -> None:
    """It still closes its groups with the others; only the end of its process counts."""
    wait = Wait(deadline=HOUR, past_end=True)
    word = seen(1, ended="its program has ended")
    assert wait.go(60, lambda now, rank: word) is None
    assert wait.go(60, lambda now, rank: word._replace(there=True)) is None
    assert type(wait.go(60, lambda now, rank: word._replace(there=False))) is RankFailed
    assert type(Wait(deadline=HOUR).go(60, lambda now, rank: word)) is RankFailed


def test_a_rank_whose_message_came_just_before_its_end_is_not_blamed() -> None:
    """The caller looks for the message before each look: what shows an end counts only at the second one."""
    wait = Wait(deadline=HOUR)
    looks: list[float] = []

    def show(now: float, rank: int) -> Seen:
        looks.append(now)
        return seen(rank, ended="its process has ended")

    wait.clock.time = 0.3
    wait._look(show, (1,))
    assert len(looks) == 1
    with pytest.raises(RankFailed):
        wait._look(show, (1,))


@pytest.mark.parametrize("state", ["T", "t", "D"])
def test_a_process_that_is_stopped_is_told_and_waited_for(state: str) -> None:
    wait = Wait(deadline=HOUR)
    error = wait.go(2 * HOUR, lambda now, rank: seen(rank, state=state))
    assert type(error) is DeadlineExceeded
    assert HOUR <= wait.clock.time < HOUR + 2.0
    assert f"(state {state})" in str(error)
    assert f"(state {state})" in str(wait.told[0].ranks[0])


def test_silence_ends_nothing_before_the_deadline() -> None:
    """Neither a rank that does not beat (it holds the GIL), nor one that has never shown itself."""
    for show in (silent, lambda now, rank: Seen()):
        wait = Wait(deadline=HOUR)
        assert wait.go(HOUR - 1, show) is None
        error = wait.go(10, show)
        assert type(error) is DeadlineExceeded
        assert ("holdfast.install()" in error.hint) == (show is not silent)


def test_a_wait_of_hours_is_told_at_doubling_intervals_and_when_it_is_over() -> None:
    wait = Wait(deadline=24 * HOUR)
    assert wait.go(3 * HOUR, alive) is None
    waited = [late.waited for late in wait.told]
    assert [round(seconds, -1) for seconds in waited[:4]] == [30, 90, 210, 450]
    assert len(waited) == 8
    assert all(late.ranks[0].rank == 1 and late.what == "write its part" for late in wait.told)
    assert wait.told[0].left == pytest.approx(24 * HOUR - 30, abs=5)
    wait.monitor.over()
    assert wait.told[-1].came
    assert wait.told[-1].waited == pytest.approx(3 * HOUR, abs=2)
    wait.monitor.over()
    assert [late.came for late in wait.told].count(True) == 1


def test_only_ranks_that_were_told_of_are_told_to_have_come() -> None:
    wait = Wait(deadline=HOUR)
    wait.go(10, alive)
    wait.monitor.over()
    assert not wait.told
    wait.go(60, alive, (1, 2))
    wait.monitor.over({2}.__contains__)
    assert [info.rank for info in wait.told[-1].ranks] == [2]


def test_progress_moves_a_deadline_that_nobody_gave() -> None:
    def show(now: float, rank: int) -> Seen:
        return seen(rank, here={"phase": "writing", "progress": int(min(now, 2 * HOUR) / 600)})

    wait = Wait(deadline=1800.0, moves=True)
    error = wait.go(10 * HOUR, show)
    assert type(error) is DeadlineExceeded
    assert wait.clock.time == pytest.approx(2 * HOUR + 1800, abs=10)
    wait = Wait(deadline=1800.0)  # as `timeout=1800`
    assert type(wait.go(10 * HOUR, show)) is DeadlineExceeded
    assert wait.clock.time == pytest.approx(1800, abs=2)


def test_progress_in_other_calls_is_none_in_this_one() -> None:
    """A rank that never enters this save, and goes on with others, is not waited for until they end."""

    def show(now: float, rank: int) -> Seen:
        return seen(rank, beat=int(now), other={"phase": "writing", "progress": int(now)})

    wait = Wait(deadline=1800.0, moves=True)
    assert type(wait.go(10 * HOUR, show)) is DeadlineExceeded
    assert wait.clock.time == pytest.approx(1800, abs=2)


def test_a_caller_may_give_up_ranks_that_live() -> None:
    wait = Wait(deadline=HOUR, stall_timeout=20.0)
    error = wait.go(60, alive)
    assert type(error) is RankFailed
    assert wait.clock.time == pytest.approx(20, abs=2)
    assert "has not entered" in str(error)


def test_the_absence_of_the_one_who_looks_is_nobodys_silence() -> None:
    """It was stopped itself, or a call held its GIL: it looks again before it judges."""
    wait = Wait(deadline=HOUR, stall_timeout=60.0)
    assert wait.go(10, silent) is None
    wait.clock.time += 500.0
    assert wait.go(45, silent) is None
    assert type(wait.go(30, silent)) is RankFailed


def test_a_world_in_which_life_is_enough_is_waited_for_without_end() -> None:
    wait = Wait(deadline=60.0, moves=True, while_alive=True)
    assert wait.go(10 * HOUR, silent) is None
    assert type(wait.go(10, lambda now, rank: seen(rank, ended="its process has ended"))) is RankFailed


def waiting_for(*ranks: int, **more: Any) -> dict[str, Any]:
    return {"title": "barrier", "phase": "entered", "waiting_for": list(ranks), "blocks": True, **more}


def test_a_circle_of_declared_waits_ends_as_soon_as_it_is_sure() -> None:
    wait = Wait(deadline=HOUR)
    error = wait.go(60, lambda now, rank: seen(rank, beat=int(now), other=waiting_for(0)))
    assert type(error) is RankFailed
    assert wait.clock.time < 5.0
    assert "a circle, which nothing can end: rank 1 waits for rank 0 in barrier" in str(error)
    assert "All ranks make the same calls in one order, with the same path and step" in str(error)
    assert "take no part on purpose" not in str(error)


def test_a_circle_over_several_ranks_is_found() -> None:
    there = {1: waiting_for(2), 2: waiting_for(0)}
    wait = Wait(deadline=HOUR)
    error = wait.go(60, lambda now, rank: seen(rank, beat=int(now), other=there[rank]))
    assert error is not None
    assert "rank 1 waits for rank 2 in barrier, and rank 2 waits for rank 0 in barrier" in str(error)


def test_all_operations_of_a_circle_end_with_it() -> None:
    there = {1: {"first": waiting_for(2)}, 2: {"second": waiting_for(0)}}
    wait = Wait(deadline=HOUR)
    error = wait.go(60, lambda now, rank: seen(rank, beat=int(now), **there[rank]))
    assert error is not None
    for key in ("first/outcome", "second/outcome"):
        assert wait.claims[key]["state"] == "abandoned"
        assert error.message in str(wait.claims[key])
    assert f"{KEY}/outcome" not in wait.claims, "its own call is abandoned as with any error"


@pytest.mark.parametrize(
    "part",
    [
        waiting_for(2),
        waiting_for(0, blocks=False),
        waiting_for(0, decided=True),
        {**waiting_for(), "waiting_for": None},
    ],
    ids=["waits for another", "on a thread of several", "is decided", "works"],
)
def test_what_may_still_end_is_no_circle(part: dict[str, Any]) -> None:
    def show(now: float, rank: int) -> Seen:
        return seen(rank, beat=int(now), **({"other": part} if rank == 1 else {}))

    wait = Wait(deadline=HOUR)
    assert wait.go(120, show) is None


def test_a_message_that_is_not_renewed_proves_no_circle() -> None:
    """It may be older than the end of the wait that it shows."""
    wait = Wait(deadline=HOUR)
    assert wait.go(120, lambda now, rank: seen(rank, beat=1, other=waiting_for(0))) is None


def test_who_has_not_looked_whether_its_call_is_decided_is_in_no_circle() -> None:
    """Of 64 ranks on two cores, one had not read for 40 s that the save before was committed."""
    there = {1: {"first": waiting_for(2, looks=7)}, 2: {"third": waiting_for(0)}}
    assert Wait(deadline=HOUR).go(120, lambda now, rank: seen(rank, beat=int(now), **there[rank])) is None


def test_looks_from_before_the_circle_was_seen_prove_nothing() -> None:
    shown = iter([0, *[9] * 1000])
    wait = Wait(deadline=HOUR)
    assert wait.go(120, lambda now, rank: seen(rank, other=waiting_for(0, looks=next(shown)))) is None


def test_who_waits_where_this_rank_is_on_another_thread_is_in_no_circle() -> None:
    wait = Wait(deadline=HOUR)
    wait.context.mine = lambda: [KEY, "other"]
    assert wait.go(120, lambda now, rank: seen(rank, beat=int(now), other=waiting_for(0))) is None


def test_a_rank_that_waits_in_the_same_call_is_no_circle() -> None:
    wait = Wait(deadline=HOUR)
    assert wait.go(120, lambda now, rank: seen(rank, beat=int(now), here=waiting_for(0))) is None


def test_no_wait_is_too_long_for_its_arithmetic() -> None:
    """Look 2,706 of a wait, after 674 s, once overflowed a float."""
    wait = Wait(deadline=1e8)
    wait.monitor.pause = 1e300
    assert wait.go(2 * HOUR, alive) is None


def world_of(ranks: int, faults: Faults, timeout: float, moves: bool) -> World:
    limits = Limits(report_after=30.0)
    return World(1, ranks, timeout, moves, limits, same_host=True, faults=faults, rng=random.Random(1))


def test_a_save_with_a_rank_that_is_hours_late_is_committed() -> None:
    world = run_world(world_of(3, Faults(late={2: 3 * HOUR}), 4 * HOUR, moves=False))
    assert not check(world)
    assert {outcome.state for outcome in world.outcomes.values()} == {"committed"}
    assert [late.came for late in world.late].count(True) == 1
    assert len(world.late) == 9


@pytest.mark.parametrize(
    ("copies", "faults", "ends"),
    [
        ([[(0, 1, 4)]], Faults(absent={2, 3}), IdleRanks),
        ([[(0, 2, 2), (1, 2, 2)], [(0, 1, 4)]], Faults(absent={2, 3}), IdleRanks),
        ([[(0, 1, 4)]], Faults(late={3: HOUR}), IdleRanks),
        ([[(0, 1, 3)]], Faults(absent={2, 3}), DeadlineExceeded),
        *wide(
            (
                ([[(0, 1, 4)], [(0, 1, 3)]], Faults(absent={3}), DeadlineExceeded),
                ([[(3, -1, 4)]], Faults(absent={2, 3}), DeadlineExceeded),
                ([[(0, 1, 4)]], Faults(absent={0}), DeadlineExceeded),
                ([], Faults(absent={2, 3}), DeadlineExceeded),
            )
        ),
    ],
    ids=[
        "same",
        "two kinds",
        "late",
        "one is not",
        "of one kind",
        "no first rank",
        "no committer",
        "unknown",
    ],
)
def test_a_save_ends_early_for_ranks_that_hold_nothing_of_their_own(
    copies: list[list[tuple[int, int, int]]], faults: Faults, ends: type[HoldfastError]
) -> None:
    world = world_of(4, faults, 3 * HOUR, moves=False)
    world.copies = copies
    run_world(world)
    # It fails although all live and come; then it is made again, which these ranks don't do.
    assert all("though every rank lives" in broken and faults.late for broken in check(world))
    for (rank, _), outcome in world.outcomes.items():
        assert type(outcome.error) is ends, (rank, outcome)
        if ends is IdleRanks:
            named = {info.rank for info in outcome.error.missing}
            assert named == (faults.absent or set(faults.late))
            assert outcome.at < 60.0 or rank in faults.late


def test_a_save_that_takes_hours_and_goes_on_is_committed_without_a_timeout() -> None:
    world = run_world(world_of(3, Faults(slow_write={0: HOUR, 1: 2 * HOUR}), 1800.0, moves=True))
    assert not check(world)
    assert {outcome.state for outcome in world.outcomes.values()} == {"committed"}
    assert max(outcome.at for outcome in world.outcomes.values()) > HOUR
