"""Start Holdfast's own threads: named daemon threads, and a clear error if the system allows no more."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast
from weakref import WeakSet

from holdfast.errors import DeadlineExceeded, NotStarted

RAISE_LIMIT = (
    "Raise the limit of processes and threads (ulimit -u, pids.max of the container), or run fewer of them."
)
"""The hint for errors when no thread or process can be started."""


T = TypeVar("T")
BEGINS_WITHIN = 60.0
"""Seconds within which a new thread must start to run; a machine may be busy."""
_MAY_REFUSE = sys.version_info[:2] == (3, 12)
_entries: list[object] = []
"""ctypes callbacks that threads run; they must not be freed before the threads end."""


class _OwnThread(threading.Thread):
    """A daemon thread that tells once its work is over, while it still frees the objects of that work."""

    def __init__(self, work: Callable[[], object], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self.over = [work], False

    def run(self) -> None:
        try:
            self._work[0]()
        finally:
            self.over = True
            self._work.clear()


def join_leaving(seconds: float) -> None:
    """Wait for Holdfast's threads whose work is over. They may still free tensors, which is a call into
    torch's C++."""
    ends = time.monotonic() + seconds
    for thread in threading.enumerate():
        if isinstance(thread, _OwnThread) and thread.over and thread is not threading.current_thread():
            thread.join(max(0.0, ends - time.monotonic()))


def start_thread(work: Callable[[], object], name: str, rank: int | None = None) -> threading.Thread:
    """Start a daemon thread. Raises NotStarted if no more can be started: the limit of processes is
    reached, or memory is short."""
    thread = _OwnThread(work, name)
    try:
        _begin(thread)
    except RuntimeError as error:
        raise NotStarted(
            f"The thread {name!r} could not be started in this process, which has "
            f"{threading.active_count()}: {error}.",
            rank=rank,
            hint=RAISE_LIMIT,
        ) from error
    return thread


def _begin(thread: threading.Thread) -> None:
    """Start a daemon thread, also once the main thread has ended. Raises RuntimeError as `Thread.start` does.

    Python 3.12.0 and 3.12.1 refuse that although the interpreter still runs `atexit` handlers and waits for
    threads, as all other versions know: a save on the last line of a program needs threads then.
    """
    try:
        thread.start()
    except RuntimeError as error:
        # The refusal begins a moment before the main thread counts as ended.
        if not _MAY_REFUSE or "interpreter shutdown" not in str(error) or sys.is_finalizing():
            raise
        _begin_late(thread)


def _begin_late(thread: threading.Thread) -> None:
    """Do what `Thread.start` of Python 3.12 does, without its check."""
    import ctypes

    python: Any = threading  # its private names: those of two versions, which change no more
    entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: cast("Any", thread)._bootstrap())
    _entries.append(entry)
    start = ctypes.pythonapi.PyThread_start_new_thread
    start.argtypes, start.restype = [type(entry), ctypes.c_void_p], ctypes.c_ulong
    python._limbo[thread] = thread
    if start(entry, None) == ctypes.c_ulong(-1).value:
        del python._limbo[thread]
        raise RuntimeError("can't start new thread")
    if not cast("Any", thread)._started.wait(BEGINS_WITHIN):
        raise RuntimeError(f"can't start new thread: it did not begin within {BEGINS_WITHIN:g} s")


def members(objects: WeakSet[T]) -> list[T]:
    """Return the objects of a weak set to which other threads may add: iterating it raises then."""
    while True:
        with suppress(RuntimeError):  # changed during the iteration
            return list(objects)


def within(seconds: float, doing: str, action: Callable[[], None]) -> None:
    """Run a call that may block forever (usually storage) on its own thread. Raises DeadlineExceeded if it
    takes longer than `seconds`."""
    # Empty until the call has ended; then its exception, or None.
    ended: list[BaseException | None] = []

    def work() -> None:
        try:
            action()
        except BaseException as error:
            ended.append(error)
        else:
            ended.append(None)

    # A stuck thread is abandoned; as a daemon, it does not keep the process alive.
    start_thread(work, "holdfast-look").join(seconds)
    if not ended:
        raise DeadlineExceeded(
            f"{doing} took longer than {seconds:g} s: a call into storage does not return.",
            hint="A stack of its thread `holdfast-look` (py-spy, faulthandler) shows where it is.",
        )
    if ended[0] is not None:
        raise ended[0]
