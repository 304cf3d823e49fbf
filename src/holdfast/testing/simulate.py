"""The save protocol, and that of a turn, under simulated faults: thousands of seeded schedules in seconds.

`simulate(seed)` runs the very generator that real saves run (`flow.protocol.save_steps`) on up to
sixteen simulated ranks, with a manual clock and a seeded choice of everything: how long each
step takes, when a message becomes visible (puts are applied late and out of order, or lost with
their sender), who is late, killed, stopped, stuck or never comes, which write or publish
fails, and when the message store or the committer's storage goes away. `check` then holds the outcome
against the invariants:

1. an index exists only if every byte that it names is durable;
2. no rank reports success unless the index exists;
3. every live rank returns within its deadline plus a small constant;
4. no two ranks report different outcomes; one that can't know says CommitUnconfirmed;
5. all ranks that fail raise the same error, but for what only they can see (their own lost
   store, their own stuck call).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import (
    CommitUnconfirmed,
    DeadlineExceeded,
    HoldfastError,
    RosterLost,
)
from holdfast.flow.effects import Alive, Claim, Context, Do, Effect, Get, Pause, Put, Steps
from holdfast.flow.phases import TRANSITIONS, TURN_TRANSITIONS
from holdfast.flow.protocol import save_steps, turn_steps
from holdfast.flow.run import GRACE, SUCCESS
from holdfast.roster.base import Message
from holdfast.roster.presence import at_key
from holdfast.testing.faults import Faults, draw_faults
from holdfast.testing.simulated_work import SimulatedSave, SimulatedTurn

SLACK = 2.0
"""Seconds past its deadline by which a live rank must have returned."""


class SimulatedClock:
    """Time that passes only when the simulation says so."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        """Nothing: the effect that sleeps has a duration of its own."""


@dataclass
class Outcome:
    """How the call ended on one rank."""

    state: str
    """`committed`, `failed`, `unconfirmed`, `dead`, or `never came`."""
    at: float
    entered: float
    error: HoldfastError | None = None
    own: bool = False
    """The error is one that only this rank can see."""


@dataclass
class World:
    """One schedule: its ranks, its messages, its storage."""

    seed: int
    ranks: int
    timeout: float
    stall_timeout: float
    same_host: bool
    faults: Faults
    rng: random.Random
    turn: bool = False
    """Is it a turn (`turn_steps`), and no save?"""
    clock: SimulatedClock = field(default_factory=SimulatedClock)
    board: dict[str, Message] = field(default_factory=dict)
    durable: set[int] = field(default_factory=set)
    """Ranks that have written, or, in a turn, acted."""
    index: set[int] | None = None
    """The ranks whose files the index names, once there is an index."""
    index_since: float = 0.0
    dead: set[int] = field(default_factory=set)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    trace: list[str] = field(default_factory=list)
    _queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: int = 0

    # -- time -----------------------------------------------------------------------------

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.clock.time + seconds, self._count, action))

    def run(self) -> None:
        while self._queue:
            self.clock.time, _, action = heapq.heappop(self._queue)
            action()

    def lost(self, rank: int) -> bool:
        """Can this rank not reach the message store any more?"""
        since = min(self.faults.store_lost or 1e9, self.faults.client_lost.get(rank, 1e9))
        return self.clock.time >= since

    def note(self, rank: int, text: str) -> None:
        self.trace.append(f"{self.clock.time:8.3f} rank {rank}: {text}")


class _Rank:
    """Drives one generator; its process can die, stop, or be stuck."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.done = False
        self.awake_at = 0.0
        self.progress, self.beats, self.doing = 0, 0, ""
        self.waiting_for: list[int] | None = None

    def enter(self) -> None:
        world = self.world
        if self.rank in world.dead:
            return
        self.entered = world.clock.time
        self.context = Context(
            self.rank,
            tuple(range(world.ranks)),
            "save/x",
            "save of x",
            world.clock,
            world.timeout,
            world.stall_timeout,
            table=TURN_TRANSITIONS if world.turn else TRANSITIONS,
            on_phase=lambda phase: world.note(self.rank, f"-> {phase}"),
            on_wait=lambda ranks: setattr(self, "waiting_for", None if ranks is None else list(ranks)),
        )
        self.steps: Steps = (
            turn_steps(self.context, SimulatedTurn(world, self.rank))
            if world.turn
            else save_steps(self.context, SimulatedSave(world, self.rank))
        )
        self.beat()
        world.after(world.timeout + GRACE, self.give_up)
        self.resume(lambda: self.steps.send(None))

    def stopped_for(self) -> float:
        """Seconds until a stopped process runs again; 0 if it runs."""
        start, length = self.world.faults.stopped.get(self.rank, (0.0, 0.0))
        now = self.world.clock.time
        return start + length - now if start <= now < start + length else 0.0

    def beat(self) -> None:
        """The presence message, at its interval, while the process lives and runs."""
        world = self.world
        if self.done or self.rank in world.dead or world.lost(self.rank):
            return
        if not self.stopped_for():
            self.beats += 1
            if self.doing == "write" and self.rank not in world.faults.stuck:
                self.progress += 1
            message = {
                "operation": "save/x",
                "phase": self.context.phase,
                "waiting_for": self.waiting_for,
                "progress": self.progress,
                "beat": self.beats,
                "rank": self.rank,
                "pid": self.rank + 1,
                "host": "h",
                "wall": world.clock.time,
            }
            world.after(
                world.rng.uniform(0.0, 0.05), lambda: world.board.__setitem__(at_key(self.rank), message)
            )
        world.after(min(1.0, world.stall_timeout / 5), self.beat)

    def give_up(self) -> None:
        """What `flow.run` does when the worker does not come back by the deadline."""
        if self.done or self.rank in self.world.dead:
            return
        pause = self.stopped_for()
        if pause:
            self.world.after(pause + 0.01, self.give_up)
            return
        if self.context.phase in SUCCESS:
            self.finish("committed")
            return
        unsure = self.context.phase in ("written", "committing")
        error = CommitUnconfirmed("stuck") if unsure else DeadlineExceeded("stuck")
        self.finish("unconfirmed" if unsure else "failed", error, own=True)

    def finish(self, state: str, error: HoldfastError | None = None, own: bool = False) -> None:
        if not self.done:
            self.done = True
            self.world.note(self.rank, f"returns {state} {error or ''}")
            self.world.outcomes[self.rank] = Outcome(state, self.world.clock.time, self.entered, error, own)

    def resume(self, go: Callable[[], Effect]) -> None:
        """Run the generator to its next effect, and schedule that."""
        world = self.world
        if self.done or self.rank in world.dead:
            return
        pause = self.stopped_for()
        if pause:
            world.after(pause, lambda: self.resume(go))
            return
        try:
            effect = go()
        except StopIteration:
            self.finish("committed")
        except CommitUnconfirmed as error:
            self.finish("unconfirmed", error, own=True)
        except HoldfastError as error:
            self.finish("failed", error, own=isinstance(error, RosterLost) or world.lost(self.rank))
        else:
            self.perform(effect)

    def answer(self, seconds: float, make: Callable[[], Any]) -> None:
        """Compute a result at its time and send it in, or throw what it raises."""

        def at_its_time() -> None:
            if self.done or self.rank in self.world.dead:
                return
            pause = self.stopped_for()
            if pause:
                self.world.after(pause, at_its_time)
                return
            try:
                value = make()
            except HoldfastError as raised:
                error = raised
                self.resume(lambda: self.steps.throw(error))
            else:
                self.resume(lambda: self.steps.send(value))

        self.world.after(seconds, at_its_time)

    def over_roster(self, make: Callable[[], Any]) -> None:
        def ask() -> Any:
            if self.world.lost(self.rank):
                raise RosterLost("The message store can't be reached.")
            return make()

        self.answer(self.world.rng.uniform(0.0, 0.03), ask)

    def perform(self, effect: Effect) -> None:
        world, rng = self.world, self.world.rng
        match effect:
            case Put(key, message):
                # Applied some time later: a TCPStore client buffers, and a dying sender takes it along.
                def apply() -> None:
                    if not world.lost(self.rank) and (self.rank not in world.dead or rng.random() < 0.5):
                        world.board[key] = message

                world.after(rng.choice([0.0, 0.01, 0.2]) * rng.random(), apply)
                self.over_roster(lambda: None)
            case Get(keys):
                self.over_roster(lambda: [world.board.get(key) for key in keys])
            case Claim(key, message):
                self.over_roster(lambda: world.board.setdefault(key, message))
            case Pause(_, seconds):
                self.answer(seconds * rng.random(), lambda: None)
            case Alive(message):
                alive = None if not world.same_host else int(message["rank"]) not in world.dead
                self.answer(0.0, lambda: alive)
            case Do(name, action):
                self.doing = name
                if world.faults.stuck.get(self.rank) == name:
                    world.note(self.rank, f"stuck in {name}")
                    return
                seconds = (
                    0.1 if name in ("look", "rest") else rng.choice([0.0, 0.01, 0.5, 3.0]) * rng.random()
                )

                def act() -> Any:
                    self.doing = ""
                    return action()

                self.answer(seconds, act)


def simulate(seed: int, max_ranks: int = 16, turn: bool = False) -> World:
    """One schedule, run to its end: of a save, or of a turn."""
    rng = random.Random(seed)
    ranks = rng.choice([2, 2, 3, 3, 4, 5, 8, max_ranks])
    world = World(
        seed,
        ranks,
        timeout=rng.choice([4.0, 10.0, 20.0]),
        stall_timeout=rng.choice([2.0, 5.0, 30.0]),
        same_host=rng.random() < 0.5,
        faults=draw_faults(rng, ranks),
        rng=rng,
        turn=turn,
    )
    for number in range(ranks):
        rank = _Rank(world, number)
        if number not in world.faults.absent:
            world.after(rng.random() * 0.3 + world.faults.late.get(number, 0.0), rank.enter)
        if number in world.faults.killed:
            world.after(world.faults.killed[number], lambda number=number: world.dead.add(number))  # type: ignore[misc]
    world.run()
    return world


def check(world: World) -> list[str]:
    """The invariants that the schedule broke; none, one hopes."""
    wrong = []
    live = {rank: outcome for rank, outcome in world.outcomes.items() if rank not in world.dead}
    everyone = set(range(world.ranks))
    if world.index is not None and (world.index != everyone or not everyone <= world.durable):
        wrong.append("1: the index exists, but not every byte that it should name is durable")
    for rank, outcome in world.outcomes.items():
        if world.turn:
            if outcome.state == "committed" and not everyone <= world.durable:
                wrong.append(f"2: rank {rank} reports success, but not all ranks have acted")
            continue
        if outcome.state == "committed" and (world.index is None or outcome.at < world.index_since):
            wrong.append(f"2: rank {rank} reports success, but there is no index")
        if outcome.state == "failed" and world.index is not None:
            wrong.append(f"4: rank {rank} reports failure, but the index exists")
    expected = everyone - world.faults.absent - world.dead
    for rank in expected:
        if rank not in live:
            wrong.append(f"3: rank {rank} never returned")
            continue
        start, length = world.faults.stopped.get(rank, (0.0, 0.0))
        limit = max(live[rank].entered + world.timeout, start + length if length else 0.0) + SLACK
        if live[rank].at > limit:
            wrong.append(f"3: rank {rank} returned {live[rank].at - limit:.2f} s too late")
    # In a turn nothing lasts that a rank without the message store could look at: it knows of its own loss only.
    states = {outcome.state for outcome in world.outcomes.values() if not (world.turn and outcome.own)}
    if {"committed", "failed"} <= states:
        wrong.append("4: some ranks report success, others failure")
    told = {
        (type(outcome.error).__name__, outcome.error.message)
        for outcome in live.values()
        if outcome.state == "failed" and outcome.error is not None and not outcome.own
    }
    if len(told) > 1:
        wrong.append(f"5: ranks raise different errors: {sorted(told)}")
    return wrong
