"""All interleavings of several processes that share a message store and a bucket: explicit-state model checking of
the real code.

A process is an ordinary function that calls `ask` wherever it touches something shared. It is no copy of the code
and no generator: it is stopped at its first request without an answer, and, once there is one, called anew with
all answers so far. So what it does next is a function of its answers alone, which `Explorer` keeps in a tree: the
code runs once for each history of answers, and states are compared by these histories. A `World` says which answers
a request can get, and what each does to what is shared.

Every state is visited that the reduction below leaves, and `check` holds each against the properties. The search
ends, since faults and waits that end by their time are counted, and no process asks without end.

**Reduction.** A process at a request that nobody else can notice (`Alternatives.private`) is explored alone. If all
processes of a group (a job) that can go on are at requests that no other group can notice (`Alternatives.shared` is
false), only their transitions are explored. In both cases the transitions left out commute with the chosen ones, and
one of the chosen ones is no fault. The number of faults is no obstacle: two orders of the same transitions have the
same faults.
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Generic, NamedTuple, TypeVar

import pytest

_ANNOTATIONS = __future__.annotations.compiler_flag
Shared = TypeVar("Shared", bound=Hashable)


class Stopped(BaseException):
    """Ends a process at its first request without an answer."""


class Script:
    """What one process was answered so far. It has its own clock, which only answers and sleeps move."""

    def __init__(self, process: int, answers: Sequence[Hashable]) -> None:
        self.process, self._answers, self._at = process, answers, 0
        self.request: Hashable = None
        """The first request without an answer."""
        self.seconds = 0.0
        self.drawn = 0
        """How many random values it has drawn, which are functions of this number."""

    def ask(self, request: Hashable) -> Hashable:
        if self.request is None and self._at < len(self._answers):
            self._at += 1
            return self._answers[self._at - 1]
        if self.request is None:
            self.request = request
        raise Stopped  # also on the way out, where `finally` may ask more


@dataclass(eq=False)
class Node:
    """A process after a history of answers: at a request, or at its end."""

    parent: Node | None
    answer: Hashable
    request: Hashable = None
    result: Hashable = None
    seconds: float = 0.0
    """What its clock shows."""
    next: dict[Hashable, Node] = field(default_factory=dict)

    def answers(self) -> list[Hashable]:
        found, node = [], self
        while node.parent is not None:
            found.append(node.answer)
            node = node.parent
        return found[::-1]

    def path(self) -> Iterator[Node]:
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


class Step(NamedTuple, Generic[Shared]):
    """One answer to a request, what is shared after it, and how many faults and time-outs it takes."""

    answer: Hashable
    shared: Shared
    faults: int = 0
    hurries: int = 0


class Alternatives(NamedTuple, Generic[Shared]):
    """All answers that a request can get now; none if it waits."""

    steps: Sequence[Step[Shared]]
    shared: bool
    """Can another group notice the request, or change its answer?"""
    private: bool = False
    """Can nobody but this process?"""


class State(NamedTuple, Generic[Shared]):
    nodes: tuple[Node, ...]
    dead: frozenset[int]
    shared: Shared
    faults: int
    hurries: int


class World(Generic[Shared]):
    """What processes share. Subclassed by each system that is explored."""

    processes: Sequence[Callable[[Script], Hashable]]
    """Each returns its result, and raises nothing but `Stopped`."""
    groups: Sequence[int]
    """The group of each process."""
    faults: int = 0
    hurries: int = 0
    """How many waits may end by their time before they must."""
    kills: int = 0

    def begin(self) -> Shared:
        raise NotImplementedError

    def alternatives(self, process: int, request: Hashable, state: State[Shared]) -> Alternatives[Shared]:
        raise NotImplementedError

    def of_nobody(self, shared: Shared) -> Sequence[tuple[str, Shared]]:
        """Return what can happen without any process: requests of processes that are given up arrive."""
        return ()

    def overdue(self, process: int, request: Hashable, state: State[Shared]) -> Step[Shared] | None:
        """Return how a wait ends if its group can't go on otherwise; None if the request is no wait."""
        return None

    def check(self, state: State[Shared], is_over: bool) -> str:
        """Return what is wrong with a state; "" if nothing is. is_over: no process goes on."""
        return ""


class Explored(NamedTuple):
    states: int
    transitions: int
    histories: int
    """How many histories of answers there are, each of which has run the code once."""
    ends: dict[Hashable, int]
    """How often each set of results was reached."""
    over: list[State[Hashable]]
    """Where no process goes on, and nothing is under way."""
    wrong: str
    """The first broken property, with the way there; "" if none is broken."""


class Explorer(Generic[Shared]):
    def __init__(self, world: World[Shared], most: int = 5_000_000, reduces: bool = True) -> None:
        self.world, self._most, self._reduces = world, most, reduces
        self._histories = 0

    def _node(self, process: int, parent: Node | None, answer: Hashable) -> Node:
        if parent is not None and answer in parent.next:
            return parent.next[answer]
        self._histories += 1
        node = Node(parent, answer)
        script = Script(process, node.answers())
        try:
            node.result = self.world.processes[process](script)
            assert node.result is not None
            assert script.request is None, "it has caught `Stopped`"
        except Stopped:
            node.request = script.request
        node.seconds = script.seconds
        if parent is not None:
            parent.next[answer] = node
        return node

    def run(self) -> Explored:
        world = self.world
        nodes = tuple(self._node(process, None, None) for process in range(len(world.processes)))
        first = State(nodes, frozenset[int](), world.begin(), 0, 0)
        came: dict[State[Shared], tuple[State[Shared], str] | None] = {first: None}
        ends: dict[Hashable, int] = {}
        over: list[State[Hashable]] = []
        stack, transitions, wrong = [first], 0, ""
        while stack:
            state = stack.pop()
            moves = self._moves(state)
            running = any(node.result is None for node, alive in self._alive(state) if alive)
            wrong = world.check(state, not running)
            if not wrong and running and not any(process >= 0 for process, _, _ in moves):
                wrong = "no process can go on"
            if wrong:
                wrong += "\n" + self._way(came, state)
                break
            if not running:
                results = tuple(node.result for node in state.nodes)
                ends[results] = ends.get(results, 0) + 1
                over += [] if moves else [state]
            for process, what, after in moves:
                transitions += 1
                if after not in came:
                    came[after] = state, f"process {process}: {what}" if process >= 0 else what
                    stack.append(after)
            assert len(came) <= self._most, f"more than {self._most} states"
        return Explored(len(came), transitions, self._histories, ends, over, wrong)

    def _alive(self, state: State[Shared]) -> list[tuple[Node, bool]]:
        return [(node, process not in state.dead) for process, node in enumerate(state.nodes)]

    def _moves(self, state: State[Shared]) -> list[tuple[int, str, State[Shared]]]:
        world, found = self.world, dict[int, Alternatives[Shared]]()
        for process, node in enumerate(state.nodes):
            if node.result is None and process not in state.dead:
                found[process] = self._affordable(world.alternatives(process, node.request, state), state)
        groups: dict[int, list[int]] = {}
        for process in found:
            groups.setdefault(world.groups[process], []).append(process)
        chosen = [process for process, asked in found.items() if asked.steps and asked.private][:1]
        chosen = chosen if self._reduces else []
        for members in groups.values():
            able = any(found[process].steps for process in members)
            if (
                self._reduces
                and not chosen
                and able
                and not any(found[process].shared for process in members)
            ):
                chosen = members
        alone = bool(chosen)
        chosen = chosen or list(found)
        moves = [
            (process, self._text(state, process, step), self._after(state, process, step))
            for process in chosen
            for step in found[process].steps
        ]
        for members in groups.values():
            # A wait ends by its time at the latest when nothing else can end it.
            if not any(found[process].steps for process in members) and (not alone or members[0] in chosen):
                late = [
                    (process, world.overdue(process, state.nodes[process].request, state))
                    for process in members
                ]
                moves += [
                    (process, self._text(state, process, step), self._after(state, process, step))
                    for process, step in late
                    if step is not None
                ]
        if len(state.dead) < world.kills:
            moves += [
                (process, "is killed", state._replace(dead=state.dead | {process})) for process in chosen
            ]
        if not alone:
            moves += [
                (-1, what, state._replace(shared=after)) for what, after in world.of_nobody(state.shared)
            ]
        return moves

    def _affordable(self, asked: Alternatives[Shared], state: State[Shared]) -> Alternatives[Shared]:
        faults, hurries = self.world.faults - state.faults, self.world.hurries - state.hurries
        return asked._replace(
            steps=[step for step in asked.steps if step.faults <= faults and step.hurries <= hurries]
        )

    def _after(self, state: State[Shared], process: int, step: Step[Shared]) -> State[Shared]:
        faults, hurries = state.faults + step.faults, state.hurries + step.hurries
        node = self._node(process, state.nodes[process], step.answer)
        nodes = (*state.nodes[:process], node, *state.nodes[process + 1 :])
        return State(nodes, state.dead, step.shared, faults, hurries)

    def _text(self, state: State[Shared], process: int, step: Step[Shared]) -> str:
        return f"{_short(state.nodes[process].request)} -> {_short(step.answer)}"

    def _way(self, came: dict[State[Shared], tuple[State[Shared], str] | None], state: State[Shared]) -> str:
        lines: list[str] = []
        at: State[Shared] | None = state
        while at is not None and (before := came[at]) is not None:
            at = before[0]
            lines.append(before[1])
        ends = [f"process {process} ends: {_short(node.result)}" for process, node in enumerate(state.nodes)]
        return "\n".join([*lines[::-1], *ends])


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 160 else f"{text[:120]}...{text[-30:]}"


def mutate(patch: pytest.MonkeyPatch, owner: Any, name: str, *changes: str) -> None:
    """Replace pieces of the source of a function. changes: each piece, and what comes in its place."""
    function = getattr(owner, name)
    assert isinstance(function, FunctionType)
    source = textwrap.dedent(inspect.getsource(function))
    for before, after in zip(changes[::2], changes[1::2], strict=True):
        assert source.count(before) == 1, f"the source of {name} has changed"
        source = source.replace(before, after)
    made: dict[str, Any] = {}
    exec(compile(source, "mutant", "exec", _ANNOTATIONS), function.__globals__, made)
    patch.setattr(owner, name, made[name])
