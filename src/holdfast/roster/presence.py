"""Who a rank is and where it is: one message a rank, refreshed by a beat while it works.

`at/<rank>` says host, pid, operation, phase, bytes moved so far, and whom the rank waits for, if
it does not work. That is what an error quotes about a rank that is missing. A beat comes from a thread of
its own with a client of its own, so it goes on while the rank is deep in a system call; a rank
that is stopped or gone falls silent. On one host a process that has ended is seen at once.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from holdfast.errors import RankInfo, RosterLost
from holdfast.roster.base import Message, Roster


def at_key(rank: int) -> str:
    return f"at/{rank}"


def _read(path: str) -> str:
    with suppress(OSError), open(path, encoding="ascii", errors="replace") as file:
        return file.read().strip()
    return ""


def _started(pid: int) -> str:
    """A process's start time in clock ticks; tells a reused pid from the old one. '' if gone."""
    stat = _read(f"/proc/{pid}/stat")
    fields = stat.rpartition(")")[2].split()
    return "" if len(fields) < 20 or fields[0] in "ZX" else fields[19]


def _machine() -> str:
    """Equal for two processes that can see each other's pids."""
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{_read('/proc/sys/kernel/random/boot_id')}/{namespace}"


class Identity:
    """What does not change while the process lives."""

    def __init__(self, rank: int) -> None:
        self.rank, self.pid = rank, os.getpid()
        self.host, self.machine, self.started = socket.gethostname(), _machine(), _started(os.getpid())

    def alive(self, message: Message) -> bool | None:
        """Is the process behind a message alive? None where that can't be seen from here."""
        if not self.started or message.get("machine") != self.machine:
            return None
        return _started(int(message.get("pid", 0))) == message.get("started")


def describe(rank: int, message: Message | None, wall: float, note: str = "") -> RankInfo:
    """A presence message as an error quotes it at the time `wall`."""
    if message is None:
        return RankInfo(rank, note=note)
    since = max(0.0, wall - float(message.get("wall", 0.0)))
    return RankInfo(
        rank,
        str(message.get("host", "")),
        int(message.get("pid", 0)),
        str(message.get("phase", "")),
        round(since, 2),
        "; ".join(part for part in (note, str(message.get("doing", ""))) if part),
    )


class Presence:
    """This rank's message: changed by the operation, sent by a beat."""

    def __init__(self, roster: Roster, title: str, interval: float) -> None:
        self.identity = Identity(roster.rank)
        self.operation, self.title = "", title
        self.phase, self.progress = "entered", 0
        self.waiting_for: list[int] | None = None
        self.more: Callable[[], Message] = dict
        """What else the message says: `doing`, as errors quote it, and values for programs."""
        self._roster, self._interval = roster, interval
        self._beats = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.watched: str | None = None
        self.seen: Message | None = None
        """The message under `watched`, once the beat has found it."""
        self.noticed = threading.Event()

    def wait_for(self, ranks: Sequence[int] | None) -> None:
        """Note whom this rank waits for; None: nobody, it works."""
        self.waiting_for = None if ranks is None else list(ranks)

    def message(self) -> Message:
        who = self.identity
        return {
            "rank": who.rank,
            "host": who.host,
            "pid": who.pid,
            "machine": who.machine,
            "started": who.started,
            "operation": self.operation,
            "phase": f"{self.title}: {self.phase}",
            "waiting_for": self.waiting_for,
            "progress": self.progress,
            "beat": self._beats,
            "wall": time.time(),
            **self.more(),
        }

    def send(self) -> None:
        self._beats += 1
        self._roster.put(at_key(self.identity.rank), self.message())

    def begin(self, operation: str, watched: str | None) -> None:
        """Show this rank in an operation. With `watched`, the operation's outcome: beat, and look for it."""
        self.operation, self.watched = operation, watched
        self.send()
        if watched is not None and not self._stop.is_set():
            self._thread = threading.Thread(target=self._beat, name="holdfast-beat", daemon=True)
            self._thread.start()

    def leave(self) -> None:
        """Say that this rank does nothing any more; whoever misses it later can quote that."""
        self._stop.set()
        self.phase, self.waiting_for = f"idle since {self.phase}", None
        with suppress(RosterLost):
            if self.operation:
                self.send()

    def _beat(self) -> None:
        try:
            client = self._roster.second()
            while not self._stop.wait(self._interval):
                self._beats += 1
                client.put(at_key(self.identity.rank), self.message())
                if self.watched and not self.noticed.is_set():
                    self.seen = client.get([self.watched])[0]
                    if self.seen is not None:
                        self.noticed.set()
        except RosterLost:
            return  # the operation itself meets the same loss and says so

    def stop(self) -> None:
        """End the beat; one that is stuck in the message store is left to end by itself."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=0.2)
