"""What a diagnosis is, and the fixed tables that it is made with: how sure which kind of evidence makes, what
to do about a class, and which public thread looks like it."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from holdfast._layout.ranks import ranks_text
from holdfast._watch.evidence import Call, Source

CONFIDENCE = {
    "order": 0.95,  # what came first in the log, or what the kernel says
    "mismatch": 0.95,  # two calls that can't fit together
    "counts": 0.85,
    "stacks": 0.8,
    "signature": 0.75,  # a line or a frame that is known from a cause, and may have others
    "absence": 0.5,
}
"""How sure a verdict is, by the evidence that it rests on. Nothing else changes it."""
BAR = 0.7
"""Verdicts below are told as possible, never as the cause."""


class HangClass(NamedTuple):
    """One class of hangs."""

    means: str
    todo: str
    holdfast: str
    """The line of Holdfast that removes it; empty if none does."""
    thread: str
    """A public thread that looks like it."""


CLASSES = {
    "died": HangClass(
        "a rank has raised an error or ended, and the others wait for it",
        "Mend that error; the timeouts of the other ranks follow from it.",
        "",
        "https://github.com/modelscope/FunASR/issues/2006",
    ),
    "mismatch": HangClass(
        "ranks have issued different collectives, or other shapes, under one number of one group",
        "Compare what these ranks execute before that number. Sort what is iterated over; make shapes equal.",
        "",
        "https://github.com/modelscope/ms-swift/issues/10183",
    ),
    "branch": HangClass(
        "a rank takes another path through the program, and issues a collective more or less than the others",
        "Look at the condition above the line that is named: all ranks must decide it alike.",
        "",
        "https://github.com/alan-turing-institute/autocast/pull/386",
    ),
    "late": HangClass(
        "a rank is at work before the collective and will come; the others wait for it",
        "Don't kill it for this. Raise the timeout, or move this work behind the collective.",
        "",
        "https://github.com/verl-project/verl/issues/2238",
    ),
    "stuck": HangClass(
        "a rank lives and stands still in code of its own, and the others wait for it",
        "Look at the line that is named, and at what it waits for: storage, a lock, a stopped process.",
        "",
        "https://github.com/marin-community/marin/issues/8534",
    ),
    "unreachable": HangClass(
        "the host of a rank does not answer any more: it is down, or cut off",
        "Look at that host and its network.",
        "",
        "https://github.com/sgl-project/sglang/issues/3099",
    ),
    "data": HangClass(
        "ranks have different numbers of batches",
        "Give all ranks the same number: drop_last, join(), or stop together.",
        "",
        "https://github.com/meta-pytorch/torchrec/issues/189",
    ),
    "cycle": HangClass(
        "ranks wait for each other across groups, threads or streams",
        "Issue the collectives of these groups in one order on all ranks.",
        "",
        "https://github.com/meta-pytorch/torchrec/pull/4149",
    ),
    "lifecycle": HangClass(
        "communicators are being opened or closed, or a program has ended and does not exit",
        "Open groups while memory is free, and destroy them at the end on all ranks; look at the line.",
        "holdfast.install(), or holdfast.session(...): groups open early, close in order; exits are bounded",
        "https://github.com/modelscope/ms-swift/issues/7992",
    ),
    "library": HangClass(
        "a known error of a library",
        "Change the version of the library.",
        "",
        "https://github.com/marin-community/marin/issues/7344",
    ),
    "alike": HangClass(
        "all ranks are in the same operation: none of them is to blame",
        "Compare versions, hardware and network (NCCL_DEBUG=INFO, nccl-tests); look at GPU streams.",
        "",
        "https://github.com/saforem2/ezpz/issues/239",
    ),
}
IN_A_SAVE = "import holdfast; holdfast.install(): its saves issue no collective, so that nobody waits in one"
"""What removes a hang whose collective is a save's."""


class Observation(NamedTuple):
    """Something that was read, and where."""

    what: str
    source: Source | None = None


class Verdict(msgspec.Struct, frozen=True):
    """One explanation of the hang."""

    kind: str
    """A key of `CLASSES`."""
    basis: str
    """A key of `CONFIDENCE`."""
    summary: str
    ranks: tuple[int, ...] | None = None
    """Those to blame or, of a mismatch, those that differ from the rest. Empty: nobody; None: not known."""
    waiting: tuple[int, ...] = ()
    group: str = ""
    operation: str = ""
    number: int | None = None
    call: Call | None = None
    """The line of code."""
    seen: tuple[Observation, ...] = ()
    others: tuple[str, ...] = ()
    """What else shows the same, and what tells it apart."""

    @property
    def confidence(self) -> float:
        return CONFIDENCE[self.basis]


class Diagnosis(msgspec.Struct, frozen=True):
    """The result of `holdfast diagnose`."""

    verdict: Verdict | None
    """None: the evidence is not enough."""
    possible: tuple[Verdict, ...]
    """Other verdicts, also those below `BAR`."""
    means: str
    """What the class of the verdict means, what to do, which line of Holdfast removes it, and a public thread
    that looks like it; empty without a verdict."""
    todo: str
    holdfast: str
    thread: str
    observations: tuple[Observation, ...]
    collect: tuple[str, ...]
    """What to collect, each with its command."""
    ranks: tuple[int, ...]
    """Those that were heard of."""
    world_size: int | None
    is_complete: bool


def listed(ranks: tuple[int, ...] | list[int] | set[int]) -> str:
    """Format ranks as `rank 3` or `ranks 0-6, 8`."""
    runs = ranks_text(ranks).split(",")
    text, more = ", ".join(runs[:12]), " and more" if len(runs) > 12 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}{more}"
