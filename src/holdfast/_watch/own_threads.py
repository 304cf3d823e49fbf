"""Which thread of this process another one waits for, by `Thread.join` or `Future.result`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import FrameType

import msgspec

from holdfast._watch.evidence import Stack
from holdfast._watch.own_calls import called_of, variables

_POOL = "concurrent/futures/thread.py"
_FUTURES = "concurrent/futures/_base.py"
_WAITS = ("threading.py", _FUTURES)
_OF_SEVERAL = {"as_completed": "pending", "wait": "not_done"}
"""Functions that wait for several futures, and their variable that has those at work or before."""


def with_joined(stacks: list[Stack], frames: list[FrameType]) -> tuple[Stack, ...]:
    """Add which thread each one waits for, where that is known.

    frames: the innermost frames of the same threads.
    """
    both = list(zip(stacks, frames, strict=True))
    works = {id(future): stack.ident for stack, frame in both for future in _works(frame)}
    found = []
    for stack, frame in both:
        joined = _joined(frame, works)
        names = stack.names | {"joins": joined} if joined else stack.names
        found.append(msgspec.structs.replace(stack, names=names))
    return tuple(found)


def runs(frame: FrameType) -> dict[str, str]:
    """Return the function in C that a thread runs as a whole, such as `handle.wait`, and on what."""
    file, known = frame.f_code.co_filename, {}
    if frame.f_code.co_name == "run" and file.endswith((_POOL, "threading.py")):
        known = _of_self(frame)
    called = known.get("fn" if file.endswith(_POOL) else "_target")
    return called_of(called) if called is not None else {}


def _joined(frame: FrameType | None, works: dict[int, str]) -> str:
    while frame is not None and frame.f_code.co_filename.endswith(_WAITS):
        name, known = frame.f_code.co_name, variables(frame)
        if name in ("join", "result"):
            waited = known.get("self")
            if isinstance(waited, threading.Thread):
                return str(waited.ident or "")
            return works.get(id(waited), "") if isinstance(waited, Future) else ""
        if name in _OF_SEVERAL and frame.f_code.co_filename.endswith(_FUTURES):
            several = known.get(_OF_SEVERAL[name])
            left = [id(one) for one in list(several)] if isinstance(several, set) else []
            found = {works[one] for one in left if one in works}
            return found.pop() if len(found) == 1 else ""
        frame = frame.f_back
    return ""


def _works(frame: FrameType | None) -> Iterator[object]:
    """Yield the futures that a thread of a pool works on."""
    while frame is not None:
        if frame.f_code.co_name == "run" and frame.f_code.co_filename.endswith(_POOL):
            yield _of_self(frame).get("future")
        frame = frame.f_back


def _of_self(frame: FrameType) -> dict[str, object]:
    """Return the attributes of the object whose method a frame is."""
    known = getattr(variables(frame).get("self"), "__dict__", {})
    return known if isinstance(known, dict) else {}
