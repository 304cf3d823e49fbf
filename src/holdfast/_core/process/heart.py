"""Holdfast's one permanent background thread: a scheduler of periodic tasks (`Duty`) and an event loop.

A component registers a `Duty`, which runs at its interval, and callbacks for file descriptors that become
readable. The thread starts with the first duty and exits with the last. A duty must not block: it delays all
others. The thread does not run while the process is stopped (SIGSTOP) or another thread holds the GIL, so a
duty must not count that time as silence of other ranks.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

from holdfast._core.base.threads import start_thread

log = logging.getLogger("holdfast")


def _tell(record: logging.LogRecord) -> None:
    """Handle a log record and swallow exceptions: logging raises if the program has closed stderr, and that
    would reach user code, or end this thread."""
    with suppress(Exception):
        type(log).handle(log, record)


log.handle = _tell  # type: ignore[method-assign]
JOIN = 0.5
"""Seconds to wait for the thread to end after the last duty."""
REST, LONGEST_REST = 1.0, 60.0
"""Seconds for which a file descriptor is not polled after its callback failed: at first, and at most."""
HASTE = 0.1
"""Minimum seconds between two runs of one duty."""
NAME = "holdfast-heart"


class Duty(Protocol):
    """A periodic task of the heart."""

    interval: float
    """Seconds between two runs; may change."""

    def beat(self) -> None:
        """Run once. Exceptions are logged."""
        ...

    def close(self) -> None:
        """Release resources; `beat` is not called again."""
        ...


class Heart:
    """The scheduler and its thread (see the module). Methods are thread-safe unless they say otherwise."""

    def __init__(self) -> None:
        self._duties: dict[Duty, tuple[float, float]] = {}
        """For each duty: when it is due next, and the earliest time that `hurry` may move it to."""
        self._ended: list[Duty] = []
        """Duties that have been removed and must still be closed, on the thread."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._selector: selectors.BaseSelector | None = None
        self._bell: tuple[socket.socket, socket.socket] | None = None
        self._resting: dict[socket.socket | int, _Rest] = {}
        """File descriptors whose last callback failed; not polled until their back-off ends."""

    def begin(self, duty: Duty, delay: float | None = None) -> None:
        """Schedule a duty, first after `delay` seconds (default: its interval). Raises NotStarted if the
        thread can't be started."""
        with self._lock:
            self._duties[duty] = time.monotonic() + (duty.interval if delay is None else delay), 0.0
            if self._thread is None:
                self._start()
        self._wake()

    def end(self, duty: Duty) -> None:
        """Remove a duty. If it was the last, wait up to `JOIN` seconds for the thread to exit."""
        with self._lock:
            if self._duties.pop(duty, None) is not None:
                self._ended.append(duty)
            thread = None if self._duties else self._thread
        self._wake()
        if thread is not None and thread is not threading.current_thread():
            ends = time.monotonic() + JOIN
            # Another thread of the program may begin a duty meanwhile.
            while thread.is_alive() and not self._duties and time.monotonic() < ends:
                thread.join(0.01)

    def hurry(self, duty: Duty) -> None:
        """Run this duty as soon as `HASTE` seconds have passed since its last run."""
        with self._lock:
            if duty in self._duties:
                due, earliest = self._duties[duty]
                self._duties[duty] = min(due, earliest), earliest
        self._wake()

    def on_readable(self, file: socket.socket | int, action: Callable[[], None]) -> None:
        """Call `action` on the thread whenever the file is readable. Not thread-safe: call it on the thread,
        or before the duty is scheduled."""
        if self._selector is not None and file not in self._selector.get_map():
            self._selector.register(file, selectors.EVENT_READ, action)

    def forget(self, file: socket.socket | int) -> None:
        """Stop polling this file. Call it before the file is closed."""
        self._resting.pop(file, None)
        if self._selector is not None:
            with suppress(KeyError, ValueError, OSError):
                self._selector.unregister(file)

    # -- the thread -------------------------------------------------------------------------------

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self._bell = ours, theirs
        self._selector = selectors.DefaultSelector()
        self._selector.register(ours, selectors.EVENT_READ, self._answer_bell)
        try:
            self._thread = start_thread(self._run, NAME)
        except BaseException:
            self._duties.clear()
            self._close()
            raise

    def _wake(self) -> None:
        with suppress(OSError), self._lock:
            if self._bell is not None:
                self._bell[1].send(b"!")

    def _answer_bell(self) -> None:
        assert self._bell is not None
        with suppress(OSError):
            while self._bell[0].recv(256):
                pass

    def _run(self) -> None:
        while (pause := self._pause()) is not None:
            self._turn(pause)

    def _turn(self, pause: float) -> None:
        """Wait up to `pause` seconds, then run what is due. A function of its own, so that no local variable
        keeps a finished duty alive while the thread sleeps."""
        while self._ended:
            _do(self._ended.pop().close)
        assert self._selector is not None
        for key, _ in self._selector.select(pause):
            file = key.fileobj
            assert isinstance(file, socket.socket | int)
            rest = self._resting.get(file)
            if _do(key.data, is_told=rest is not None):
                self._resting.pop(file, None)
            else:
                self._rest(file, key.data, rest)
        self._look_again()
        for duty in self._due():
            _do(duty.beat)

    def _rest(self, file: socket.socket | int, action: Callable[[], None], before: _Rest | None) -> None:
        """Stop polling a file for a while, as its unread data would wake the thread at once. The back-off
        doubles with each failure."""
        seconds = min(2 * before.seconds, LONGEST_REST) if before is not None else REST
        assert self._selector is not None
        with suppress(KeyError, ValueError, OSError):
            self._selector.unregister(file)
            self._resting[file] = _Rest(seconds, time.monotonic() + seconds, action)

    def _look_again(self) -> None:
        now = time.monotonic()
        for file, rest in list(self._resting.items()):
            if rest.ends <= now:
                self._resting[file] = rest._replace(ends=float("inf"))
                try:
                    self.on_readable(file, rest.action)
                except (KeyError, ValueError, OSError):  # it is closed
                    self._resting.pop(file, None)

    def _pause(self) -> float | None:
        """Return the seconds until the next duty is due. Without duties, release all resources and return
        None."""
        with self._lock:
            if self._ended:
                return 0.0
            if not self._duties:
                self._thread = None
                self._close()
                return None
            due = min(self._duties.values())[0]
            return max(0.0, min([due, *(rest.ends for rest in self._resting.values())]) - time.monotonic())

    def _due(self) -> list[Duty]:
        now = time.monotonic()
        with self._lock:
            due = [duty for duty, (at, _) in self._duties.items() if at <= now]
            self._duties.update({duty: (now + duty.interval, now + HASTE) for duty in due})
        return due

    def _close(self) -> None:
        if self._selector is not None:
            self._selector.close()
        for sock in self._bell or ():
            sock.close()
        self._selector, self._bell = None, None
        self._resting.clear()

    def forked(self) -> None:
        """Reset in a forked child, which has no threads and no duties: close the inherited file descriptors,
        which would keep the parent's connections open."""
        watched = () if self._selector is None else self._selector.get_map().values()
        files = {key.fileobj for key in watched} | self._resting.keys()
        for file in files:
            with suppress(OSError):
                file.close() if isinstance(file, socket.socket) else os.close(int(file))  # type: ignore[arg-type]
        self._close()
        self.__init__()  # type: ignore[misc]


class _Rest(NamedTuple):
    seconds: float
    ends: float
    action: Callable[[], None]


def _do(action: Callable[[], None], is_told: bool = False) -> bool:
    """Run a callback; return whether it succeeded. Exceptions are logged as warnings, or at DEBUG if an
    earlier failure of the same file has been logged (`is_told`)."""
    try:
        action()
    except Exception as error:  # the other parts must go on
        name = getattr(action, "__qualname__", action)
        level = logging.DEBUG if is_told else logging.WARNING
        log.log(level, "%s failed: %s: %s", name, type(error).__name__, error)
        return False
    return True


heart = Heart()
os.register_at_fork(after_in_child=heart.forked)
