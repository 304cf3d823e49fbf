"""What a diagnosis is: who is waited for, why, as far as it is proven, and what it looks like."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import msgspec

from holdfast._core.layout.ranks import ranks_text
from holdfast._watch.evidence import Call, Source


class Observation(NamedTuple):
    """Something that was read, and where."""

    what: str
    source: Source | None = None


class Place(NamedTuple):
    """Ranks that are at one place."""

    ranks: tuple[int, ...]
    text: str


class Who(msgspec.Struct, frozen=True):
    """Which ranks wait, and which ranks they wait for."""

    summary: str
    ranks: tuple[int, ...] | None
    """Those that are not there and wait for nobody, or that are unlike the others. Empty: nobody is missing;
    None: not known."""
    basis: str
    """What shows it: `counts`, `stacks`, `log`, or `cause`, if only the cause does."""
    waiting: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    """Those that have not come to where the others wait, and wait for nobody."""
    group: str = ""
    operation: str = ""
    number: int | None = None
    seconds: float | None = None
    """For how long the operation has been pending, at least."""
    call: Call | None = None
    """The line of code of the first of `ranks`, or of the first that waits."""
    known: tuple[Place, ...] = ()
    """What is known of those that are absent, or else of `ranks`."""
    seen: tuple[Observation, ...] = ()


MEANS = {
    "died": "a rank has raised an error or was ended, before any timeout",
    "ended": "the program or process of a rank has ended, without a known error, while others wait",
    "mismatch": "ranks have issued other operations, sizes, types or sources under one number of a group",
    "cycle": "ranks wait for each other across groups: in other orders, or with one operation more or less",
    "unreachable": "the host of a rank does not answer any more: it is down, or cut off",
    "stopped": "the process of a rank is stopped, by a signal or a debugger",
}
"""The causes that evidence can prove."""
TODO = {
    "died": "Look at that error first: a rank that waits for this one can not go on.",
    "ended": "Compare how often ranks come to this operation: batches, steps, conditions.",
    "mismatch": "Compare what these ranks execute before that number: order of loops, conditions, shapes.",
    "cycle": "Issue these operations in one order on all ranks, and on each as often.",
    "unreachable": "Look at that host and its network.",
    "stopped": "Look at what has stopped it: SIGSTOP, a debugger, a job control shell.",
}
IN_A_SAVE = "import holdfast; holdfast.install(): its saves issue no collective, so that nobody waits in one"
"""What removes a hang whose collective is a save's."""


class Why(msgspec.Struct, frozen=True):
    """A cause that the evidence proves."""

    kind: str
    """A key of `MEANS`."""
    summary: str
    ranks: tuple[int, ...] | None = None
    """Those to blame or, of a mismatch, those that differ from the rest. None: not known."""
    call: Call | None = None
    seen: tuple[Observation, ...] = ()


class Likeness(msgspec.Struct, frozen=True):
    """A thread that evidence looks like."""

    title: str
    thread: str
    cause: str
    cure: str
    seen: tuple[Observation, ...]


class Diagnosis(msgspec.Struct, frozen=True):
    """The result of `holdfast diagnose`."""

    who: Who | None
    """None: no rank is known to wait."""
    why: Why | None
    """None: nothing proves a cause."""
    places: tuple[Place, ...]
    """Where all ranks are whose stacks are known, those of the fewest ranks first."""
    looks_like: tuple[Likeness, ...]
    """Public threads that show the same lines, frames or operations; no cause follows from it."""
    advice: tuple[Observation, ...]
    """What an engineer says of it at first sight."""
    observations: tuple[Observation, ...]
    collect: tuple[str, ...]
    """What to collect, each with its command."""
    heard_of: tuple[int, ...]
    world_size: int | None
    is_complete: bool
    holdfast: str = ""
    """The line of Holdfast that removes such a hang; empty if none does."""

    @property
    def says(self) -> str:
        """Return who and why in one line each."""
        lines = [self.who.summary] if self.who is not None else []
        lines += [f"{self.why.kind}: {self.why.summary}"] if self.why is not None else []
        return "\n".join(f"{line}." for line in lines) or "No rank is known to wait for another."


def listed(ranks: Collection[int]) -> str:
    """Format ranks as `rank 3` or `ranks 0-6, 8`."""
    runs = ranks_text(ranks).split(",")
    text, more = ", ".join(runs[:12]), " and more" if len(runs) > 12 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}{more}"
