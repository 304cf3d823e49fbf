"""The save protocol, and that of a turn, under simulated faults: thousands of seeded schedules in seconds.

`simulate(seed)` runs the very generators that real saves run (`protocol.rendezvous`,
`protocol.core.save_steps`) on up to sixteen simulated ranks, with a manual clock and a seeded choice of
everything: how long each
step takes, when a message becomes visible (puts are applied late, or lost with
their sender), who is late, killed, stopped, stuck or never comes, which write or publish
fails, and when the message store or the committer's storage goes away. Deadlines are given, or moved by
progress; some callers give up silent ranks that live. `simulate(seed, calls=n)` has each
rank save n times into one folder, each time another state, and go on at once whatever became of it. `check`
then holds the outcome against the invariants:

1. an index exists only if every byte that it names is durable, and holds the states of one call of all ranks;
2. no rank reports success unless the index of that very call exists;
3. every live rank returns within its deadline plus a small constant;
4. no two ranks report different outcomes of a call; one that can't know says CommitUnconfirmed;
5. all ranks that fail raise the same error, but for what only they can see (their own lost store, their own
    stuck call);
6. where nothing is wrong but that calls fail on some ranks, every call that fails nowhere is committed;
7. and nothing of a call is left in the message store;
8. where nothing is dead, broken or missing, and ranks are only late, slow or stopped for a time that the
    deadline allows, every call is committed: nobody is given up for silence, nor for a port that refuses or
    a way that is cut while the message store or a neighbour hears it;
9. in the end nobody counts as gone that lives and speaks, whatever was judged meanwhile.
"""

from __future__ import annotations

import contextlib
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast._core.base.deadline import Deadline, Limits
from holdfast._core.base.values import Message
from holdfast._core.protocol.core import save_steps, task_steps
from holdfast._core.protocol.effects import (
    Claim,
    Context,
    Count,
    Delete,
    Do,
    Effect,
    Get,
    Late,
    Look,
    Pause,
    Put,
    Steps,
)
from holdfast._core.protocol.messages import Final, abandoned_by, to_message
from holdfast._core.protocol.phases import TASK_TRANSITIONS, TRANSITIONS
from holdfast._core.protocol.rendezvous import CallSignature, History, leave, meet
from holdfast._core.protocol.runner import GRACE, LAST_CALL, SUCCESS, UNSURE
from holdfast._core.roster.lost import Gone, Seen, judge
from holdfast._core.roster.neighbours import Watch
from holdfast._core.roster.presence import Vitals, at_key, gone_key
from holdfast._core.roster.process import Identity
from holdfast.errors import (
    CommitUnconfirmed,
    DeadlineExceeded,
    HoldfastError,
    RankFailed,
    RosterLost,
)
from tests.support.faults import Faults, draw_faults, draw_network
from tests.support.simulated_network import SimulatedRoster, network
from tests.support.simulated_work import SimulatedSave, SimulatedTask

SLACK = 2.0
"""Seconds past its deadline by which a live rank must have returned."""


class Board(dict[str, Any]):
    """The message store: wakes who waits for a key."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[str, list[Callable[[], None]]] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        for wake in self.waiting.pop(key, []):
            wake()

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]


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
    """How one call ended on one rank."""

    state: str
    """`committed`, `failed` or `unconfirmed`."""
    at: float
    due: float
    """Its deadline in the end."""
    error: HoldfastError | None = None
    own: bool = False
    """The error is one that only this rank can see."""


@dataclass
class PublishedIndex:
    """An index as the simulation's storage has it."""

    attempt: str
    versions: dict[int, int]
    """Of each rank whose files it names, the number of the call that wrote them."""
    since: float


@dataclass
class World:
    """One schedule: its ranks, its messages, its storage."""

    seed: int
    ranks: int
    timeout: float
    moves: bool
    """Does progress move the deadline?"""
    limits: Limits
    same_host: bool
    faults: Faults
    rng: random.Random
    calls: int = 1
    """How many calls each rank makes, one after the other."""
    copies: list[list[tuple[int, int, int]]] = field(default_factory=list)
    """What each rank of a save says of the ranks that hold the same."""
    turn: bool = False
    """Is it a turn (`task_steps`), and no save?"""
    durations: tuple[float, ...] = (0.0, 0.01, 0.5, 3.0)
    """Seconds that an action takes at most."""
    clock: SimulatedClock = field(default_factory=SimulatedClock)
    board: Board = field(default_factory=lambda: Board())
    deaf: float = 0.0
    """How often a rank that waits for a key is not woken by it."""
    durable: set[tuple[int, int]] = field(default_factory=set)
    """Rank and call of what was written, or, in a turn, done."""
    published: list[PublishedIndex] = field(default_factory=list)
    """Every index that was ever put in place; the last one is there now."""
    moved: set[str] = field(default_factory=set)
    """Attempts whose checkpoint is not in its place any more."""
    dead: set[int] = field(default_factory=set)
    watching: int = 0
    """The rank that looks at its neighbours now."""
    late: list[Late] = field(default_factory=list)
    """What was told of waits."""
    here: dict[int, _Rank] = field(default_factory=dict)
    outcomes: dict[tuple[int, int], Outcome] = field(default_factory=dict)
    """By rank and call."""
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

    # -- the network ----------------------------------------------------------------------

    def away_for(self, rank: int) -> float:
        """Seconds until a host that is cut off from all others can be reached again; 0 if it can."""
        start, length = self.faults.away.get(rank, (0.0, 0.0))
        return start + length - self.clock.time if start <= self.clock.time < start + length else 0.0

    def is_cut(self, way: tuple[int, int]) -> bool:
        start, length = self.faults.cut.get(way, (0.0, 0.0))
        return start <= self.clock.time < start + length

    def is_refusing(self, rank: int) -> bool:
        start, length = self.faults.refused.get(rank, (0.0, 0.0))
        return start <= self.clock.time < start + length

    def is_over(self) -> bool:
        """Have all ranks that live made all their calls, and is the network well again, and was for a while?"""
        well = self.clock.time > self.faults.silence_ends() + 8.0
        return well and all(one.is_done() or rank in self.dead for rank, one in self.here.items())

    @property
    def settled_at(self) -> float:
        """When every watch has seen all that it will ever see; without any fault of hosts it is not needed."""
        last = max((self.faults.silence_ends(), *self.faults.killed.values()))
        return last + self.limits.lost_after + 30.0 if last else 0.0

    def see(self, rank: int) -> Seen:
        """What ranks know of one."""
        seen = judge(self.board.get(at_key(rank)), self.board.get(gone_key(rank)))
        if self.same_host and rank in self.dead and seen.vitals is not None:
            return seen._replace(ended="its process has ended", there=False)
        return seen

    def kill(self, rank: int) -> None:
        """End a process. On one host a neighbour sees it, mostly, and tells all others."""
        self.dead.add(rank)
        if self.same_host and self.rng.random() < 0.7:
            self.after(self.rng.uniform(0.1, 2.0), lambda: self.witness(rank))

    def witness(self, gone: int) -> None:
        """What a watch on one host does, of which /proc tells."""
        neighbours = [one for one in self.here.values() if one.rank not in self.dead and not one.done]
        if neighbours and not self.lost(neighbours[0].rank):
            neighbours[0].on_gone(gone)

    def note(self, rank: int, text: str) -> None:
        self.trace.append(f"{self.clock.time:8.3f} rank {rank}: {text}")


class _Rank:
    """Makes one call after the other; its process can die, stop, or be stuck."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.call = -1
        self.done = True
        world.here[rank] = self
        self.history = History()
        self.written_at = 0.0
        """When the last message that it has put arrives: a connection keeps the order."""
        self.beats = 0
        self.error: HoldfastError | None = None
        self.attempt = ""
        self.who = Identity(rank, "h", rank + 1, token=str(rank))
        if not world.same_host:
            self.who = Identity(rank, "h", rank + 1, f"host {rank}", "1", str(rank), f"host {rank}", 1)
        self.watch = Watch(self.who, lambda address, port: None, lambda: None)
        self.watch.lost_after = world.limits.lost_after

    def is_done(self) -> bool:
        return self.done and (self.call + 1 >= self.world.calls or self.rank in self.world.faults.absent)

    def on_gone(self, gone: int, how: Gone | None = None) -> None:
        """What `operation.Operation` does."""
        context, board = self.context, self.world.board
        if gone != context.committer or not context.key or self.done or self.stopped_for():
            return
        error = RankFailed(f"{context.title} failed: rank {gone} has ended", rank=gone)
        standing = board.setdefault(context.outcome_key, abandoned_by(context.rank, error))
        if standing["state"] == "agreed":
            board.setdefault(context.final_key, to_message(Final(error.to_message())))
        for key in (context.answer_key, context.answered_key):
            board[key] = {}

    def enter(self) -> None:
        """Begin the next call, if there is one."""
        world = self.world
        if self.rank in world.dead or self.call + 1 >= world.calls:
            return
        self.call += 1
        self.done, self.error = False, None
        self.progress, self.others, self.doing = 0, 0, ""
        self.waiting_for: list[int] | None = None
        signature = CallSignature("save", "memory:x", {}, tuple(range(world.ranks)))
        self.context = Context(
            self.rank,
            tuple(range(world.ranks)),
            "",
            "save of x",
            Deadline(world.timeout, world.clock, moves=world.moves),
            world.limits,
            transitions=TASK_TRANSITIONS if world.turn else TRANSITIONS,
            on_phase=lambda phase: world.note(self.rank, f"-> {phase}"),
            on_wait=lambda ranks: setattr(self, "waiting_for", None if ranks is None else list(ranks)),
            on_progress=self.pass_on_progress,
            on_late=world.late.append,
            about=signature.about,
        )
        self.steps = self._whole(signature)
        call = self.call
        if world.same_host or call == 0:
            self.beat(call)
        self.watch.begin(call, self.context.participants, self.on_gone)
        world.after(world.timeout + GRACE, lambda: self.give_up(call))
        self.resume(call, lambda: self.steps.send(None))

    def _whole(self, signature: CallSignature) -> Steps:
        """A call as `protocol.runner.run` drives it."""
        context, world = self.context, self.world
        self.attempt = attempt = yield from meet(context, signature, self.history)
        try:
            if world.turn:
                yield from task_steps(context, SimulatedTask(world, self.rank, self.call))
            else:
                yield from save_steps(context, SimulatedSave(world, self.rank, self.call, attempt))
        except HoldfastError as error:
            self.error = error
            yield from self._leave(context)
            raise
        yield from self._leave(context)

    def _leave(self, context: Context) -> Steps:
        with contextlib.suppress(RosterLost):
            yield from leave(context, self.history)

    def pass_on_progress(self) -> None:
        self.others += 1

    def stopped_for(self) -> float:
        """Seconds until a stopped process runs again; 0 if it runs."""
        start, length = self.world.faults.stopped.get(self.rank, (0.0, 0.0))
        now = self.world.clock.time
        return start + length - now if start <= now < start + length else 0.0

    def beat(self, call: int) -> None:
        """The presence message, at its interval, while the process lives and runs."""
        world = self.world
        if self.rank in world.dead or world.lost(self.rank):
            return
        # Ranks of several hosts also speak between calls.
        if self.done or self.call != call if world.same_host else world.is_over():
            return
        if not self.stopped_for():
            self._speak()
            if not world.same_host and world.clock.time < world.settled_at:
                world.watching = self.rank
                self.watch.beat(SimulatedRoster(world, self.rank))
        world.after(min(1.0, (world.limits.stall_timeout or 5.0) / 5), lambda: self.beat(call))

    def _speak(self) -> None:
        world = self.world
        self.beats += 1
        if not self.done and self.doing == "write" and self.rank not in world.faults.stuck:
            self.progress += 1
            self.context.deadline.note_progress()
        part = {
            **self.context.about,
            "title": "save of x",
            "phase": self.context.phase,
            "waiting_for": self.waiting_for,
            "progress": self.progress,
            "others": self.others,
        }
        vitals = Vitals(
            self.who,
            {self.context.key: part} if self.context.key and not self.done else {},
            beat=self.beats,
            wall=world.clock.time,
            hears=self.watch.hears(),
        )
        message = msgspec.to_builtins(vitals)
        if not world.away_for(self.rank):
            world.after(
                world.rng.uniform(0.0, 0.05), lambda: world.board.__setitem__(at_key(self.rank), message)
            )

    def give_up(self, call: int) -> None:
        """What `protocol.runner.run` does when the worker does not come back by the deadline."""
        if self.done or self.call != call or self.rank in self.world.dead:
            return
        left = self.context.deadline.at + GRACE - self.world.clock.time
        pause = max(self.stopped_for(), left)
        if pause > 1e-9:
            # Woken from a stop, the runner lets its worker finish the rendezvous, which nothing cancels.
            more = 0.01 if self.context.key else LAST_CALL
            self.world.after(pause + more, lambda: self.give_up(call))
            return
        if self.context.phase in SUCCESS:
            self.finish("committed")
            return
        self.history.give_up(self.context.key)
        unsure = self.context.phase in UNSURE
        error = self.error or (CommitUnconfirmed("stuck") if unsure else DeadlineExceeded("stuck"))
        self.finish("unconfirmed" if unsure else "failed", error, own=unsure or self.error is None)

    def finish(self, state: str, error: HoldfastError | None = None, own: bool = False) -> None:
        """The call returns, and the next one begins: at once, mostly."""
        world = self.world
        if self.done:
            return
        self.done = True
        if not world.same_host:
            with contextlib.suppress(RosterLost):
                self.watch.meet(self.context.participants, SimulatedRoster(world, self.rank))
        self.watch.end(self.call)
        world.note(self.rank, f"call {self.call} returns {state} {error or ''}")
        due = self.context.deadline.at
        if state == "committed" and world.faults.moved:
            world.moved.add(self.attempt)
        world.outcomes[self.rank, self.call] = Outcome(state, world.clock.time, due, error, own)
        late = world.faults.late_call.get((self.rank, self.call + 1), 0.0)
        world.after(world.rng.choice([0.0, 0.0, 0.01, 0.3]) + late, self.enter)

    def resume(self, call: int, go: Callable[[], Effect]) -> None:
        """Run the generator to its next effect, and schedule that."""
        world = self.world
        if self.done or self.call != call or self.rank in world.dead:
            return
        pause = self.stopped_for()
        if pause:
            world.after(pause, lambda: self.resume(call, go))
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
            self.perform(call, effect)

    def answer(self, call: int, seconds: float, make: Callable[[], Any]) -> None:
        """Compute a result at its time and send it in, or throw what it raises."""

        def at_its_time() -> None:
            if self.done or self.call != call or self.rank in self.world.dead:
                return
            pause = self.stopped_for()
            if pause:
                self.world.after(pause, at_its_time)
                return
            try:
                value = make()
            except HoldfastError as raised:
                error = raised
                self.resume(call, lambda: self.steps.throw(error))
            else:
                self.resume(call, lambda: self.steps.send(value))

        self.world.after(seconds, at_its_time)

    def over_roster(self, call: int, make: Callable[[], Any]) -> None:
        """A question to the message store: it comes after what this rank has put there before."""

        def ask() -> Any:
            if self.world.lost(self.rank):
                raise RosterLost("The message store can't be reached.")
            return make()

        delay = max(self.world.rng.uniform(0.0, 0.03), self.written_at - self.world.clock.time)
        delay += self.world.away_for(self.rank)  # TCP sends it again, until it arrives
        self.answer(call, delay, ask)

    def put(self, key: str, message: Message) -> None:
        """Applied some time later: a TCPStore client buffers, and a dying sender takes it along."""
        world = self.world

        def apply() -> None:
            if not world.lost(self.rank) and (self.rank not in world.dead or world.rng.random() < 0.5):
                world.board[key] = message

        delay = world.rng.choice([0.0, 0.01, 0.2]) * world.rng.random() + world.away_for(self.rank)
        self.written_at = max(self.written_at, world.clock.time + delay)
        world.after(self.written_at - world.clock.time, apply)

    def count(self, key: str) -> int:
        self.world.board[key] = self.world.board.get(key, 0) + 1
        return int(self.world.board[key])

    def pause(self, call: int, key: str, seconds: float) -> None:
        """Wait for a key: the server wakes this rank, or its time ends."""
        world, woken = self.world, False

        def wake() -> None:
            nonlocal woken
            if not woken and world.rng.random() >= world.deaf:
                woken = True
                self.answer(call, world.rng.uniform(0.0, 0.03) + world.away_for(self.rank), lambda: True)

        def end() -> None:
            nonlocal woken
            if not woken:
                woken = True
                self.answer(call, 0.0, lambda: False)

        if key in world.board:
            wake()
        else:
            world.board.waiting.setdefault(key, []).append(wake)
        world.after(seconds, end)

    def perform(self, call: int, effect: Effect) -> None:
        world, rng = self.world, self.world.rng
        match effect:
            case Put(key, message):
                self.put(key, message)
                self.answer(call, rng.uniform(0.0, 0.03), self._reach)
            case Get(keys):
                self.over_roster(call, lambda: [world.board.get(key) for key in keys])
            case Claim(key, message):
                self.over_roster(call, lambda: world.board.setdefault(key, message))
            case Count(key):
                self.over_roster(call, lambda: self.count(key))
            case Delete(keys):
                self.over_roster(call, lambda: [world.board.pop(key, None) for key in keys] and None)
            case Pause(key, seconds):
                self.pause(call, key, seconds)
            case Look(ranks):
                self.over_roster(call, lambda: {rank: world.see(rank) for rank in ranks})
            case Do(name, action):
                self.doing = name
                if world.faults.stuck.get(self.rank) == name:
                    world.note(self.rank, f"stuck in {name}")
                    return
                seconds = 0.1 if name in ("look", "rest") else rng.choice(world.durations) * rng.random()
                if name == "write":
                    seconds += world.faults.slow_write.get(self.rank, 0.0)

                def act() -> Any:
                    self.doing = ""
                    return action()

                self.answer(call, seconds, act)

    def _reach(self) -> None:
        if self.world.lost(self.rank):
            raise RosterLost("The message store can't be reached.")


def simulate(seed: int, max_ranks: int = 16, turn: bool = False, calls: int = 1) -> World:
    """One schedule, run to its end: of a save, of several, or of a turn."""
    return run_world(draw_world(seed, max_ranks, turn, calls))


def draw_world(seed: int, max_ranks: int = 16, turn: bool = False, calls: int = 1) -> World:
    rng = random.Random(seed)
    ranks = rng.choice([2, 2, 3, 3, 4, 5, 8, max_ranks])
    stall = rng.choice([None, None, 2.0, 5.0, 30.0])
    world = World(
        seed,
        ranks,
        timeout=rng.choice([4.0, 10.0, 20.0, 60.0, 600.0]),
        moves=rng.random() < 0.5,
        limits=Limits(
            stall_timeout=stall,
            report_after=rng.choice([1.0, 30.0]),
            lost_after=rng.choice([5.0, 20.0]),
        ),
        same_host=rng.random() < 0.5,
        faults=draw_faults(rng, ranks, calls),
        rng=rng,
        calls=calls,
        turn=turn,
    )
    world.deaf = rng.choice([0.0, 0.0, 0.3])
    if not world.same_host:
        # Of several calls, a thread that was left behind in one of them is not simulated.
        draw_network(rng, ranks, world.faults, world.timeout - 8.0 if calls > 1 else 1e9)
    if calls > 1 and world.faults.only_failures():  # time enough for every call that is well
        world.timeout, world.limits, world.durations = 20.0, Limits(), (0.0, 0.01, 0.3)
    return world


def run_world(world: World) -> World:
    """Run a schedule to its end."""
    for number in range(world.ranks):
        rank = _Rank(world, number)
        if number not in world.faults.absent:
            world.after(world.rng.random() * 0.3 + world.faults.late.get(number, 0.0), rank.enter)
        if number in world.faults.killed:
            world.after(world.faults.killed[number], lambda number=number: world.kill(number))
    with network(world):
        world.run()
    return world


def check(world: World) -> list[str]:
    """The invariants that the schedule broke; none, one hopes."""
    everyone = set(range(world.ranks))
    wrong = []
    for index in world.published:
        if set(index.versions) != everyone or not set(index.versions.items()) <= world.durable:
            wrong.append("1: the index exists, but not every byte that it should name is durable")
        if len(set(index.versions.values())) > 1:
            wrong.append(f"1: the index holds states of different calls: {index.versions}")
    for call in range(world.calls):
        wrong += _check_call(world, call)
    if world.calls > 1 and world.faults.only_failures():
        wrong += _check_progress(world)
    if world.limits.stall_timeout is None and world.faults.harmless_within(
        world.timeout - 25.0, world.limits.lost_after
    ):
        wrong += [
            f"8: rank {rank} {outcome.state}, though every rank lives and comes in time: {outcome.error}"
            for (rank, _), outcome in world.outcomes.items()
            if outcome.state != "committed"
        ]
    wrong += [
        f"9: rank {rank} counts as gone, and lives: {world.see(rank).ended}"
        for rank in world.here
        if rank not in world.dead and not world.lost(rank) and world.see(rank).ended
    ]
    return wrong


def _check_call(world: World, call: int) -> list[str]:
    wrong = []
    everyone = set(range(world.ranks))
    ended = {rank: outcome for (rank, number), outcome in world.outcomes.items() if number == call}
    live = {rank: outcome for rank, outcome in ended.items() if rank not in world.dead}
    index = next((one for one in world.published if set(one.versions.values()) == {call}), None)
    for rank, outcome in ended.items():
        if world.turn:
            if outcome.state == "committed" and not {(other, call) for other in everyone} <= world.durable:
                wrong.append(f"2: rank {rank} reports success, but not all ranks have acted")
            continue
        if outcome.state == "committed" and (index is None or outcome.at < index.since):
            wrong.append(f"2: rank {rank} reports success of call {call}, but there is no index of it")
        if outcome.state == "failed" and index is not None:
            wrong.append(f"4: rank {rank} reports failure of call {call}, but its index exists")
    expected = everyone - world.faults.absent - world.dead
    for rank in expected:
        if rank not in live:
            wrong.append(f"3: rank {rank} never returned from call {call}")
            continue
        start, length = world.faults.stopped.get(rank, (0.0, 0.0))
        limit = max(live[rank].due, start + length if length else 0.0) + SLACK
        if live[rank].at > limit:
            wrong.append(f"3: rank {rank} returned {live[rank].at - limit:.2f} s too late from call {call}")
    # In a turn nothing lasts that a rank without the message store could look at: it knows of its own loss
    # only.
    states = {outcome.state for outcome in ended.values() if not (world.turn and outcome.own)}
    if {"committed", "failed"} <= states:
        wrong.append(f"4: some ranks report success of call {call}, others failure")
    told = {
        (type(outcome.error).__name__, outcome.error.message)
        for outcome in live.values()
        if outcome.state == "failed" and outcome.error is not None and not outcome.own
    }
    if len(told) > 1:
        wrong.append(f"5: ranks raise different errors of call {call}: {sorted(told)}")
    return wrong


def _check_progress(world: World) -> list[str]:
    """Every call that fails on no rank is committed, and leaves nothing."""
    failing = {call for _, call in world.faults.fails_at}
    wrong = [
        f"6: call {call} of rank {rank} {outcome.state}, though nothing was wrong with it"
        for (rank, call), outcome in world.outcomes.items()
        if call not in failing and outcome.state != "committed"
    ]
    left = [key for key in world.board if not key.startswith(("at/", "life/"))]
    return wrong + ([f"7: {len(left)} keys are left, such as {left[0]!r}"] if left else [])
