"""The save protocol over thousands of seeded fault schedules, and proof that the check has teeth."""

from __future__ import annotations

import os
import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import pytest

from holdfast._core.base.deadline import Limits
from holdfast._core.protocol import core as protocol
from holdfast._core.protocol import liveness, rounds
from holdfast._core.protocol.effects import Claim, Context, Delete, Steps, outcome_key
from holdfast._core.protocol.liveness import PeerMonitor
from holdfast._core.protocol.messages import abandoned_by
from holdfast._core.protocol.rendezvous import History, _Open, _shared
from holdfast._core.roster.links import Path
from holdfast._core.roster.lost import Gone, Seen, Signs
from holdfast._core.roster.presence import Vitals
from holdfast.errors import HoldfastError, RankInfo
from tests.support import simulate as simulate_module
from tests.support.faults import Faults
from tests.support.simulate import World, check, draw_world, run_world, simulate
from tests.support.simulated_work import SimulatedSave


def schedules(suite: int, soak: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("count", [suite, pytest.param(soak, marks=pytest.mark.soak)])


def explore(
    first: int, count: int, turn: bool = False, calls: int = 1, enough: int = 3
) -> tuple[list[str], Counter[str]]:
    """What the schedules broke (at most `enough` of them), and how their ranks ended."""
    wrong: list[str] = []
    ends: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            world = simulate(seed, turn=turn, calls=calls)
        except AssertionError as error:  # a step that the table does not have
            return [f"seed {seed}: {error}"], ends
        ends.update({outcome.state for outcome in world.outcomes.values()})
        broken = check(world)
        if broken:
            wrong.append(tell(world, broken))
            if len(wrong) == enough:
                break
    return wrong, ends


def tell(world: World, broken: list[str]) -> str:
    lines = [f"seed {world.seed}: {world.ranks} ranks, {world.faults}", *broken, *world.trace[-30:]]
    return "\n".join(lines)


def explore_on_all_cores(count: int, first: int = 0, turn: bool = False, calls: int = 1) -> Counter[str]:
    """How the ranks of so many schedules ended; fails if one of them broke something."""
    parts = 2 * (os.cpu_count() or 1)
    each = count // parts
    with ProcessPoolExecutor(mp_context=get_context("forkserver")) as pool:
        found = list(
            pool.map(
                partial(explore, count=each, turn=turn, calls=calls), range(first, first + parts * each, each)
            )
        )
    wrong = [line for part, _ in found for line in part]
    assert not wrong, "\n\n".join(wrong)
    return sum((ends for _, ends in found), Counter())


@schedules(250, 10_000)
@pytest.mark.timeout(900)
def test_invariants_hold(count: int) -> None:
    ends = explore_on_all_cores(count)
    # Every kind of end was seen often, so the schedules are neither all harmless nor all hopeless.
    assert ends["committed"] > count // 10
    assert ends["failed"] > count // 10
    assert ends["unconfirmed"] > count // 50


@schedules(80, 2_500)
def test_invariants_of_a_turn_hold(count: int) -> None:
    ends = explore_on_all_cores(count, turn=True)
    assert ends["committed"] > count // 10
    assert ends["failed"] > count // 10
    assert not ends["unconfirmed"]


@schedules(100, 1_500)
@pytest.mark.timeout(900)
def test_invariants_of_calls_that_fail_and_are_repeated_hold(count: int) -> None:
    """On some ranks or on all, at once or late: no checkpoint mixes the states of two calls, and the next
    good call is committed."""
    ends = explore_on_all_cores(count, calls=4)
    assert ends["committed"] > count // 10
    assert ends["failed"] > count // 10


@pytest.mark.soak
@pytest.mark.timeout(14400)
def test_invariants_hold_for_long() -> None:
    explore_on_all_cores(300_000, 1_000_000)


@pytest.mark.soak
@pytest.mark.timeout(14400)
def test_invariants_of_repeated_calls_hold_for_long() -> None:
    explore_on_all_cores(50_000, 1_000_000, calls=6)


def test_a_schedule_is_a_function_of_its_seed() -> None:
    assert simulate(7).trace == simulate(7).trace
    assert simulate(7).trace != simulate(8).trace


# -- mutations: protocols with one step left out must be caught --------------------------------


def no_claim(context: Context, value: Any) -> Steps:
    """Publishes without claiming the outcome first."""
    return
    yield


def no_collect(context: Context, topic: str, mine: Any, ranks: Any, *_: Any, **__: Any) -> Steps:
    """Does not wait for the others to have written."""
    return dict.fromkeys(context.participants, mine)
    yield


def silent_abandon(context: Context, error: HoldfastError) -> Steps:
    """Raises without telling anybody."""
    context.enter("failed")
    return error
    yield


def optimistic_final(context: Context, job: Any) -> Steps:
    """Believes in the commit as soon as it was agreed, without waiting for the index."""
    return
    yield


def pessimistic_doubt(context: Context, cause: HoldfastError) -> Steps:
    """Calls what it can't know a failure."""
    return HoldfastError(f"{context.title} failed: {cause.message}")
    yield


def blind_trust(context: Context, job: Any, seconds: float, cause: Any) -> Steps:
    """Believes the message that says committed, without a look at the index."""
    return
    yield


def no_act(context: Context, job: Any) -> Steps:
    """Says that it has done its part before it has."""
    return {}
    yield


patient = PeerMonitor._stalled


def impatience(self: PeerMonitor, seen: dict[int, Seen]) -> list[RankInfo]:
    """Takes silence for death: gives up a rank that lives, although nobody has asked for that."""
    if self.context.limits.stall_timeout is not None or self.context.clock.now() - self.began < 5.0:
        return patient(self, seen)
    return [self._describe(rank, one, "silent for 5 s") for rank, one in seen.items()]


MUTATIONS: list[tuple[Any, str, Any]] = [
    (rounds, "_claim_agreed", no_claim),
    (rounds, "collect", no_collect),
    (protocol, "_abandon", silent_abandon),
    (protocol, "_await_final", optimistic_final),
    (protocol, "_unconfirmed", pessimistic_doubt),
    (protocol, "_look", blind_trust),
]


def test_silence_that_is_taken_for_death_is_caught_as_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerMonitor, "_stalled", impatience)
    wrong, _ = explore(0, 3_000)
    assert wrong, "3,000 schedules did not notice that living ranks were given up"
    assert all("\n8: rank " in one for one in wrong), wrong


def test_the_harm_of_silence_is_looked_for_often() -> None:
    """Else the invariant would hold for want of schedules."""
    worlds = [draw_world(seed) for seed in range(1_000)]
    slow = [
        world
        for world in worlds
        if world.limits.stall_timeout is None
        and world.faults != Faults()
        and world.faults.harmless_within(world.timeout - 25.0, world.limits.lost_after)
    ]
    assert len(slow) > 15


# -- hosts and what is between them ------------------------------------------------------------------


def on_hosts(
    seed: int, faults: Faults, lost_after: float = 10.0, calls: int = 1, expected: str = ""
) -> World:
    """Four ranks on hosts of their own, with time enough for everything. expected: the number of an invariant
    that breaks."""
    limits, rng = Limits(lost_after=lost_after), random.Random(seed)
    world = World(seed, 4, 600.0, False, limits, False, faults, rng, calls=calls, durations=(0.0, 0.01))
    broken = check(run_world(world))
    assert {line[0] for line in broken} == set(expected), tell(world, broken)
    return world


def states(world: World, call: int) -> set[str]:
    return {outcome.state for (_, number), outcome in world.outcomes.items() if number == call}


@pytest.mark.parametrize("gone", [0, 2])
def test_a_host_that_goes_between_calls_ends_the_next_one_after_lost_after(gone: int) -> None:
    """Rank 0 decides the call. All call 20 s after it; nobody has been reached in this call before."""
    for seed in range(8):
        late = {(rank, 1): 25.0 for rank in range(4)}
        world = on_hosts(seed, Faults(killed={gone: 5.0}, host_gone={gone}, late_call=late), calls=2)
        assert states(world, 0) == {"committed"}
        assert states(world, 1) == {"failed"}
        # The verdict is there by then.
        assert all(outcome.at < 25.0 + 5.0 for (_, call), outcome in world.outcomes.items() if call)


@pytest.mark.parametrize("gone", [0, 2])
@pytest.mark.parametrize("at", [5.0, 9.0, 30.0])
def test_a_host_that_goes_ends_waits_after_lost_after_and_a_little(gone: int, at: float) -> None:
    for seed in range(8):
        late = {(gone, 1): 1e6, **{(rank, 1): 8.0 for rank in range(4) if rank != gone}}
        world = on_hosts(seed, Faults(killed={gone: at}, host_gone={gone}, late_call=late), calls=2)
        assert states(world, 1) == {"failed"}
        ends = [outcome.at for (_, call), outcome in world.outcomes.items() if call]
        assert at + 9.0 <= min(ends) <= max(ends) < at + 10.0 + 6.0


def test_a_process_that_ends_on_another_host_ends_waits_soon() -> None:
    for seed in range(8):
        late = {(2, 1): 1e6, **{(rank, 1): 8.0 for rank in range(4) if rank != 2}}
        world = on_hosts(seed, Faults(killed={2: 20.0}, late_call=late), 120.0, calls=2)
        assert max(outcome.at for (_, call), outcome in world.outcomes.items() if call) < 20.0 + 7.0


def test_ports_that_refuse_and_ways_that_are_cut_end_nothing() -> None:
    """One rank is late, and heard in the message store alone."""
    for seed in range(8):
        refused = dict.fromkeys(range(4), (5.0, 60.0))
        cut = {(0, 1): (5.0, 60.0), (1, 2): (5.0, 60.0), (3, 1): (5.0, 60.0)}
        for faults in (Faults(refused=refused), Faults(cut=cut), Faults(refused=refused, cut=cut)):
            faults.late_call = {(1, 1): 40.0}
            world = on_hosts(seed, faults, 5.0, calls=3)
            assert {outcome.state for outcome in world.outcomes.values()} == {"committed"}


def test_a_partition_that_heals_after_the_verdict_leaves_nothing() -> None:
    for seed in range(8):
        late = {(2, 1): 60.0, **{(rank, 1): 8.0 for rank in (0, 1, 3)}, (0, 2): 40.0}
        world = on_hosts(seed, Faults(away={2: (5.0, 30.0)}, late_call=late), calls=3)
        assert states(world, 1) == {"failed"}, "it was given up"
        assert states(world, 2) == {"committed"}, "and is one of them again"


def test_a_network_without_harm_is_looked_at_often() -> None:
    worlds = [draw_world(seed) for seed in range(3_000)]
    harmless = [
        world
        for world in worlds
        if world.limits.stall_timeout is None
        and (world.faults.refused or world.faults.cut or world.faults.away)
        and world.faults.harmless_within(world.timeout - 25.0, world.limits.lost_after)
    ]
    assert len(harmless) > 15


def look_at_the_path_alone(self: Signs, path: Path | None, vitals: Any, *how: float) -> str:
    """Takes a refused port for the end of a process, whatever the message store hears of it."""
    self.is_there = path is Path.OPEN
    self.beat = vitals.beat if vitals is not None else self.beat
    return "its process has ended" if path in (Path.ENDED, Path.REFUSED) else ""


def is_of_for_good(self: Gone, vitals: Vitals) -> bool:
    """Never takes a verdict back."""
    return self.token == vitals.who.token


def test_a_refusal_that_is_taken_for_an_end_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Signs, "look", look_at_the_path_alone)
    refused = Faults(refused={1: (5.0, 30.0)}, late_call={(1, 1): 20.0})
    on_hosts(1, refused, calls=2, expected="8")


def test_a_verdict_that_is_never_taken_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gone, "is_of", is_of_for_good)
    on_hosts(1, Faults(away={2: (5.0, 30.0)}, late_call={(2, 1): 60.0}), calls=2, expected="9")


@pytest.mark.parametrize(("where", "name", "mutant"), MUTATIONS, ids=[name for _, name, _ in MUTATIONS])
def test_a_broken_protocol_is_caught(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, mutant: Any
) -> None:
    monkeypatch.setattr(where, name, mutant)
    wrong, _ = explore(0, 3_000, enough=1)
    assert wrong, f"3,000 schedules did not notice that {name} was replaced"


def test_a_checkpoint_that_is_moved_and_missed_is_caught_as_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedSave, "is_moved", lambda self: False)
    wrong, _ = explore(0, 3_000)
    assert wrong, "3,000 schedules did not notice that ranks miss a checkpoint that another has moved"
    assert all("\n8: rank " in one for one in wrong), wrong


@pytest.mark.parametrize(
    ("name", "mutant"), [("act", no_act), ("collect", no_collect), ("_abandon", silent_abandon)]
)
def test_a_broken_turn_is_caught(monkeypatch: pytest.MonkeyPatch, name: str, mutant: Any) -> None:
    monkeypatch.setattr(protocol, name, mutant)
    wrong, _ = explore(0, 2_000, turn=True, enough=1)
    assert wrong, f"2,000 schedules did not notice that {name} was replaced"


def join_what_is_open(self: History, site: str) -> tuple[str, dict[str, int]]:
    """A rank that comes late skips what was abandoned, and joins the others in what they do now."""
    world = self.world  # type: ignore[attr-defined]
    number = self._next.get(site, 0)

    def outcome() -> dict[str, Any]:
        key = f"{site}/{self.generation}.{number}"
        opened = world.board.get(f"{key}/open") or {}
        return world.board.get(f"{key}/{opened.get('attempt')}/outcome") or {}

    while outcome().get("state") == "abandoned":
        number += 1
    self._next[site] = number + 1
    key = f"{site}/{self.generation}.{number}"
    self._open[key] = _Open(site, key)
    return key, dict(self._abandoned)


def count_all_calls_as_one(self: History, site: str) -> tuple[str, dict[str, int]]:
    """Every call has the same key, so that a repeated one meets the outcome of the one before."""
    key = f"{site}/{self.generation}.0"
    self._open[key] = _Open(site, key)
    return key, dict(self._abandoned)


def leave_too_early(context: Context, history: History) -> Steps:
    """The first to leave deletes what the others still need."""
    if (
        context.known_outcome is not None
        and history.end(context.key, context.known_outcome, context.clock.now()) is not None
    ):
        yield Delete(_shared(context.key))


@pytest.mark.parametrize(
    ("where", "name", "mutant"),
    [
        (History, "begin", join_what_is_open),
        (History, "begin", count_all_calls_as_one),
        (simulate_module, "leave", leave_too_early),
    ],
)
def test_a_broken_meeting_of_calls_is_caught(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, mutant: Any
) -> None:
    made = simulate_module._Rank.__init__

    def with_world(self: Any, world: World, rank: int) -> None:
        made(self, world, rank)
        self.history.world = world

    monkeypatch.setattr(simulate_module._Rank, "__init__", with_world)
    monkeypatch.setattr(where, name, mutant)
    wrong, _ = explore(0, 1000, calls=4, enough=1)
    assert wrong, f"1,000 schedules did not notice that {name} was replaced"


# -- a large world, in which looks are rare ---------------------------------------------------------


def slowest_to_hear(seed: int) -> float:
    """Seconds from the first end of a call that fails on one rank to the last."""
    where = ("row_digest", "write")[seed % 2]
    faults = Faults(fails_at={(5, 0): where})
    rng = random.Random(seed)
    world = World(seed, 8, 300.0, False, Limits(), True, faults, rng, durations=(0.0, 0.01))
    run_world(world)
    assert not check(world)
    ends = [outcome.at for outcome in world.outcomes.values()]
    assert {outcome.state for outcome in world.outcomes.values()} == {"failed"}
    return max(ends) - min(ends)


def abandon_quietly(key: str, rank: int, error: HoldfastError) -> Steps:
    """Claims, and wakes nobody."""
    return (yield Claim(outcome_key(key), abandoned_by(rank, error)))


def test_an_error_ends_every_wait_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the committer looks once a second; the others are woken."""
    monkeypatch.setattr(liveness, "pace", lambda ranks, stall: 1.0 if ranks == 1 else 60.0)
    assert max(map(slowest_to_hear, range(100))) < 2.5
    monkeypatch.setattr(protocol, "abandon", abandon_quietly)
    assert max(map(slowest_to_hear, range(100))) > 10.0
