"""One-line stacks: the last calls of a thread or of an exception, innermost last.

They are made from frames, or from faulthandler's output. Source files are never opened: they may be on
storage that does not answer.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import NamedTuple

CALLS = 4
"""Maximum number of calls in a line."""
_OWN = os.path.abspath(__file__).removesuffix("_core/base/stacks.py")
"""The folder of Holdfast, with a slash."""
_EXITS = os.path.join(_OWN, "_core", "process", "exits.py")
_SYSTEM_EXIT = os.path.join(_OWN, "_groups", "ending", "system_exit.py")
_ROSTER = os.path.join(_OWN, "_core", "roster", "")
"""A thread that executes code in this folder waits for messages."""
_FRAME = re.compile(r'\s+File "(.*)", line (\d+) in (.*)')


class StackFrame(NamedTuple):
    """One frame of a stack: file, current line and function."""

    file: str
    line: int | None
    function: str

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line} {self.function}"


def calls_of_frame(frame: FrameType | None) -> str:
    """Return the last calls of a stack, as `train.py:12 main > model.py:30 forward`; "" for None."""
    return _line(list(_stack(frame)))


def calls_of_error(error: BaseException | None) -> str:
    """Return the last calls of an exception's traceback; "" if it was never raised."""
    return calls_of_traceback(error.__traceback__ if error is not None else None)


def calls_of_traceback(trace: TracebackType | None) -> str:
    """Return the last calls of a traceback."""
    calls = [
        StackFrame(frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(trace)
    ]
    if calls and calls[-1].file == _SYSTEM_EXIT:
        calls.pop()  # our `sys.exit`
    return _line(calls[::-1])


def frame_of(thread: threading.Thread) -> FrameType | None:
    """Return the innermost frame of a thread; None if it runs no Python code."""
    # A snapshot: the thread goes on meanwhile, so the frame's line may be a later one.
    return sys._current_frames().get(thread.ident or 0)


def where_threads_are(caller: threading.Thread | None = None) -> str:
    """Return the one-line stacks, as part of a sentence, of this process's main thread and of `caller`.

    For a thread that waits in a call of Holdfast: where it made the call, and the stack of the worker thread.
    """
    threads = [threading.main_thread()]
    if caller is not None and caller is not threads[0] and caller.is_alive():
        threads.append(caller)
    return "; ".join(filter(None, map(where_thread_is, threads)))


def where_thread_is(thread: threading.Thread) -> str:
    """Like `where_threads_are`, for one thread."""
    name = "main thread" if thread is threading.main_thread() else f"thread {thread.name!r}"
    workers = (frame_of(other) for other in threading.enumerate() if other.name == "holdfast-operation")
    return _where(name, list(_stack(frame_of(thread))), [list(_stack(frame)) for frame in workers])


def where_dumped(dump: str) -> str:
    """Like `where_threads_are`, for the main thread of another process, from faulthandler's output."""
    frames = (_FRAME.match(line) for line in dump.splitlines())
    stack = [StackFrame(frame[1], int(frame[2]), frame[3]) for frame in frames if frame is not None]
    return _where("main thread", stack, []) if stack else ""


def _where(name: str, stack: list[StackFrame], workers: list[list[StackFrame]]) -> str:
    """Describe a thread. stack: its calls, innermost first. workers: stacks of threads that may work for
    it."""
    entry = _entry_into_holdfast(stack)
    if not stack:
        return f"its {name} is in no Python code"
    if entry is None:
        return f"its {name} is at {_line(stack)}"
    if stack[entry].file == _EXITS:
        return ""  # Holdfast's exit handler, not user code
    # A worker thread's stack is more informative, unless it waits for messages as well.
    at_work = next((work for work in workers if work and not work[0].file.startswith(_ROSTER)), None)
    more = f", which does {_line(at_work)}" if at_work is not None else ""
    return f"its {name} is at {_line(stack[entry:])}{more}"


def _entry_into_holdfast(stack: list[StackFrame]) -> int | None:
    """Return the index of the frame in which a thread entered Holdfast's code; None if it is not in it."""
    entry = None
    for number, call in enumerate(stack):
        if call.file.startswith(_OWN):
            entry = number
        # Frames of threading (Event.wait, Condition.wait) belong to their caller.
        elif call.file != threading.__file__:
            break
    return entry


def _stack(frame: FrameType | None) -> Iterator[StackFrame]:
    """Yield the calls of a stack, innermost first."""
    while frame is not None:
        yield StackFrame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back


def _line(stack: list[StackFrame]) -> str:
    return " > ".join(map(str, stack[:CALLS][::-1]))
