"""What is known of the ranks of a job: one model for all that readers find, and for what the rules judge.

All values are frozen, and each says where it was read. `Evidence` also says what is not known: rules may
conclude from an absence only where the evidence is complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from holdfast._watch.names import family


class Source(NamedTuple):
    """Where something was read."""

    file: str
    line: int = 0
    """0: the file as a whole."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


ROLL_CALL = Source("roll call")
"""What a rank has answered itself."""


class Call(NamedTuple):
    """One call of a stack, and the line that it is at."""

    function: str
    file: str
    line: int | None = None

    def __str__(self) -> str:
        name = "/".join(self.file.split("/")[-3:])
        return f"{self.function} ({name}:{self.line})" if self.line else f"{self.function} ({name})"


OPERATION = "holdfast-operation"
"""The thread that does what the main thread has called for (`protocol.runner`)."""
AT_EXIT = Call("_run_exitfuncs", "atexit")
"""The outermost call of a main thread that runs `atexit` handlers. It is in C, so `own_stacks` adds it."""
_LIBRARY = re.compile(
    r"^atexit$|/holdfast/_\w+/|"
    r"/torch/|^torch/|/ray/|^ray/|threading\.py|queue\.py|concurrent/|^lib\w*\.so|\.so(?:\.|$)|(?:^|/)multiprocessing/"
)


def is_of_a_library(call: Call) -> bool:
    """Return whether a call is of torch, the launcher or Python's threads, and not of the program."""
    return _LIBRARY.search(call.file) is not None


class Stack(msgspec.Struct, frozen=True):
    """One thread at one time."""

    thread: str
    calls: tuple[Call, ...]
    """Innermost first."""
    source: Source
    names: dict[str, str] = {}
    """Arguments that are known: `group_name` and `members` of a group that opens, and `peer`, the rank that a
    `recv` or `send` waits for, or that a broadcast comes from."""
    ident: str = ""
    """What identifies the thread in a flight record of this process."""


UNKNOWN = -1
"""The number of an operation whose line has none: torch before 1.13 told its tensors instead."""


class Operation(msgspec.Struct, frozen=True):
    """One collective that a rank has begun."""

    group: str
    """Identifies the group on all ranks; "" if that isn't known."""
    number: int
    """Its sequence number in the group."""
    name: str
    """As it was read: ALLREDUCE in a log, all_reduce in a record."""
    state: str
    """`scheduled`, `started`, `completed`, or `timed out`. Of `scheduled` only NCCL's says that it has not
    started: others do not record the start."""
    source: Source
    sizes: tuple[int, ...] = ()
    """Numbers of elements in and out, as far as they are known."""
    types: str = ""
    seconds: float | None = None
    """How long it has run."""
    group_rank: int | None = None
    """The rank in the group, where a line tells it."""
    calls: tuple[Call, ...] = ()
    """Where it was begun, innermost first."""
    thread: str = ""
    """What identifies the thread that has begun it; "" of those of the backward pass."""
    backend: str = ""
    limit: float | None = None
    """Its timeout, in seconds."""

    @property
    def is_pending(self) -> bool:
        return self.state != "completed"

    @property
    def label(self) -> str:
        return self.name if self.number == UNKNOWN else f"{self.name} #{self.number}"

    @property
    def kind(self) -> str:
        """What it is, in torch's words, however the name was written."""
        return family(self.name)


class Progress(msgspec.Struct, frozen=True):
    """How far a rank is in one group."""

    group: str
    enqueued: int
    completed: int
    source: Source


class Ending(msgspec.Struct, frozen=True):
    """How a rank has ended, or what it has raised."""

    what: str
    source: Source
    is_clean: bool = False
    """Did it end by itself, with exit code 0?"""
    is_cause: bool = True
    """False: the usual end of a rank whose peer is gone, or that a watchdog or a launcher has ended."""
    is_fatal: bool = True
    """Is it known that nobody has caught it?"""
    call: Call | None = None
    """Where it was raised."""


CUT_OFF = "its host does not answer"
"""The state of a rank whose host could be reached before."""


class Rank(msgspec.Struct, frozen=True):
    """One rank: what it does, as far as it was seen."""

    rank: int
    operations: tuple[Operation, ...] = ()
    progress: tuple[Progress, ...] = ()
    endings: tuple[Ending, ...] = ()
    stacks: tuple[Stack, ...] = ()
    """All threads, the main thread first."""
    later: tuple[Stack, ...] = ()
    """The same, some seconds later."""
    busy: float | None = None
    """The part of the time between the two looks in which it, and its children, used the CPU."""
    moved: int = 0
    """The bytes that it has moved between the two looks, in files and over connections."""
    starved: float = 0.0
    """The part of the time between the two looks in which its cgroup, or its machine, has waited for
    memory."""
    state: str = ""
    """What the kernel shows of it, such as `stopped by a signal`."""
    phase: str = ""
    last: Source | None = None
    """The last line of it that was read."""

    @property
    def timeouts(self) -> tuple[Operation, ...]:
        return tuple(operation for operation in self.operations if operation.state == "timed out")


class Remark(msgspec.Struct, frozen=True):
    """A line whose meaning does not depend on a rank."""

    kind: str
    text: str
    source: Source
    values: tuple[str, ...] = ()


class Opening(msgspec.Struct, frozen=True):
    """A communicator that began to open and is not open on all of these ranks, by NCCL's own lines."""

    name: str
    size: int
    begun: dict[int, Source]
    """Where that stands, of each rank."""
    ready: set[int]


class Evidence(msgspec.Struct, frozen=True):
    """All that is known of one job."""

    ranks: dict[int, Rank] = {}
    remarks: tuple[Remark, ...] = ()
    world_size: int | None = None
    members: dict[str, tuple[int, ...]] = {}
    """Of groups whose ranks are known."""
    hidden: int = 0
    """Lines that Ray has left out ("repeated 14x across cluster")."""
    loose: tuple[Operation, ...] = ()
    """Timeouts of lines that do not tell the global rank."""
    raised: tuple[Ending, ...] = ()
    """What was raised by nobody knows which rank."""
    opening: tuple[Opening, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Has every rank been heard of?"""
        known = self.world_size is not None and not self.hidden
        return known and len(self.ranks) == self.world_size

    @property
    def backends(self) -> set[str]:
        """The backends that operations were seen of; empty if none tells its own."""
        told = {remark.values[0] for remark in self.of("backend")}
        return ({one.backend for _, one in self.operations()} | told) - {""}

    def of(self, kind: str) -> list[Remark]:
        return [remark for remark in self.remarks if remark.kind == kind]

    def operations(self) -> Iterator[tuple[int, Operation]]:
        return ((rank.rank, one) for rank in self.ranks.values() for one in rank.operations)

    def progress(self) -> Iterator[tuple[int, Progress]]:
        return ((rank.rank, one) for rank in self.ranks.values() for one in rank.progress)

    def endings(self) -> Iterator[tuple[int, Ending]]:
        return ((rank.rank, one) for rank in self.ranks.values() for one in rank.endings)

    def timeouts(self) -> Iterator[tuple[int, Operation]]:
        return ((rank, one) for rank, one in self.operations() if one.state == "timed out")

    def first_timeouts(self) -> dict[str, int]:
        """Return the line of the first timeout of each file that has one."""
        found: dict[str, int] = {}
        for one in (*(one for _, one in self.timeouts()), *self.loose):
            found[one.source.file] = min(one.source.line, found.get(one.source.file, one.source.line))
        return found

    def shown(self) -> dict[int, Stack]:
        """Return the main thread of each rank whose stacks are known."""
        return {rank.rank: rank.stacks[0] for rank in self.ranks.values() if rank.stacks}
