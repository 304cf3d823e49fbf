"""Events of saves and loads as they happen: one hook for logs, progress bars, timelines and tests.

`subscribe(callback)` registers a callback for every event of this process. It runs on the thread that emits
the event. An exception from it is logged and otherwise ignored, because monitoring must not break a save.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from holdfast._core.base.options import read_place
from holdfast._core.process.recording import Recorder
from holdfast.errors import BadInput

_log = logging.getLogger("holdfast")


class Event(msgspec.Struct, frozen=True):
    """One event. `at`: seconds since the epoch, by this host's clock. Events are ordered per thread only."""

    name: str
    """`save.`, `load.` or `choice.`, then a phase from the protocol table (`save.writing`), or `raised` when
    the call raises. Also `load.rejected`, when a load passes over a damaged or partial step;
    `save.staged`, when an asynchronous save has copied the state; `save.stale`, when no tensor of it has
    changed; `phase.entered` and `phase.left`, from `phase`; `roll_call.told` and `roll_call.over`, on the
    rank that made the roll call."""
    rank: int
    step: int | None
    path: str
    at: float
    fields: dict[str, Any]


Callback = Callable[[Event], None]
_callbacks: list[Callback] = []
_lock = threading.Lock()


_phases: list[str] = []


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Label a part of the program, such as `"eval"`. Roll calls and reports show the label of each rank.
    Phases may be nested; the innermost one counts."""
    _phases.append(name)
    began, rank = time.monotonic(), _place()[0] if _is_heard() else 0
    emit("phase.entered", rank=rank, phase=name)
    try:
        yield
    finally:
        _phases.pop()
        emit("phase.left", rank=rank, phase=name, seconds=time.monotonic() - began)


def phase_now() -> str:
    """Return the innermost current phase; "" outside of any."""
    return _phases[-1] if _phases else ""


def subscribe(callback: Callback) -> Callable[[], None]:
    """Call `callback(event)` for every event. Returns a function that unsubscribes it."""
    with _lock:
        _callbacks.append(callback)

    def unsubscribe() -> None:
        with _lock:
            if callback in _callbacks:
                _callbacks.remove(callback)

    return unsubscribe


def emit(name: str, *, rank: int = 0, step: int | None = None, path: str = "", **fields: object) -> None:
    """Send an event to all subscribers. Costs almost nothing when there is none."""
    # Checked before the event is constructed: each batch of transferred bytes emits one.
    if not _is_heard():
        return
    event = Event(name, rank, step, path, time.time(), fields)
    _log.debug("%s rank=%d step=%s %s %s", name, rank, step, path, fields)
    for callback in tuple(_callbacks):  # one may unsubscribe itself
        try:
            callback(event)
        except Exception:
            _log.exception("An event callback raised on %s; the save or load goes on.", name)


def record(folder: str | os.PathLike[str]) -> Callable[[], None]:
    """Record the events of this rank in a run folder, for `holdfast report` and `holdfast watch`. Returns a
    function that stops it. Call it on every rank, after `init_process_group` where no launcher sets RANK.

    `folder/events/rank-3.jsonl` holds the newest events, 2 MiB at most. A background thread writes
    them about once a second, so storage that hangs does not block training.
    """
    if not isinstance(folder, str | os.PathLike) or "://" in os.fspath(folder):
        raise BadInput(f"Events are recorded in files: {str(folder)!r} is no path.", hint="Give a folder.")
    recorder = Recorder(os.path.abspath(folder), *_place())
    unsubscribe = subscribe(
        lambda event: recorder.note(event.name, event.at, event.step, event.path, event.fields)
    )

    def end() -> None:
        unsubscribe()
        recorder.end()

    recorder.begin(end)
    return end


def _is_heard() -> bool:
    return bool(_callbacks) or _log.isEnabledFor(logging.DEBUG)


def _place() -> tuple[int, int]:
    """Return the rank of this process and the size of its world, by torch.distributed or else its
    launcher."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return read_place()
