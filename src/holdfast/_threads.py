"""Holdfast's own threads: daemons with a name, waited for with a timeout; one clear error where the system
allows no more of them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.errors import DeadlineExceeded, HoldfastError


class NotStarted(HoldfastError):
    """The system starts no more threads in this process."""


class TooLate(HoldfastError):
    """The main thread has ended, and this interpreter starts no thread any more."""


class _Ran(threading.Thread):
    """Stands for a thread whose work is done already."""

    def join(self, timeout: float | None = None) -> None:
        pass


def start_thread(
    work: Callable[[], object], name: str, rank: int | None = None, stays: bool = False
) -> threading.Thread:
    """Start a daemon thread. Raises NotStarted if no more can be started: the limit of processes is
    reached, or memory is short.

    Once the main thread has ended, some interpreters start none: then the work is done before this returns
    or, if it `stays`, TooLate is raised.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        if "interpreter shutdown" in str(error):  # Python 3.12 refuses so, while `atexit` handlers run
            if stays:
                raise TooLate(f"The thread {name!r} could not be started any more.") from error
            work()
            return _Ran(name=name)
        raise NotStarted(
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
