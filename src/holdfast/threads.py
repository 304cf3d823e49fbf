"""Holdfast's own threads: daemons with a name, waited for with a timeout; one clear error where the system
allows no more of them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from holdfast.errors import DeadlineExceeded, HoldfastError

SPARES = 8
"""Threads that `keep_spares` keeps: ending a session and the saves under way took up to five."""

_REFUSES_LATE: bool = sys.version_info[:2] == (3, 12)
"""3.12.1 starts no thread once the main thread has ended; 3.11 and 3.13 do."""


class _Spare(threading.Thread):
    """A thread that is started early, and waits for its work."""

    def __init__(self) -> None:
        super().__init__(name="holdfast-spare", daemon=True)
        self._given = threading.Event()
        self._work: Callable[[], object] | None = None

    def give(self, work: Callable[[], object] | None, name: str) -> None:
        self._work, self.name = work, name
        self._given.set()

    def run(self) -> None:
        self._given.wait()
        work, self._work = self._work, None
        if work is not None:
            work()


_spares: list[_Spare] = []
_users: set[object] = set()
_lock = threading.Lock()


def keep_spares(user: object) -> None:
    """Keep threads ready for what `user` runs after the main thread has ended, where the interpreter starts
    none then."""
    if not _REFUSES_LATE:
        return
    with _lock, suppress(RuntimeError):  # no more threads now; the work may need none
        _users.add(user)
        _spares[:] = [spare for spare in _spares if spare.is_alive()]  # those of a fork's parent are not
        while len(_spares) < SPARES:
            spare = _Spare()
            spare.start()
            _spares.append(spare)


def drop_spares(user: object) -> None:
    """End the spare threads, and wait for that, if `user` was the last one that needs them."""
    with _lock:
        _users.discard(user)
        ended = [] if _users else list(_spares)
        _spares[len(_spares) - len(ended) :] = []
    for spare in ended:
        spare.give(None, spare.name)
        # Waited for, as `close` promises that no thread of Holdfast's is left.
        spare.join()


def _take_spare() -> _Spare | None:
    with suppress(IndexError):
        while True:
            spare = _spares.pop()
            if spare.is_alive():
                return spare
    return None


def start_thread(work: Callable[[], object], name: str, rank: int | None = None) -> threading.Thread:
    """Start a daemon thread. Raises HoldfastError if no more can be started: the limit of processes is
    reached, memory is short, or the interpreter is about to end."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        # Also where a limit on threads is reached, not only at the end of the process.
        spare = _take_spare()
        if spare is not None:
            spare.give(work, name)
            return spare
        raise HoldfastError(
            f"The thread {name!r} could not be started in this process, which has "
            f"{threading.active_count()}: {error}.",
            rank=rank,
            hint="Raise the limit of processes and threads (ulimit -u, pids.max of the container), or run "
            "fewer of them.",
        ) from error
    return thread


def within(seconds: float, doing: str, action: Callable[[], None]) -> None:
    """Run a call that may block for ever, mostly into storage, on a thread of its own. Raises
    DeadlineExceeded if it takes too long."""
    # Empty until it has ended; then what it raised, or None.
    ended: list[BaseException | None] = []

    def work() -> None:
        try:
            action()
        except BaseException as error:
            ended.append(error)
        else:
            ended.append(None)

    # A thread that does not come back is left behind; it is a daemon, so it does not hold the process.
    start_thread(work, "holdfast-look").join(seconds)
    if not ended:
        raise DeadlineExceeded(
            f"{doing} took longer than {seconds:g} s: a call into storage does not return.",
            hint="A stack of its thread `holdfast-look` (py-spy, faulthandler) shows where it is.",
        )
    if ended[0] is not None:
        raise ended[0]
