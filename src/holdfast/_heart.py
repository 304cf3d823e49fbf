"""The one thread that Holdfast keeps beside the program's: it beats, watches and answers for all of its
parts.

A part hands in a `Duty`, which is done at its interval, and files that are to be looked at when they can be
read. The thread begins with the first duty and ends with the last. A duty must not wait for long: it delays
the others. The thread does not run while the process is stopped or a call holds the GIL: no duty may take its
own absence for the silence of others.
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
from typing import Any, NamedTuple, Protocol

from holdfast._threads import start_thread

log = logging.getLogger("holdfast")


def _tell(record: logging.LogRecord) -> None:
    """Handle a record of the logger. Where the program has closed its stderr, logging raises: in the program,
    and on this thread, which would end with that."""
    with suppress(Exception):
        type(log).handle(log, record)


log.handle = _tell  # type: ignore[method-assign]
JOIN = 0.5
"""Seconds to wait for the thread to end after the last duty."""
REST, LONGEST_REST = 1.0, 60.0
"""Seconds for which a file is not looked at whose action has failed, the first time and at most."""
HASTE = 0.1
"""Seconds between two times of one duty, at least."""
NAME = "holdfast-heart"


class Duty(Protocol):
    """Work that the heart does again and again."""

    interval: float
    """Seconds between two times; may change."""

    def beat(self) -> None:
        """Do it once. What it raises is logged."""
        ...

    def close(self) -> None:
        """Release what it holds: nothing is done after that."""
        ...


class Heart:
    """See the module. All methods can be called on any thread."""

    def __init__(self) -> None:
        self._duties: dict[Duty, tuple[float, float]] = {}
        """When each is due, and how early at most."""
        self._ended: list[Duty] = []
        """Those that are to be closed."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._selector: selectors.BaseSelector | None = None
        self._bell: tuple[socket.socket, socket.socket] | None = None
        self._resting: dict[socket.socket | int, _Rest] = {}
        """Files whose action has failed the last time."""

    def begin(self, duty: Duty, delay: float | None = None) -> None:
        """Do this duty from now on, first after `delay` (default: its interval). Raises HoldfastError if
        there can be no more threads."""
        with self._lock:
            self._duties[duty] = time.monotonic() + (duty.interval if delay is None else delay), 0.0
            if self._thread is None:
                self._start()
        self._wake()

    def end(self, duty: Duty) -> None:
        """Stop doing this duty. Without any left, the thread ends before this returns, if it can."""
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
        """Do this duty soon: `HASTE` after the last time, however often this is called."""
        with self._lock:
            if duty in self._duties:
                due, earliest = self._duties[duty]
                self._duties[duty] = min(due, earliest), earliest
        self._wake()

    def on_readable(self, file: socket.socket | int, action: Callable[[], None]) -> None:
        """Call `action` on the thread whenever the file can be read. Call this on the thread, or before its
        duty begins."""
        if self._selector is not None and file not in self._selector.get_map():
            self._selector.register(file, selectors.EVENT_READ, action)

    def forget(self, file: socket.socket | int) -> None:
        """Look at this file no more; before it is closed."""
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
        """Apart from `_run`, whose frame would hold the last duty, and what this holds, until the next."""
        while self._ended:
            _do(self._ended.pop().close)
        assert self._selector is not None
        for key, _ in self._selector.select(pause):
            file: Any = key.fileobj
            rest = self._resting.get(file)
            if _do(key.data, is_told=rest is not None):
                self._resting.pop(file, None)
            else:
                self._rest(file, key.data, rest)
        self._look_again()
        for duty in self._due():
            _do(duty.beat)

    def _rest(self, file: socket.socket | int, action: Callable[[], None], before: _Rest | None) -> None:
        """Do not look at a file for a while: what can be read there would wake the thread at once."""
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
        """Return the seconds to the next duty; None, and end, if there is none."""
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
        """In a fork, which has none of its parent's threads and none of its duties: close what would keep its
        parent's connections open."""
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
    """Return whether it has succeeded; what it raises is told, but for `is_told`."""
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
