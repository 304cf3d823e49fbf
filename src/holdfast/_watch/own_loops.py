"""Reads the code of a function around the call that it is in: which method that is, and what a loop around it
asks before it goes on."""

from __future__ import annotations

import dis
from bisect import bisect_right
from collections.abc import Collection, Iterator
from types import CodeType

_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_VARIABLES = ("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_CLOSURE")
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RERAISE", "RAISE_VARARGS")
_ALWAYS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")
LONGEST = 20_000
"""Number of instructions above which loops are not searched."""


def is_call(step: dis.Instruction) -> bool:
    return step.opname.startswith(("CALL", "PRECALL"))  # Python 3.11 has both


class Code:
    """The instructions of a function."""

    def __init__(self, code: CodeType) -> None:
        self.steps = list(dis.get_instructions(code))
        self._offsets = [step.offset for step in self.steps]

    def at(self, last: int) -> int:
        """Return the index of the instruction that a frame executes, by its `f_lasti`: in a call of a Python
        function, that may be behind the instruction."""
        return max(bisect_right(self._offsets, last) - 1, 0)

    def method(self, call: int) -> int | None:
        """Return the index of the instruction that loads the method of a call; None if it calls no method, or
        if the code has no columns (`-X no_debug_ranges`)."""
        begins = _begin(self.steps[call])
        # In `a.b(c.d)`, the call and the loads of `a` and of `b` begin at one place.
        alike = (
            at
            for at in range(call - 1, -1, -1)
            if self.steps[at].opname in _ATTRIBUTES and begins and _begin(self.steps[at]) == begins
        )
        return next(alike, None)

    def function(self, call: int) -> str:
        """Return the variable whose value is called; "" if it is another expression."""
        begins = _begin(self.steps[call])
        for step in reversed(self.steps[:call]):
            if begins and _begin(step) == begins:
                if loaded := _loaded(step):
                    return loaded[0]
                if is_call(step) and step.opname != "PRECALL":
                    return ""  # its result is called
        return ""

    def names_before(self, method: int) -> list[str]:
        """Return the variable, and its attributes, on which a method is loaded, such as `self` and `handle`;
        empty if it takes more than these."""
        names: list[str] = []
        for step in reversed(self.steps[:method]):
            if step.opname in _ATTRIBUTES:
                names.append(str(step.argval))
                continue
            loaded = _loaded(step)
            return [loaded[-1], *reversed(names)] if loaded else []
        return []

    def asked(self, now: int) -> list[int] | None:
        """Return the instructions of the tests by which the innermost loop around an instruction ends; None
        if it is in no loop."""
        body = self._loop(now)
        if body is None:
            return None
        found: list[int] = []
        for at in sorted(body):
            after = self._after(at)
            if len(after) > 1 and "_IF_" in self.steps[at].opname and not body.issuperset(after):
                test = self._within(self.steps[at - 1])
                found += test
                # Or that of a variable, which a line of the loop sets.
                tested = {name for one in test for name in _loaded(self.steps[one])}
                lines = {
                    self.steps[one].positions.lineno  # type: ignore[union-attr]
                    for one in body
                    if not tested.isdisjoint(_stored(self.steps[one])) and self.steps[one].positions
                }
                found += (one for one in body if _line(self.steps[one]) in lines - {None})
        return found

    def _within(self, outer: dis.Instruction) -> list[int]:
        """Return the instructions of the expression of which an instruction is the last."""
        whole = outer.positions
        if whole is None or None in whole:
            return []
        begin, end = (whole.lineno, whole.col_offset), (whole.end_lineno, whole.end_col_offset)
        return [
            at
            for at, step in enumerate(self.steps)
            if (place := step.positions) is not None
            and None not in place
            and begin <= (place.lineno, place.col_offset)
            and (place.end_lineno, place.end_col_offset) <= end
        ]

    def _after(self, at: int) -> tuple[int, ...]:
        """Return the instructions that may follow one; without those of an error."""
        step = self.steps[at]
        jumps = step.opcode in dis.hasjrel or step.opcode in dis.hasjabs
        to = (self.at(step.argval),) if jumps else ()
        ends = step.opname in _ENDS or step.opname in _ALWAYS or at + 1 == len(self.steps)
        return to if ends else (at + 1, *to)

    def _loop(self, now: int) -> set[int] | None:
        """Return the smallest loop around an instruction: all from which one jump back is reached without its
        target."""
        if len(self.steps) > LONGEST:
            return None
        before: dict[int, list[int]] = {}
        back: list[tuple[int, int]] = []
        for at in range(len(self.steps)):
            for after in self._after(at):
                before.setdefault(after, []).append(at)
                if after <= at:
                    back.append((at, after))
        bodies = (_reaching(jump, head, before) for jump, head in back if head <= now)
        return min((body for body in bodies if now in body), key=len, default=None)


def _reaching(jump: int, head: int, before: dict[int, list[int]]) -> set[int]:
    body, left = {head, jump}, [jump] if jump != head else []
    while left:
        for at in before.get(left.pop(), ()):
            if at not in body:
                body.add(at)
                left.append(at)
    return body


def _begin(step: dis.Instruction) -> tuple[int, int] | None:
    place = step.positions
    if place is None or place.lineno is None or place.col_offset is None:
        return None
    return place.lineno, place.col_offset


def _line(step: dis.Instruction) -> int | None:
    return step.positions.lineno if step.positions is not None else None


def _loaded(step: dis.Instruction) -> tuple[str, ...]:
    """Return the variables that an instruction loads. From Python 3.13 it may load two, or store another."""
    if not step.opname.startswith(_VARIABLES) and not step.opname.endswith("_LOAD_FAST"):
        return ()
    return step.argval if isinstance(step.argval, tuple) else (str(step.argval),)


def _stored(step: dis.Instruction) -> tuple[str, ...]:
    if not step.opname.startswith("STORE_") or step.opname in ("STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE"):
        return ()
    return step.argval if isinstance(step.argval, tuple) else (str(step.argval),)


def code_within(step: dis.Instruction) -> Collection[str]:
    """Return the names that the code of a generator uses which an instruction loads."""
    return step.argval.co_names if isinstance(step.argval, CodeType) else ()


def methods(code: Code, asked: list[int]) -> Iterator[tuple[str, int | None]]:
    """Yield the methods that a loop asks, and where each is loaded; None of one in a generator."""
    for at in asked:
        step = code.steps[at]
        if step.opname in _ATTRIBUTES:
            yield str(step.argval), at
        for name in code_within(step):
            yield name, None
