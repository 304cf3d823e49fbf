"""Where a function can go, by its bytecode, and what follows for two stacks that part in it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

import pytest

from holdfast._watch.evidence import Call, Source, Stack, Way
from holdfast._watch.positions import parting
from holdfast._watch.ways import way_of

HERE: list[tuple[Call, Way]] = []


def mark() -> None:
    """Note where the caller is."""
    frame = sys._getframe(1)
    call = Call(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno)
    HERE.append((call, way_of(frame.f_code, frame.f_lasti, frame.f_locals)))


def in_a_row() -> None:
    mark()
    mark()


def in_two_arms(first: bool) -> None:
    if first:
        mark()
    else:
        mark()


def behind_a_loop() -> None:
    for _ in range(1):
        mark()
    mark()


def behind_a_while() -> None:
    count = 0
    while count < 1:
        mark()
        count += 1
    mark()


def in_one_loop() -> None:
    for _ in range(1):
        mark()
        if HERE:
            mark()


def in_an_inner_loop() -> None:
    for _ in range(1):
        for _ in range(1):
            mark()
        mark()


def before_handlers() -> None:
    """Whose code stands behind the function's, and jumps back: no loop, as one may think since Python 3.12."""
    with suppress(ValueError):
        mark()
    try:
        mark()
    except ValueError:
        HERE.clear()


def in_a_handler_in_a_loop() -> None:
    for text in ("a",):
        try:
            int(text)
        except ValueError:
            mark()
            continue
        mark()
    mark()


def counting() -> None:
    total = 0
    for step, _ in enumerate("abc"):
        total += 2
        if step == 1:
            mark()
    mark()


def stacks(program: Callable[[], None]) -> list[Stack]:
    HERE.clear()
    program()
    main = Call("main", "train.py", 1)
    return [Stack("MainThread", (call, main), Source("test"), ways=(way, Way())) for call, way in HERE]


def both_arms() -> None:
    in_two_arms(True)
    in_two_arms(False)


@pytest.mark.parametrize(
    ("program", "first", "second"),
    [
        (in_a_row, "before", "past"),
        (both_arms, "past", "past"),
        (behind_a_loop, "before", "outside"),
        (behind_a_while, "before", "outside"),
        (in_one_loop, "before", "behind"),
        (in_an_inner_loop, "before", "behind"),
        (before_handlers, "before", "past"),
        (in_a_handler_in_a_loop, "before", "outside"),
    ],
)
def test_a_line_is_ahead_or_it_is_not(program: Callable[[], None], first: str, second: str) -> None:
    """Of two lines of a function, what each is to the other."""
    one, other = stacks(program)
    there, back = parting(one, other), parting(other, one)
    assert there is not None
    assert back is not None
    assert (there.relation(), back.relation()) == (first, second)


def test_a_loop_around_the_function_makes_it_undecided() -> None:
    one, other = (
        Stack(stack.thread, stack.calls, stack.source, ways=(stack.ways[0], Way(loops=((1, 2),))))
        for stack in stacks(in_a_row)
    )
    back = parting(other, one)
    assert back is not None
    assert back.relation() == "behind"


def test_lines_decide_where_the_process_has_told_no_ways() -> None:
    one, other = (Stack(stack.thread, stack.calls, stack.source) for stack in stacks(both_arms))
    there = parting(one, other)
    assert there is not None
    assert there.relation() == "before"


def test_counters_of_loops_tell_whether_a_rank_has_made_fewer_rounds() -> None:
    one, other = stacks(counting)
    there = parting(one, other)
    assert there is not None
    assert there.way is not None
    assert there.way.counts == (("step", 1),)
    assert there.rounds() == "fewer"
    assert there.turned().rounds() == ""
    alike = parting(other, Stack(one.thread, one.calls, one.source, ways=(other.ways[0], Way())))
    assert alike is not None
    assert alike.rounds() == "same"
