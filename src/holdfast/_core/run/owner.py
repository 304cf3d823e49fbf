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
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from weakref import WeakSet, finalize

import msgspec

from holdfast._core.base.deadline import Deadline
from holdfast._core.base.options import read_environment
from holdfast._core.base.threads import members, start_thread, within
from holdfast._core.format.names import OWNER
from holdfast._core.roster.lost import by_kernel
from holdfast._core.roster.process import Identity, this_process
from holdfast._core.run.attempts import Attempts
from holdfast._core.run.owner_file import Owner, read_owner
from holdfast._core.store.base import VERSION_BYTES, Store, bounded, capabilities
from holdfast.errors import Conflict, HoldfastError

log = logging.getLogger("holdfast")
BEAT = 10.0
"""Seconds between two renewals of the file."""
GIVING_UP = 5.0
"""Seconds that the requests of a release may take."""
TOLD_AGAIN = 600.0
"""Seconds until a renewal that goes on failing for one reason is warned of again."""
SILENT = 3.5 * BEAT
"""Seconds without a renewal after which an owner that this host can't observe counts as ended."""
# A name for this process: a pid may belong to another process later. A fork draws its own.
_PROCESS = secrets.token_hex(8)


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
        """Remove a user; the last one releases the folder, if storage responds within GIVING_UP."""
        with suppress(HoldfastError):
            within(GIVING_UP, f"giving back {self.store.url}", partial(self._leave, user))

    def _leave(self, user: object) -> None:
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
        store = bounded(self.store, Deadline(GIVING_UP))
        with suppress(HoldfastError):  # later jobs will see that this process has ended
            owner, tail = read_owner(store)
            if not _is_ours(owner):
                return
            assert mine is not None
            # A previous owner that may be alive must not find it free; nor must what `prune` needs be lost.
            if not mine.took and not self._attempts:
                with suppress(HoldfastError):  # this job may have no right to delete
                    store.delete(OWNER)
                    return
            self._publish(store, msgspec.structs.replace(mine, ended=True), tail)

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
        told, again = "", 0.0
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
                # A save that begins waits for the lock, and so does `leave`.
                store = bounded(self.store, Deadline(BEAT))
                try:
                    owner, tail = read_owner(store)
                    if not _is_ours(owner):
                        return  # the next save raises Conflict, or writes a file that was removed
                    self._write(msgspec.structs.replace(self._mine, beat=self._mine.beat + 1), tail, store)
                except Conflict:
                    return
                except HoldfastError as error:
                    # The next beat tries again: SILENT allows two failures in a row.
                    now, kind = time.monotonic(), re.sub(r"[0-9]+", "", error.message)
                    if kind != told or now >= again:
                        told, again = kind, now + TOLD_AGAIN
                        log.warning("The owner of %s could not be written: %s", self.store.url, error)
                else:
                    told = ""

    def _read(self) -> tuple[Owner | None, bytes | None]:
        return read_owner(self.store)

    def _write(self, owner: Owner, replacing: bytes | None, store: Store | None = None) -> None:
        store = store or self.store
        self._tail = None  # unknown after an error
        try:
            self._tail = self._publish(store, owner, replacing)
        except Conflict:
            # A renewal of this process that was given up may have come late.
            current, tail = read_owner(store)
            if not _is_ours(current):
                raise
            self._tail = self._publish(store, owner, tail)
        self._mine = owner

    def _publish(self, store: Store, owner: Owner, replacing: bytes | None) -> bytes:
        """Put the file in place; return its version."""
        if self._attempts is not None:
            owner = msgspec.structs.replace(owner, **self._attempts.noted())
        # `version` is the last field, so it is at the end of the file, where `publish` compares versions.
        owner = msgspec.structs.replace(owner, version=secrets.token_hex(VERSION_BYTES))
        data = msgspec.json.encode(owner)
        store.publish(OWNER, data, replacing)
        return data[-VERSION_BYTES:]


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
        # The copy of a folder at work has this file, and no path tells the two apart: it differs by host.
        f"that job's saves fail. If this is a copy of that job's folder, delete {OWNER} in the copy: it was "
        "copied, too.",
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
    """Release all leases at process exit, if storage responds: it may hang, but the process must be able to
    end."""
    releases = []
    for lease in list(_leases.values()):
        for user in members(lease._users):
            with suppress(HoldfastError):
                releases.append(start_thread(partial(lease._leave, user), "holdfast-release"))
    ends = time.monotonic() + GIVING_UP
    for release in releases:
        release.join(max(ends - time.monotonic(), 0.0))


def _forked() -> None:
    """Drop all leases in a fork: it does not hold them."""
    global _PROCESS
    _PROCESS = secrets.token_hex(8)
    for lease in _leases.values():  # a thread of the parent may hold the lock
        lease._lock, lease._mine, lease._thread = threading.Lock(), None, None
    _leases.clear()


os.register_at_fork(after_in_child=_forked)
