"""The lease of a run folder: a small file names the job that saves there, so that a second job gets an error.

Two jobs that save into one run folder would delete each other's steps, as `keep=` removes old steps. So the
committer writes its job's name into the folder before its first save, renews the file every few seconds, and
checks before each commit, and before it removes a step, that the folder is still its own.

Another job takes the folder over at once if it is known that the owner has ended: it closed its
`Checkpoints`, its process is gone from this host, or it was an earlier start of the same job. If that is not
known, the other job waits until the file has not changed for a while. Clocks of hosts are not compared.

An owner whose folder was taken over gets an error at every later save, and removes no more steps, until it
closes its `Checkpoints` and creates a new one. So a job that has taken the folder from an owner that may be
alive does not delete the file when it closes: the file then names the last owner. A missing file was removed
by hand: that is no proof of a takeover, and the owner goes on with a warning.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from queue import Empty, SimpleQueue
from weakref import WeakSet, finalize

import msgspec

from holdfast._core.base.options import read_environment
from holdfast._core.base.threads import start_thread, within
from holdfast._core.base.values import NO_JSON
from holdfast._core.format.names import OWNER
from holdfast._core.ready import ready
from holdfast._core.roster.lost import by_kernel
from holdfast._core.roster.process import Identity, this_process
from holdfast._core.run.attempts import Attempts
from holdfast._core.store.base import VERSION_BYTES, NotFound, Store, capabilities
from holdfast.errors import Conflict, HoldfastError

log = logging.getLogger("holdfast")
BEAT = 10.0
"""Seconds between two renewals of the file."""
SILENT = 3.5 * BEAT
"""Seconds without a renewal after which an owner that this host can't observe counts as ended."""
# A name for this process: a pid may belong to another process later. A fork draws its own.
_PROCESS = secrets.token_hex(8)


class Owner(msgspec.Struct, frozen=True):
    """The content of the file."""

    job: str
    """The same on all ranks of a job, and different for every other job."""
    name: str
    """The launcher's name for the job, which restarts keep; "" if it has none."""
    restarts: int
    process: str
    rank: int
    host: str
    machine: str
    pid: int
    started: str
    """By the kernel's clock; distinguishes a later process with the same pid."""
    since: float
    """Wall-clock seconds, for messages."""
    beat: int
    took: bool = False
    """Whether this owner, or an earlier one, took the folder from an owner not known to have ended."""
    ended: bool = False
    """Whether it has released the folder."""
    under_way: tuple[str, ...] = ()
    """Attempts of saves that may still be committed (`attempts`)."""
    void: tuple[str, ...] = ()
    """Attempts that are known never to be committed: what they have left may be deleted."""
    doubtful: tuple[str, ...] = ()
    """Attempts of owners before this one that are not known to have ended."""
    version: str = ""
    """Random, new at each write: the last bytes of the file identify its version."""

    def __str__(self) -> str:
        begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.name or 'a job'} (rank {self.rank}, host {self.host}, pid {self.pid}, since {begun})"


class Lease:
    """The ownership of a run folder as this process sees it: one object per folder and process. Only the
    committer's process holds it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.one_user = False
        """Whether a second user of this process is refused while the first one needs the folder."""
        self._users: WeakSet[object] = WeakSet()
        self._lock = threading.Lock()
        self._mine: Owner | None = None
        self._tail: bytes | None = None
        """The version of the file, if it is known to be this process's."""
        self._attempts = Attempts() if capabilities(store).pins else None
        """Noted where `prune` can't tell by the times of files what is under way."""
        self._thread: threading.Thread | None = None
        self._calls: SimpleQueue[None] = SimpleQueue()
        """Wakes the thread. A SimpleQueue, because its `put` may be called by a finalizer at any point of any
        code."""

    def hold(
        self,
        user: object,
        job: str,
        rank: int,
        takeover: bool,
        tick: Callable[[], None],
        attempt: str = "",
    ) -> None:
        """Acquire or confirm the lease. Raises Conflict if another job has the folder, or has taken it over.

        user: an object that needs the folder until `leave`, or until it is garbage-collected.
        takeover: take the folder without waiting from an owner that is alive, or not known to have ended; but
            not from an owner that has taken it from this user.
        tick: called repeatedly while this waits.
        attempt: of a save that begins or goes on; the file names it on return, where `prune` needs that.
        """
        with self._lock:
            is_new, alone = user not in self._users, not self._users
            if self.one_user and is_new and not alone:
                raise Conflict(
                    f"Another Checkpoints of this process saves into {self.store.url}.",
                    hint="Close it first.",
                )
            if is_new:
                self._users.add(user)
                # Wakes `_beat` if a user is garbage-collected without `leave`. At exit `_give_back` does it.
                finalize(user, self._calls.put, None).atexit = False
            notes = self._attempts is not None and bool(attempt) and self._attempts.begin(attempt)
            if notes and self._rewrite():
                return
            owner, tail = self._read()
            if self._mine is not None and _is_ours(owner):
                if notes:
                    self._write(self._mine, tail)
                return
            # This process had the folder. A user created after the loss does not continue that lease.
            if self._mine is not None and not (is_new and (alone or takeover)):
                self._check_lost(owner, job)
            self._mine = None
            if owner is not None and not takeover and not _may_take(owner, job, self.store.url):
                self._wait_for_silence(owner, tick)
                owner, tail = self._read()
            took = owner is not None and (owner.took or not _has_ended(owner))
            if owner is not None and self._attempts is not None:
                self._attempts.inherit(owner.under_way, owner.void, owner.doubtful, gone=is_gone(owner))
            # Replace only the version just read: if two jobs take over at once, one of them gets Conflict.
            self._write(_me(job, rank, took), tail)
            self._thread = start_thread(self._beat, "holdfast-owner", rank)

    def _rewrite(self) -> bool:
        """Write the file anew, if it is still this process's; without reading it, which saves a request."""
        if self._mine is None or self._tail is None:
            return False
        with suppress(HoldfastError):
            self._write(self._mine, self._tail)
            return True
        self._tail = None
        return False

    def note_end(self, attempt: str, committed: bool) -> None:
        """Note how an attempt has ended; the next renewal writes it."""
        if self._attempts is not None:
            self._attempts.end(attempt, committed)

    def is_held(self) -> bool:
        """Return whether the folder is still this process's; False if that is unknown, so that nothing is
        removed."""
        with self._lock, suppress(HoldfastError):
            return _is_ours(self._read()[0])
        return False

    def leave(self, user: object) -> None:
        """Remove a user; the last one releases the folder."""
        with self._lock:
            self._users.discard(user)
            if self._users or self._mine is None:
                return
            self._give_up()
        if self._thread is not None:
            self._thread.join(1.0)

    def _check_lost(self, owner: Owner | None, job: str) -> None:
        """Raise Conflict if another job has taken the folder from this process, even if that job has
        ended."""
        if owner is None:
            log.warning(
                "%s/%s, which names the job that saves there, is gone or damaged. Whether another job has "
                "saved there can't be told; this job goes on, and writes it anew.",
                self.store.url,
                OWNER,
            )
        elif owner.job != job:
            since = "has ended since" if _has_ended(owner) else "may still be at work"
            raise Conflict(
                f"{self.store.url} was taken over by {owner} while this job was at work in it; that job "
                f"{since}. Nothing was saved or removed.",
                hint="Give every job a run folder of its own. Once that job has ended, close() and a new "
                "Checkpoints take the folder back.",
            )

    def _give_up(self) -> None:
        mine, self._mine, self._tail = self._mine, None, None
        self._calls.put(None)
        with suppress(HoldfastError):  # later jobs will see that this process has ended
            owner, tail = self._read()
            if not _is_ours(owner):
                return
            # A previous owner that may be alive must not find it free; nor must what `prune` needs be lost.
            if mine is not None and (mine.took or self._attempts):
                self._publish(msgspec.structs.replace(mine, ended=True), tail)
            else:
                self.store.delete(OWNER)

    def _wait_for_silence(self, owner: Owner, tick: Callable[[], None]) -> None:
        """Wait until an owner that this host can't observe stops renewing. Raises Conflict if it is alive."""
        log.warning(
            "%s belongs to %s, which can't be seen from here. It is taken over if that gives no sign of life "
            "for %.0f s.",
            self.store.url,
            owner,
            SILENT,
        )
        ends = time.monotonic() + SILENT
        while time.monotonic() < ends:
            tick()
            time.sleep(min(1.0, SILENT / 10))
            current, _ = self._read()
            if current is None or current.ended:
                return  # it has just released the folder
            if (current.process, current.beat) != (owner.process, owner.beat):
                raise _refusal(current, self.store.url)

    def _beat(self) -> None:
        while True:
            with suppress(Empty):
                self._calls.get(timeout=BEAT)
            with self._lock:
                # Released; or a later `hold` has started another thread.
                if self._mine is None or self._thread is not threading.current_thread():
                    return
                if not self._users:  # all were garbage-collected without `leave`
                    self._give_up()
                    return
                try:
                    owner, tail = self._read()
                    if not _is_ours(owner):
                        return  # the next save raises Conflict, or writes a file that was removed
                    self._write(msgspec.structs.replace(self._mine, beat=self._mine.beat + 1), tail)
                except Conflict:
                    return
                except HoldfastError as error:
                    # The next beat tries again: SILENT allows two failures in a row.
                    log.warning("The owner of %s could not be written: %s", self.store.url, error)

    def _read(self) -> tuple[Owner | None, bytes | None]:
        return read_owner(self.store)

    def _write(self, owner: Owner, replacing: bytes | None) -> None:
        self._tail = None  # unknown after an error
        self._tail = self._publish(owner, replacing)
        self._mine = owner

    def _publish(self, owner: Owner, replacing: bytes | None) -> bytes:
        """Put the file in place; return its version."""
        if self._attempts is not None:
            owner = msgspec.structs.replace(owner, **self._attempts.noted())
        # `version` is the last field, so it is at the end of the file, where `publish` compares versions.
        owner = msgspec.structs.replace(owner, version=secrets.token_hex(VERSION_BYTES))
        data = msgspec.json.encode(owner)
        self.store.publish(OWNER, data, replacing)
        return data[-VERSION_BYTES:]


def read_owner(store: Store) -> tuple[Owner | None, bytes | None]:
    """Read the owner of a run folder and the version of the file; a damaged file has no owner."""
    try:
        reader = store.open(OWNER)
    except NotFound:
        return None, None
    with closing(reader):
        # Bounded, because the file may be damaged; an owner takes a few hundred bytes, and 15 an attempt.
        data = reader.read(0, 1 << 16)
    try:
        return msgspec.json.decode(data, type=ready(Owner)), data[-VERSION_BYTES:]
    except NO_JSON:
        return None, data[-VERSION_BYTES:]


def _me(job: str, rank: int, took: bool) -> Owner:
    who, env = this_process(rank), read_environment()
    return Owner(
        job,
        env.job,
        env.restarts,
        _PROCESS,
        rank,
        who.host,
        who.machine,
        who.pid,
        who.started,
        time.time(),
        0,
        took,
    )


def _is_ours(owner: Owner | None) -> bool:
    return owner is not None and owner.process == _PROCESS and not owner.ended


def _has_ended(owner: Owner) -> bool:
    """Return whether it is known that the owner has ended, or has released the folder."""
    return owner.ended or _lives(owner) is False


def is_gone(owner: Owner) -> bool:
    """Return whether it is known that the owner's process has ended."""
    return _lives(owner) is False or _is_earlier_start(owner)


def _is_earlier_start(owner: Owner) -> bool:
    # torchrun and Slurm end one start of a job before they begin the next.
    env = read_environment()
    return bool(owner.name and owner.name == env.job and owner.restarts < env.restarts)


def _may_take(owner: Owner, job: str, url: str) -> bool:
    """Return whether the owner is this job, or is known to have ended. Raises Conflict if it is alive."""
    if owner.job == job or owner.ended:
        return True
    alive = _lives(owner)
    if alive:  # regardless of the name: two jobs can have the same
        raise _refusal(owner, url)
    return alive is False or _is_earlier_start(owner)


def _lives(owner: Owner) -> bool | None:
    """Return whether the owner's process is alive; None if this host can't tell."""
    there = by_kernel(Identity(0, pid=owner.pid, machine=owner.machine, started=owner.started)).there
    me = this_process(0)
    if there and (owner.pid, owner.started) == (me.pid, me.started):
        # This process: `exec` keeps pid and start time (a fork has another pid), so an owner with another
        # `process` value is the program that this process ran before `exec`.
        return owner.process == _PROCESS
    return there


def _refusal(owner: Owner, url: str) -> Conflict:
    return Conflict(
        f"The run folder {url} belongs to another job that is at work: {owner}. Nothing was saved: two jobs "
        "in one folder delete each other's steps.",
        hint="Give every job a run folder of its own; or end that job, or pass takeover=True, which makes "
        "that job's saves fail.",
    )


_leases: dict[str, Lease] = {}
_known = threading.Lock()


def lease_of(store: Store) -> Lease:
    """Return this process's lease object of a folder."""
    with _known:
        if not _leases:
            atexit.register(_give_back)  # Holdfast's saves have ended then (`exits`)
        return _leases.setdefault(store.url, Lease(store))


def _give_back() -> None:
    """Release all leases at process exit, if storage responds."""
    for lease in list(_leases.values()):
        for user in list(lease._users):
            with suppress(HoldfastError):
                # Storage may hang, but the process must be able to end.
                within(5.0, f"giving back {lease.store.url}", partial(lease.leave, user))


def _forked() -> None:
    """Drop all leases in a fork: it does not hold them."""
    global _PROCESS
    _PROCESS = secrets.token_hex(8)
    for lease in _leases.values():  # a thread of the parent may hold the lock
        lease._lock, lease._mine, lease._thread = threading.Lock(), None, None
    _leases.clear()


os.register_at_fork(after_in_child=_forked)
