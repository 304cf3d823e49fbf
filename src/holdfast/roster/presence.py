"""Presence: one message per rank with its identity and its work, refreshed by a beat while it works.

`at/<rank>` contains host, pid, and for each operation of the rank its phase, the bytes moved so far, and the
ranks that it waits for, if it does not work. Errors quote it about a missing rank. The beat has a thread and
a client of its own, so it continues while the rank is deep in a system call; a rank that is stopped or gone
sends no beat. On the same host, the end of a process is seen at once.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from weakref import WeakKeyDictionary, ref

from holdfast.errors import RankInfo, RosterLost
from holdfast.roster.base import Roster
from holdfast.threads import start_thread
from holdfast.values import Message


def at_key(rank: int) -> str:
    return f"at/{rank}"


def _read(path: str) -> str:
    with suppress(OSError), open(path, encoding="ascii", errors="replace") as file:
        return file.read().strip()
    return ""


def _started(pid: int) -> str:
    """Return a process's start time in clock ticks, which tells a reused pid from the old one; '' if it is
    gone."""
    stat = _read(f"/proc/{pid}/stat")
    # The process name, in parentheses, may contain blanks and parentheses itself. So fields are counted from
    # the last one: first the state, and the start time (field 22 of proc(5)) at index 19.
    fields = stat.rpartition(")")[2].split()
    # A zombie has ended; only its parent has not asked for its exit code yet.
    return "" if len(fields) < 20 or fields[0] in "ZX" else fields[19]


@cache
def _process(pid: int) -> tuple[str, str, str]:
    """Return host, machine and start time of this process. The pid is an argument because a fork has
    another."""
    # Two processes with the same machine can see each other's pids. The host name would not do: a container
    # has its own pid namespace, in which pids mean other processes.
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    machine = f"{_read('/proc/sys/kernel/random/boot_id')}/{namespace}"
    return socket.gethostname(), machine, _started(pid)


class Identity:
    """What does not change while the process lives."""

    def __init__(self, rank: int) -> None:
        self.rank, self.pid = rank, os.getpid()
        self.host, self.machine, self.started = _process(self.pid)

    def alive(self, message: Message) -> bool | None:
        """Return whether the process behind a message is alive; None if this host can't see it."""
        if not self.started or message.get("machine") != self.machine:
            return None
        return _started(int(message.get("pid", 0))) == message.get("started")


def describe(rank: int, message: Message | None, wall: float, note: str = "", key: str = "") -> RankInfo:
    """Describe a rank for an error at the time `wall`: what its message says of the operation `key`, or else
    of its last one."""
    if message is None:
        return RankInfo(rank, note=note)
    operations: dict[str, Message] = message.get("operations") or {}
    # If the rank is not in `key`, quote the operation that it began last.
    doing = operations.get(key) or next(reversed(operations.values()), None)
    operation = doing or message.get("last") or {}
    phase = f"{operation.get('title', '')}: {operation.get('phase', '')}" if operation else "idle"
    since = max(0.0, wall - float(message.get("wall", 0.0)))
    return RankInfo(
        rank,
        str(message.get("host", "")),
        int(message.get("pid", 0)),
        phase if doing or not operation else f"idle since {phase}",
        round(since, 2),
        "; ".join(part for part in (note, str((doing or {}).get("doing", ""))) if part),
    )


class Presence:
    """One operation of this rank, as the rank's message shows it."""

    def __init__(self, roster: Roster, title: str, interval: float) -> None:
        self.beacon = beacon_of(roster)
        self.identity = self.beacon.identity
        self.operation, self.title, self.interval = "", title, interval
        self.about: Message = {}
        """Identifies the call, beside `key` (`protocol.rendezvous.CallSignature`)."""
        self.phase, self.progress = "entered", 0
        self.waiting_for: list[int] | None = None
        self.is_working = False
        self.more: Callable[[], Message] = dict
        """Returns more of the message: `doing`, which errors quote, and values for programs."""
        self.watched: str | None = None
        self.seen: Message | None = None
        """The message under `watched`, once the beat has found it."""
        self.noticed = threading.Event()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Mark the code inside as this rank's own work or a callback; code outside talks to the message
        store."""
        self.is_working = True
        try:
            yield
        finally:
            self.is_working = False

    def wait_for(self, ranks: Sequence[int] | None) -> None:
        """Note the ranks that this rank waits for; None if it works."""
        self.waiting_for = None if ranks is None else list(ranks)

    def record(self) -> Message:
        """Return this operation's part of the rank's message."""
        return {
            **self.about,
            "key": self.operation,
            "title": self.title,
            "phase": self.phase,
            "waiting_for": self.waiting_for,
            "progress": self.progress,
            **self.more(),
        }

    def begin(self, operation: str, watched: str | None) -> None:
        """Show this rank in an operation. If `watched`, the key of its outcome, is given, beat and look for
        that."""
        self.operation, self.watched = operation, watched
        self.beacon.add(self)
        self.beacon.send()

    def leave(self) -> None:
        """Show that the operation is over on this rank, so that errors of others can quote how it ended."""
        if self.operation:
            self.beacon.remove(self)
            with suppress(RosterLost):
                self.beacon.send()

    def stop(self) -> None:
        """End the beat, unless another operation needs it. A beat that is stuck in the message store ends by
        itself."""
        self.beacon.remove(self)
        self.beacon.join(0.2)


class Beacon:
    """This rank's message on one lane of a roster: its identity, and all operations that it is in.

    Several threads begin and end operations; one message contains all of them, so that none hides another.
    """

    def __init__(self, roster: Roster) -> None:
        self.identity = Identity(roster.rank)
        self._roster = ref(roster)  # which keeps this
        self._operations: dict[str, Presence] = {}
        self._last: Message | None = None
        self._beats = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended: threading.Thread | None = None
        """The last thread, which may not have quite ended."""

    def message(self) -> Message:
        who = self.identity
        with self._changed:
            operations = dict(self._operations)
            # Others compare this count, never `wall`: clocks of hosts differ.
            self._beats += 1
        return {
            "rank": who.rank,
            "host": who.host,
            "pid": who.pid,
            "machine": who.machine,
            "started": who.started,
            "operations": {key: presence.record() for key, presence in operations.items()},
            "last": self._last,
            "beat": self._beats,
            "wall": time.time(),
        }

    def send(self, client: Roster | None = None) -> None:
        roster = client or self._roster()
        if roster is not None:
            # Not under the lock: the store may not answer, and `remove` must not wait for it.
            roster.put(at_key(self.identity.rank), self.message())

    def add(self, presence: Presence) -> None:
        """Show an operation from now on. Raises HoldfastError if a beat is needed and no thread can be
        started."""
        with self._changed:
            self._operations[presence.operation] = presence
            # A call of one rank needs no beat: nobody waits for it.
            if presence.watched is None or self._thread is not None:
                self._changed.notify_all()  # its interval may be shorter
                return
            self._thread = start_thread(self._beat, "holdfast-beat", self.identity.rank)

    def remove(self, presence: Presence) -> None:
        with self._changed:
            if self._operations.pop(presence.operation, None) is not None:
                # Kept in the message: an error can say how this rank's last call ended.
                self._last = presence.record()
            self._changed.notify_all()

    def join(self, seconds: float) -> None:
        """Wait for the beat to end, if no operation needs it."""
        with self._changed:
            thread = (self._thread or self._ended) if not self._beating() else None
        if thread is not None:
            thread.join(seconds)

    def _beating(self) -> list[Presence]:
        return [presence for presence in self._operations.values() if presence.watched is not None]

    def _beat(self) -> None:
        with suppress(RosterLost):  # the operation itself meets the same error and raises it
            while self._due():
                roster = self._roster()
                if roster is None:
                    break
                # A client of its own, which a stuck call of the protocol can't hold up.
                client = roster.second()
                self.send(client)
                # The beat looks for the outcome as well, because the protocol's own thread may be stuck.
                with self._changed:
                    unseen = [presence for presence in self._beating() if not presence.noticed.is_set()]
                messages = client.get([str(presence.watched) for presence in unseen])
                for presence, message in zip(unseen, messages, strict=True):
                    if message is not None:
                        presence.seen = message
                        presence.noticed.set()
                # No reference while this thread waits: the roster must be able to go.
                del roster, client
        with self._changed:
            # After a lost store: the next operation starts a new beat.
            if self._thread is threading.current_thread():
                self._thread = None

    def _due(self) -> bool:
        """Wait until the next beat; return False if no operation needs one."""
        with self._changed:
            begun = time.monotonic()
            while True:
                beating = self._beating()
                if not beating:
                    self._ended, self._thread = self._thread, None
                    return False
                left = begun + min(presence.interval for presence in beating) - time.monotonic()
                if left <= 0:
                    return True
                self._changed.wait(left)


_beacons: WeakKeyDictionary[Roster, Beacon] = WeakKeyDictionary()
_beacons_lock = threading.Lock()


def beacon_of(roster: Roster) -> Beacon:
    """Return this rank's beacon on a lane. A forked process gets its own."""
    with _beacons_lock:
        known = _beacons.get(roster)
        if known is None or known.identity.pid != os.getpid():
            known = _beacons[roster] = Beacon(roster)
        return known
