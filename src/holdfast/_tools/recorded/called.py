"""Reads the roll calls of a run folder, and merges the stacks of all ranks into one tree that branches where
the stacks differ."""

from __future__ import annotations

import calendar
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from holdfast._tools.recorded.timeline import text
from holdfast._watch.diagnose import diagnose
from holdfast._watch.evidence import Evidence, Frame
from holdfast._watch.positions import Position, positions_of
from holdfast._watch.read import read_all
from holdfast._watch.shared_call import ROLL_CALLS
from holdfast._watch.verdict import Diagnosis
from holdfast.errors import BadInput, HoldfastError

BLOCKS = 300
"""Maximum number of blocks in a tree."""
LINES = 40
"""Maximum number of lines in a block: the innermost ones."""


class Called(NamedTuple):
    """One roll call."""

    name: str
    """The name of its folder."""
    at: float
    """Unix time of the roll call; 0: not known."""
    answers: int
    """Number of ranks that have answered."""
    found: Diagnosis | None
    evidence: Evidence
    problem: str = ""
    """The reason if it can't be read."""

    @property
    def says(self) -> str:
        """Return the result in one line."""
        if self.found is None:
            return self.problem
        return text(self.found.says.replace("\n", " ").rstrip("."), 600)


def roll_calls(run: str) -> list[str]:
    """List the names of the roll calls in a run folder, the newest first."""
    folder = os.path.join(run, ROLL_CALLS)
    try:
        if not os.path.isdir(folder):
            return []
        with os.scandir(folder) as entries:
            return sorted((entry.name for entry in entries if entry.is_dir()), reverse=True)
    except OSError as error:
        raise BadInput(f"The roll calls in {folder} can't be read: {error.strerror}.") from None


def read_called(run: str, name: str) -> Called:
    """Read and diagnose one roll call."""
    at = 0.0
    with suppress(ValueError, OverflowError):
        at = float(calendar.timegm(time.strptime(name[:15], "%Y%m%d-%H%M%S")))
    try:
        evidence = read_all([os.path.join(run, ROLL_CALLS, name)])
    except HoldfastError as error:
        return Called(text(name), at, 0, None, Evidence(), text(error))
    return Called(text(name), at, len(evidence.ranks), diagnose(evidence), evidence)


class Block(NamedTuple):
    """A node of the tree: consecutive frames that are common to the same ranks."""

    parent: int
    """Index of the block with the outer frames; -1 for none."""
    lines: list[str]
    """The frames, the outermost first."""
    ranks: tuple[int, ...]
    does: str
    """Activity of the ranks whose stack ends here; "" if there are none."""


def tree(evidence: Evidence) -> list[Block]:
    """Merge the stacks of all ranks into at most `BLOCKS` blocks in depth-first order, siblings with the
    fewest ranks first."""
    where = positions_of(evidence)
    stacks = {rank: one.stack.calls[::-1] for rank, one in where.items() if one.stack.calls}
    blocks: list[Block] = []
    waiting: list[tuple[int, int, tuple[int, ...]]] = [
        (-1, 0, ranks) for ranks in _parts(stacks, 0, tuple(stacks))
    ]
    waiting.reverse()
    while waiting and len(blocks) < BLOCKS:
        parent, depth, ranks = waiting.pop()
        first, begin = stacks[ranks[0]], depth
        parts = [ranks]
        while len(parts) == 1 and len(parts[0]) == len(ranks):  # no stack ends here, and none branches off
            depth += 1
            parts = _parts(stacks, depth, ranks)
        ended = [rank for rank in ranks if len(stacks[rank]) == depth]
        lines = [text(call) for call in first[begin:depth]]
        if len(lines) > LINES:
            lines = [f"{len(lines) - LINES} calls outside of these", *lines[-LINES:]]
        blocks.append(Block(parent, lines, ranks, _does(evidence, where, ended)))
        waiting += [(len(blocks) - 1, depth, part) for part in reversed(parts)]
    return blocks


def _parts(stacks: dict[int, tuple[Frame, ...]], depth: int, ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Partition ranks by their frame at a depth, the fewest first; without stacks that end before it."""
    parts: dict[Frame, list[int]] = {}
    for rank in ranks:
        if len(stacks[rank]) > depth:
            parts.setdefault(stacks[rank][depth], []).append(rank)
    return sorted((tuple(part) for part in parts.values()), key=lambda part: (len(part), part))


def _does(evidence: Evidence, where: dict[int, Position], ranks: list[int]) -> str:
    """Summarize what the ranks at one place do."""
    return "; ".join(islice(dict.fromkeys(_words(evidence, where, ranks)), 4))


def _words(evidence: Evidence, where: dict[int, Position], ranks: list[int]) -> Iterator[str]:
    for rank in ranks:
        one, stack = evidence.ranks[rank], where[rank].stack
        later = next((other for other in one.later if other.thread == stack.thread), None)
        moves = (
            ""
            if later is None
            else ", moves"
            if later.calls != stack.calls
            else ", still there at the second look"
        )
        pending = next((operation for operation in one.operations if operation.is_pending), None)
        operation = (
            f", {pending.name} #{pending.number} of {pending.group} pending" if pending is not None else ""
        )
        phase = f", in phase {one.phase}" if one.phase else ""
        yield text(f"{where[rank].does}{moves}{operation}{phase}")
