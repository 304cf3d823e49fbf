"""Where the code of each rank is: what its main thread does, and where two stacks part.

A stack of the host says where kernels are launched, not where the GPU is. So it decides only where the host
itself is blocked, or is in no collective at all. The odd one out is a suspect: the function in which their
ways part tells whether it comes to the collective, or has passed it. A rank behind it may be in the round
before.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

from holdfast._watch.evidence import OPERATION, Call, Rank, Stack, Way, is_of_a_library

_TORCH = re.compile(r"torch/(?:distributed|cuda|_tensor|csrc|_C)|^lib(?:cuda|cudart|nccl|torch)")
_BLOCKED = re.compile(
    r"^(?:synchronize|item|tolist|cpu|wait|barrier|monitored_barrier|_store_based_barrier|\w*_object(?:_list)?|"
    r"(?:cu|cuda)\w*Synchronize)$"
)
_COLLECTIVE = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|broadcast|all_to_all|barrier|scatter|gather|^reduce$|^send|^recv|"
    r"_sync_decision_cross_ranks"
)
_OPENING = re.compile(
    r"^(?:init_process_group|new_group|_new_process_group_helper|_store_based_barrier|split_group)$"
)
_LOADER = re.compile(r"^(?:_next_data|_get_data|_try_get_data|_next_index)$|^_get_batch")
_IDLE = re.compile(r"^(?:main_loop|<module>|_bootstrap\w*|run)$")
_EXITS = re.compile(
    r"^(?:_run_exitfuncs atexit|"
    r"(?:_shutdown \S*threading|_exit_function \S*multiprocessing/util|_python_exit \S*concurrent/\S*)\.py)$"
)
_PYTHON = re.compile(r"/lib/python3\.\d+/(?!site-packages/|dist-packages/)")
_BEGINS = re.compile(r"/multiprocessing/|threading\.py|runpy|^atexit$")
"""Files in which the main thread begins, and that run the program once."""


class Position(NamedTuple):
    """What a rank does, by its main thread."""

    stack: Stack
    does: str
    """`waits`, `opens`, `loads`, `exits`, `idles` or `works`."""

    @property
    def call(self) -> Call:
        """The innermost call of the program's own code."""
        calls = self.stack.calls
        own = (call for call in calls if not is_of_a_library(call) and not _PYTHON.search(call.file))
        return next(own, calls[0])

    @property
    def is_at_its_gpu(self) -> bool:
        """Does it wait for its GPU's stream? What that waits for is not known."""
        return self.does == "waits" and not any("distributed" in call.file for call in self.stack.calls[:3])

    @property
    def may_be_at_its_gpu(self) -> bool:
        """May its innermost call be one such as `.item()`, which is in C? Python's own library has none."""
        return not _PYTHON.search(self.stack.calls[0].file)


def position_of(stack: Stack) -> Position:
    """Return what a thread does."""
    inner = [call for call in stack.calls[:8] if _TORCH.search(call.file)]
    if any(_OPENING.match(call.function) for call in stack.calls[:6] if "distributed" in call.file):
        return Position(stack, "opens")
    if any(_LOADER.match(call.function) for call in stack.calls):
        return Position(stack, "loads")
    in_collective = any(
        "distributed" in call.file and _COLLECTIVE.search(call.function) for call in inner[:3]
    )
    # A function of torch that calls back into Python, such as a plan of a save, is work, and no wait.
    innermost = stack.calls[0]
    blocked = bool(_TORCH.search(innermost.file)) and (
        _BLOCKED.match(innermost.function) is not None
        or ("distributed" in innermost.file and _COLLECTIVE.search(innermost.function) is not None)
    )
    helper = len(stack.calls) > 1 and innermost.function == "wrapper" and in_collective
    if blocked or helper:
        return Position(stack, "waits")
    if has_ended(stack):
        return Position(stack, "exits")
    library = is_of_a_library(innermost) or _PYTHON.search(innermost.file)
    return Position(stack, "idles" if library and _IDLE.match(innermost.function) else "works")


def has_ended(stack: Stack) -> bool:
    """Return whether a main thread has done its program, and is at its exit."""
    return any(_EXITS.match(f"{call.function} {call.file}") for call in stack.calls)


def is_in_its_program(stack: Stack) -> bool:
    """Return whether a main thread is known not to be at its exit: what is dumped of it from outside does not
    show that it runs `atexit` handlers."""
    begins = bool(stack.ways) or stack.calls[-1].function in ("<module>", "_run_module_as_main")
    return begins and not has_ended(stack)


def position_of_rank(rank: Rank) -> Position:
    """Return what a rank does: its main thread or, if that does nothing, a thread that works for it."""
    positions = [position_of(stack) for stack in rank.stacks]
    ours = [stack for stack in rank.stacks if stack.thread == OPERATION]
    if ours and any(call.file.endswith("_protocol/runner.py") for call in rank.stacks[0].calls[:6]):
        # A call of Holdfast's. `_do` calls what its thread does for this rank, and its waits for others.
        calls = ours[0].calls
        done = [inner for inner, outer in pairwise(calls) if outer.function == "_do"]
        works = any("/_roster/" not in call.file for call in done)
        return Position(ours[0], "works") if works else Position(rank.stacks[0], "waits")
    busy = [one for one in positions if one.does in ("waits", "opens")]
    return busy[0] if positions[0].does == "idles" and busy else positions[0]


class Parting(NamedTuple):
    """The calls at which two stacks part: one function, at two lines."""

    mine: Call
    theirs: Call
    way: Way | None
    other: Way | None
    """Where each can go; None if that isn't known."""
    in_rounds: bool
    """May this be done again, so that the lines are of different rounds?"""

    def relation(self) -> str:
        """Return where mine is: `before` the line of the others, `behind` it, in this round or another one,
        `past` it for good, or `outside` of a loop in which they are."""
        if self.way is None or self.other is None:
            return "before" if (self.mine.line or 0) < (self.theirs.line or 0) else "behind"
        if self.way.comes_to(self.theirs.line or 0):
            return "before"
        if self.in_rounds:
            return "behind"
        return "outside" if self.other.loops and self.other.comes_to(self.mine.line or 0) else "past"

    def turned(self) -> Parting:
        """Return it as the others see it."""
        return Parting(self.theirs, self.mine, self.other, self.way, self.in_rounds)

    def rounds(self) -> str:
        """Compare the counters of loops: return whether mine has made `fewer` rounds, or the `same` number;
        "" if they don't tell."""
        mine, theirs = (dict(way.counts if way is not None else ()) for way in (self.way, self.other))
        both = [(mine[name], theirs[name]) for name in mine.keys() & theirs.keys()]
        if any(one > other for one, other in both) or not both:
            return ""
        return "fewer" if any(one < other for one, other in both) else "same"


def parting(one: Stack, other: Stack) -> Parting | None:
    """Return where two stacks part, or None if they don't, or in another way."""
    ways, others = list(reversed(one.ways)), list(reversed(other.ways))
    in_rounds = False
    for at, (mine, theirs) in enumerate(zip(reversed(one.calls), reversed(other.calls), strict=False)):
        way = ways[at] if at < len(ways) else None
        if mine == theirs:
            around = bool(way.loops) if way is not None else not _BEGINS.search(mine.file)
            in_rounds = in_rounds or around
            continue
        if (mine.function, mine.file) != (theirs.function, theirs.file) or not mine.line or not theirs.line:
            return None
        if way is not None:
            in_rounds = in_rounds or any(first <= theirs.line <= last for first, last in way.loops)
        return Parting(mine, theirs, way, others[at] if at < len(others) else None, in_rounds)
    return None


def kind_of_leaving(parted: Parting) -> tuple[str, str]:
    """Return the class and the basis if a rank has left the loop in which others wait. After as many rounds
    as theirs, it has left a collective out."""
    kinds = {"fewer": ("data", "stacks"), "same": ("branch", "stacks")}
    return kinds.get(parted.rounds(), ("data", "absence"))


def in_one_loop(stack: Stack, later: Stack) -> Parting | None:
    """Return where two looks at one thread part, if both are in one loop there."""
    moves = parting(stack, later)
    loops = moves.way.loops if moves is not None and moves.way is not None else ()
    inside = moves is not None and any(first <= (moves.theirs.line or 0) <= last for first, last in loops)
    return moves if inside else None
