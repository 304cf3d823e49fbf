"""The data model of evidence about the ranks of a job: written by the readers, used by the rules.

All values are frozen, and carry their source. `Evidence` also records what is unknown: a rule may draw a
conclusion from an absence only if the evidence is complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from holdfast._watch.names import family


class SourceLine(NamedTuple):
    """The file and line from which a value was read."""

    file: str
    line: int = 0
    """0: the file as a whole."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


ROLL_CALL = SourceLine("roll call")
OURS = "holdfast "
"""Begins the group of a call of Holdfast (`own_stacks`)."""
"""The source of a rank's own answer."""


class Frame(NamedTuple):
    """One frame of a stack, with its current line."""

    function: str
    file: str
    line: int | None = None

    def __str__(self) -> str:
        name = "/".join(self.file.split("/")[-3:])
        return f"{self.function} ({name}:{self.line})" if self.line else f"{self.function} ({name})"


OPERATION = "holdfast-operation"
"""Name of the thread that runs an operation for the main thread (`protocol.runner`)."""
AT_EXIT = Frame("_run_exitfuncs", "atexit")
"""The outermost call of a main thread that runs `atexit` handlers. It is in C, so `own_stacks` adds it."""
_LIBRARY = re.compile(
    r"^atexit$|/holdfast/_\w+/|"
    r"/torch/|^torch/|/ray/|^ray/|threading\.py|queue\.py|concurrent/|^lib\w*\.so|\.so(?:\.|$)|(?:^|/)multiprocessing/"
)


def is_of_a_library(call: Frame) -> bool:
    """Return whether a call is in torch, the launcher or Python's threads, rather than in the program."""
    return _LIBRARY.search(call.file) is not None


class Stack(msgspec.Struct, frozen=True):
    """The stack of one thread at one time."""

    thread: str
    calls: tuple[Frame, ...]
    """Innermost first."""
    source: SourceLine
    names: dict[str, str] = {}
    """Known arguments: `group_name` and `members` of a group being opened; the group that a function of
    torch.distributed is `in`, as records name it; and `peer`, the peer of a `recv` or `send`, or the source
    of a broadcast. Of a `recv` or `send` also its `tag`, the group that it is `of`, and the number of the
    `message` in its process. Of a line of the program, the method that it `calls`, and `on` what, if known: a
    `handle` of torch, a `store`, or `other`; of a handle, the operation (`handle`) and a number (`message`);
    of a `sleep`, what the loop around it `polls`. The ident of the thread that it `joins`."""
    ident: str = ""
    """The thread's ID, as in the flight record of its process."""


UNKNOWN = -1
"""Sequence number of an operation whose line has none: torch before 1.13 logged its tensors instead."""


class GroupOperation(msgspec.Struct, frozen=True):
    """One collective issued by a rank."""

    group: str
    """The group's name, the same on all ranks; "" if unknown."""
    number: int
    """Its sequence number in the group."""
    name: str
    """The name as read: ALLREDUCE in a log, all_reduce in a record."""
    state: str
    """`scheduled`, `started`, `completed`, or `timed out`. Only with NCCL does `scheduled` mean that it has
    not started: other backends do not record the start."""
    source: SourceLine
    sizes: tuple[int, ...] = ()
    """Numbers of input and output elements, if known."""
    types: str = ""
    seconds: float | None = None
    """How long it has been pending."""
    group_rank: int | None = None
    """The rank within the group, if the line has it."""
    calls: tuple[Frame, ...] = ()
    """The stack that issued it, innermost first."""
    thread: str = ""
    """ID of the thread that issued it; "" for threads of autograd."""
    backend: str = ""
    limit: float | None = None
    """Its timeout, in seconds."""

    @property
    def is_pending(self) -> bool:
        return self.state != "completed"

    @property
    def is_ours(self) -> bool:
        """Whether it is a call of Holdfast, whose name says all."""
        return self.group.startswith(OURS)

    @property
    def label(self) -> str:
        return self.name if self.number == UNKNOWN or self.is_ours else f"{self.name} #{self.number}"

    @property
    def kind(self) -> str:
        """The normalized operation name (`names.family`)."""
        return family(self.name)


class GroupProgress(msgspec.Struct, frozen=True):
    """The progress of a rank in one group."""

    group: str
    enqueued: int
    completed: int
    source: SourceLine


class Ending(msgspec.Struct, frozen=True):
    """The end of a rank, or an error that it raised."""

    what: str
    source: SourceLine
    is_clean: bool = False
    """Did it end by itself, with exit code 0?"""
    is_cause: bool = True
    """False: a consequence, such as a lost peer, or termination by a watchdog or launcher."""
    is_fatal: bool = True
    """Is the error known to be uncaught?"""
    call: Frame | None = None
    """Where it was raised."""


GLOO_TIMEOUT = re.compile(r"Timed out waiting \d+ms for (?:recv|send) operation to complete")
"""The error of a rank whose peer has not come in time."""
CUT_OFF = "its host does not answer"
"""The state of a rank whose host was reachable before, and is no longer."""


class Rank(msgspec.Struct, frozen=True):
    """The evidence about one rank."""

    rank: int
    operations: tuple[GroupOperation, ...] = ()
    progress: tuple[GroupProgress, ...] = ()
    endings: tuple[Ending, ...] = ()
    stacks: tuple[Stack, ...] = ()
    """All threads, the main thread first."""
    later: tuple[Stack, ...] = ()
    """The second sample, some seconds later."""
    busy: float | None = None
    """CPU use of the process and its children between the two samples (1.0: one core)."""
    moved: int = 0
    """Bytes transferred between the two samples, through files and sockets."""
    starved: float = 0.0
    """The share of the time between the two samples in which its cgroup, or its host, was stalled on
    memory."""
    state: str = ""
    """The process state by the kernel, such as `stopped by a signal`."""
    phase: str = ""
    last: SourceLine | None = None
    """The last line read from this rank."""

    @property
    def timeouts(self) -> tuple[GroupOperation, ...]:
        return tuple(operation for operation in self.operations if operation.state == "timed out")


class Remark(msgspec.Struct, frozen=True):
    """A line that is not bound to a rank."""

    kind: str
    text: str
    source: SourceLine
    values: tuple[str, ...] = ()


class Opening(msgspec.Struct, frozen=True):
    """A communicator that is not open yet on all ranks that began to open it, by NCCL's log lines."""

    name: str
    size: int
    begun: dict[int, SourceLine]
    """The source of the line that says so, by rank."""
    ready: set[int]


class OwnVerdict(msgspec.Struct, frozen=True):
    """What Holdfast itself has proven about a wait, and written to a log (`own_words`)."""

    summary: str
    """Which ranks wait for which; "" if it names none."""
    absent: tuple[int, ...]
    """The ranks that others wait for."""
    waiting: tuple[int, ...] = ()
    is_whole: bool = True
    """Does the line list all of the absent ranks?"""
    is_wait: bool = False
    """Is it about a single wait, rather than the result of a roll call?"""
    facts: tuple[tuple[tuple[int, ...], str], ...] = ()
    """Facts about absent ranks."""
    cause: tuple[str, str] | None = None
    """A proven cause: its kind, and what it says."""
    lines: tuple[tuple[str, SourceLine], ...] = ()
    folder: str = ""
    """Where the answers of all ranks are."""
    heard_of: tuple[int, ...] = ()
    """The ranks that have answered a roll call."""
    may_be_over: bool = False
    """Has the wait ended, and is it not known whether by its timeout?"""


class Evidence(msgspec.Struct, frozen=True):
    """All evidence about one job."""

    ranks: dict[int, Rank] = {}
    remarks: tuple[Remark, ...] = ()
    world_size: int | None = None
    members: dict[str, tuple[int, ...]] = {}
    """The ranks of each group, if known."""
    hidden: int = 0
    """Number of lines suppressed by Ray ("repeated 14x across cluster")."""
    loose: tuple[GroupOperation, ...] = ()
    """Timeouts whose global rank is unknown."""
    raised: tuple[Ending, ...] = ()
    """Errors whose rank is unknown."""
    opening: tuple[Opening, ...] = ()
    own: OwnVerdict | None = None
    """The latest verdict of Holdfast in a log."""

    @property
    def is_complete(self) -> bool:
        """Is there evidence about every rank?"""
        known = self.world_size is not None and not self.hidden
        return known and len(self.ranks) == self.world_size

    @property
    def backends(self) -> set[str]:
        """The backends of the operations; empty if no evidence names one."""
        told = {remark.values[0] for remark in self.of("backend")}
        return ({one.backend for _, one in self.operations()} | told) - {""}

    def of(self, kind: str) -> list[Remark]:
        return [remark for remark in self.remarks if remark.kind == kind]

    def operations(self) -> Iterator[tuple[int, GroupOperation]]:
        return ((rank.rank, one) for rank in self.ranks.values() for one in rank.operations)

    def progress(self) -> Iterator[tuple[int, GroupProgress]]:
        return ((rank.rank, one) for rank in self.ranks.values() for one in rank.progress)

    def endings(self) -> Iterator[tuple[int, Ending]]:
        return ((rank.rank, one) for rank in self.ranks.values() for one in rank.endings)

    def timeouts(self) -> Iterator[tuple[int, GroupOperation]]:
        return ((rank, one) for rank, one in self.operations() if one.state == "timed out")

    def first_timeouts(self) -> dict[str, int]:
        """Return the line number of the first timeout in each file that has one."""
        found: dict[str, int] = {}
        of_gloo = (one for _, one in self.endings() if one.is_fatal and GLOO_TIMEOUT.search(one.what))
        sources = [one.source for one in (*(one for _, one in self.timeouts()), *self.loose)]
        for file, line in (*sources, *(one.source for one in of_gloo)):
            found[file] = min(line, found.get(file, line))
        return found

    def latest_own(self) -> OwnVerdict | None:
        """Return the latest verdict of Holdfast. If its wait may be over, and no timeout shows that it has
        failed, it names no rank and no cause."""
        own = self.own
        endings = (*(one for rank, one in self.endings() if own and rank in own.waiting), *self.raised)
        has_failed = (
            self.loose or any(self.timeouts()) or any(GLOO_TIMEOUT.search(one.what) for one in endings)
        )
        if own is None or not own.may_be_over or has_failed:
            return own
        summary = f"{own.summary.rstrip('.')}; that has ended, whether by a timeout is not known"
        summary = summary if own.summary else ""
        return msgspec.structs.replace(own, summary=summary, is_whole=False, cause=None)

    def has_only_logs(self) -> bool:
        """Is there no stack and no flight record?"""
        return not self.shown() and all(one.state == "timed out" for _, one in self.operations())

    def shown(self) -> dict[int, Stack]:
        """Return the main thread of each rank whose stacks are known."""
        return {rank.rank: rank.stacks[0] for rank in self.ranks.values() if rank.stacks}
