"""The data model of a diagnosis: which ranks are waited for, the proven cause if any, and similar threads."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import msgspec

from holdfast._core.layout.ranks import ranks_text
from holdfast._watch.evidence import Frame, SourceLine


class Observation(NamedTuple):
    """A fact from the evidence, with its source."""

    what: str
    source: SourceLine | None = None


class RankPlace(NamedTuple):
    """Ranks with the same position or facts."""

    ranks: tuple[int, ...]
    text: str


class Who(msgspec.Struct, frozen=True):
    """Which ranks wait, and which ranks they wait for."""

    summary: str
    ranks: tuple[int, ...] | None
    """The ranks to look at: absent and not waiting themselves, or unlike the others. Empty: none is missing;
    None: not known."""
    basis: str
    """The kind of evidence for it: `counts`, `stacks`, `log`, `holdfast`, if Holdfast wrote it to a log,
    or `cause`, if only the cause shows it."""
    waiting: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    """Ranks that have not reached the operation of the others, and are not waiting themselves."""
    group: str = ""
    operation: str = ""
    number: int | None = None
    seconds: float | None = None
    """Minimum time for which the operation has been pending."""
    call: Frame | None = None
    """The code position of the first of `ranks`, or of the first waiting rank."""
    known: tuple[RankPlace, ...] = ()
    """Facts about the ranks in `absent`, or else in `ranks`."""
    seen: tuple[Observation, ...] = ()


NOBODY_WAITS = "No rank is known to wait for another."
MEANS = {
    "died": "a rank has raised an error or was ended, before any timeout",
    "ended": "the program or process of a rank has ended, without a known error, while others wait",
    "mismatch": "ranks have issued other operations, sizes, types or sources under one number of a group",
    "cycle": "ranks wait for each other across groups or calls: in other orders, or with one more or less",
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
"""Advice for a hang in a collective of a save."""


class Why(msgspec.Struct, frozen=True):
    """A cause that the evidence proves."""

    kind: str
    """A key of `MEANS`."""
    summary: str
    ranks: tuple[int, ...] | None = None
    """The ranks to blame; for a mismatch, the ones that differ from the rest. None: not known."""
    call: Frame | None = None
    seen: tuple[Observation, ...] = ()


class Likeness(msgspec.Struct, frozen=True):
    """A public thread whose symptoms match the evidence."""

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
    places: tuple[RankPlace, ...]
    """The positions of all ranks with known stacks, the fewest ranks first."""
    looks_like: tuple[Likeness, ...]
    """Public threads with the same log lines, frames or operations; no proof of a cause."""
    advice: tuple[Observation, ...]
    """First observations about the evidence (`advice.advice`)."""
    observations: tuple[Observation, ...]
    collect: tuple[str, ...]
    """Missing evidence, with the commands that collect it."""
    heard_of: tuple[int, ...]
    world_size: int | None
    is_complete: bool
    holdfast: str = ""
    """How Holdfast would avoid this hang; empty if it would not."""

    @property
    def says(self) -> str:
        """Format `who` and `why`, one line each."""
        lines = [self.who.summary] if self.who is not None else []
        lines += [f"{self.why.kind}: {self.why.summary}"] if self.why is not None else []
        return "\n".join(f"{line}." for line in lines) or NOBODY_WAITS


def listed(ranks: Collection[int]) -> str:
    """Format ranks as `rank 3` or `ranks 0-6, 8`."""
    runs = ranks_text(ranks).split(",")
    text, more = ", ".join(runs[:12]), " and more" if len(runs) > 12 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}{more}"
