"""Where a function can go from the line that it is at: whether it comes to another line, or has passed it.

A line with a greater number may be in the other arm of a condition, and one with a smaller number in the next
round of a loop. The bytecode tells: jumps forward and backward. Exceptions are not followed.
"""

from __future__ import annotations

import dis
from collections.abc import Mapping
from itertools import pairwise
from types import CodeType

from holdfast._watch.evidence import Way

_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD",
         "JUMP_BACKWARD_NO_INTERRUPT"}  # fmt: skip
"""Instructions after which the next one is not executed."""


def way_of(code: CodeType, at: int, variables: Mapping[str, object]) -> Way:
    """Return where code can go from the instruction at offset `at`, with the values of its counters."""
    lines = {offset: line for first, end, line in code.co_lines() if line for offset in range(first, end, 2)}
    instructions = list(dis.get_instructions(code))
    # In a call, `f_lasti` may be in the cache entries behind the instruction.
    at = max((one.offset for one in instructions if one.offset <= at), default=0)
    following = {one.offset: after.offset for one, after in pairwise(instructions) if one.opname not in _ENDS}
    jumps = {one.offset: int(one.argval) for one in instructions if one.opcode in _JUMPS}
    rounds = _rounds(jumps, following)
    reached, open_ends = set[int](), [at]
    while open_ends:
        here = open_ends.pop()
        if here in reached:
            continue
        reached.add(here)
        if here in rounds:
            # A loop is left at its top, after a jump back: what is behind it is ahead.
            open_ends += [to for start, to in jumps.items() if jumps[here] <= start <= here < to]
        elif here in jumps:
            open_ends.append(jumps[here])
        if here in following:
            open_ends.append(following[here])
    # The call itself is not ahead: what follows it is, also on its own line.
    ahead = {lines[offset] for offset in reached - {at} if offset in lines}
    loops: dict[int, int] = {}
    for end in rounds:
        loops[jumps[end]] = max(end, loops.get(jumps[end], 0))
    # The handler of an exception stands behind the code of its loop, and jumps back into it.
    places = {at} | {jumps[here] for here in reached - rounds if jumps.get(here, here) < here}
    inside = sorted(
        (end - first, first, end) for first, end in loops.items() if any(first <= at <= end for at in places)
    )
    counters = _counters(instructions)
    return Way(
        _ranges(ahead, sorted(set(lines.values()))),
        tuple(_span(lines, first, end) for _, first, end in inside),
        tuple((name, value) for name in sorted(counters) if type(value := variables.get(name)) is int),
    )


def _rounds(jumps: Mapping[int, int], following: Mapping[int, int]) -> set[int]:
    """Return the jumps back that begin the next round of a loop: those that their target leads to. Since
    Python 3.12 the handler of an exception jumps back, too, to what follows its `try` or `with`."""
    found = set()
    for start, target in jumps.items():
        reached, open_ends = set[int](), [target] if target < start else []
        while open_ends:
            here = open_ends.pop()
            if here not in reached:
                reached.add(here)
                open_ends += [to for to in (jumps.get(here), following.get(here)) if to is not None]
        if start in reached:
            found.add(start)
    return found


def _counters(instructions: list[dis.Instruction]) -> set[str]:
    """Return the variables that a `for` sets, also in a tuple, as of `enumerate`; without any, those to which
    a constant is added."""
    sets: set[str] = set()
    adds: set[str] = set()
    for number, one in enumerate(instructions):
        unpacks = one.opname == "UNPACK_SEQUENCE"
        stored = set().union(*map(_stored, instructions[number + 1 : number + 2 + unpacks]))
        if one.opname == "FOR_ITER" or (unpacks and instructions[number - 1].opname == "FOR_ITER"):
            sets |= stored
        elif one.argrepr == "+=" and instructions[number - 1].opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            adds |= stored
    return sets or adds


def _stored(one: dis.Instruction) -> set[str]:
    """Return the variables that an instruction sets; since Python 3.13, one may set two, or set and read."""
    if one.opname in ("STORE_FAST", "STORE_NAME"):
        return {str(one.argval)}
    names = one.argval if one.opname in ("STORE_FAST_STORE_FAST", "STORE_FAST_LOAD_FAST") else ()
    return set(names[:1] if one.opname == "STORE_FAST_LOAD_FAST" else names)


def _ranges(chosen: set[int], all_lines: list[int]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    extends = False
    for line in all_lines:
        if line in chosen:
            found.append((found.pop()[0], line) if extends else (line, line))
        extends = line in chosen
    return tuple(found)


def _span(lines: dict[int, int], first: int, end: int) -> tuple[int, int]:
    inside = [line for offset, line in lines.items() if first <= offset <= end]
    return min(inside, default=0), max(inside, default=0)
