"""Where code is: the last calls of a thread or of an exception, in one line, innermost last.

Only frames are looked at. A source file is never opened: it may lie on storage that does not answer.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from types import CodeType, FrameType, TracebackType

CALLS = 4
"""How many calls are shown."""
_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_EXITS = _OWN + "exits.py"
_ROSTER = os.path.join(_OWN, "roster", "")
"""A thread whose code is there waits for messages."""


def calls_of_frame(frame: FrameType | None) -> str:
    """Return the last calls of a stack, as `train.py:12 main > model.py:30 forward`; "" for None."""
    calls: list[str] = []
    while frame is not None and len(calls) < CALLS:
        calls.append(_call(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return " > ".join(reversed(calls))


def calls_of_error(error: BaseException | None) -> str:
    """Return the last calls of an exception's traceback; "" if it was never raised."""
    return calls_of_traceback(error.__traceback__ if error is not None else None)


def calls_of_traceback(trace: TracebackType | None) -> str:
    """Return the last calls of a traceback."""
    lines = list(traceback.walk_tb(trace))
    if lines and lines[-1][0].f_code.co_filename == _EXITS:
        lines.pop()  # our `sys.exit`
    return " > ".join(_call(frame.f_code, line) for frame, line in lines[-CALLS:])


def frame_of(thread: threading.Thread) -> FrameType | None:
    """Return the innermost frame of a thread, if it is in Python code."""
    # A snapshot: the thread goes on meanwhile, so the frame's line may be a later one.
    return sys._current_frames().get(thread.ident or 0)


def where_threads_are(caller: threading.Thread | None = None) -> str:
    """Say where this process's main thread is, as a part of a sentence; `caller`, too, if it is another one.

    Of a thread that waits in a call of Holdfast this shows where it called, and where the thread is that
    works for it.
    """
    threads = [threading.main_thread()]
    if caller is not None and caller is not threads[0] and caller.is_alive():
        threads.append(caller)
    return "; ".join(filter(None, map(where_thread_is, threads)))


def where_thread_is(thread: threading.Thread) -> str:
    """Say where one thread is, as `where_threads_are` does."""
    name = "main thread" if thread is threading.main_thread() else f"thread {thread.name!r}"
    frame = frame_of(thread)
    entry = _entry_into_holdfast(frame)
    if frame is None:
        return f"its {name} is in no Python code"
    if entry is None:
        return f"its {name} is at {calls_of_frame(frame)}"
    if entry.f_code.co_filename == _EXITS:
        return ""  # Holdfast's end of the process, and nobody's code
    # The thread that works for a waiting one tells more, unless it waits for messages, too.
    work = (frame_of(other) for other in threading.enumerate() if other.name == "holdfast-operation")
    at_work = next(
        (inner for inner in work if inner and not inner.f_code.co_filename.startswith(_ROSTER)), None
    )
    more = f", which does {calls_of_frame(at_work)}" if at_work is not None else ""
    return f"its {name} is at {calls_of_frame(entry)}{more}"


def _entry_into_holdfast(frame: FrameType | None) -> FrameType | None:
    """Return the frame where a thread entered Holdfast's code; None if it is in other code now."""
    entry = None
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OWN):
            entry = frame
        # Waiting goes through threading (Event, Condition): such frames belong to their caller.
        elif name != threading.__file__:
            break
        frame = frame.f_back
    return entry


def _call(code: CodeType, line: int | None) -> str:
    return f"{code.co_filename.rpartition('/')[2]}:{line} {code.co_name}"
