"""Asynchronous saves of this process: its arena, its writer process, and what is under way.

The caller's thread copies the state and goes on. A thread of its own runs the same protocol as a synchronous save, on
messages of its own (a lane of the roster), and its storage work is done by the writer process. So no rank enters a
collective for it, training waits for nothing but the copy, and a failed save is the same error on all ranks.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from holdfast.adapters.memory import BytesMemory
from holdfast.errors import BadInput, CommitUnconfirmed, HoldfastError, RosterLost
from holdfast.flow.arena import Arena
from holdfast.flow.devices import DeviceCopies
from holdfast.flow.exits import ENDED_BY_INTERRUPT, Failure, Stage, at_exit, uncaught
from holdfast.flow.helper import WriterProcess
from holdfast.flow.operation import read_state
from holdfast.flow.pending import Pending
from holdfast.flow.save import Save, SaveReport, Work
from holdfast.flow.stage import Into, Staged, stage, stage_wave, witnessed
from holdfast.flow.wire import Job
from holdfast.flow.write import WrittenFile, discard, split_files
from holdfast.flow.writer import write_job
from holdfast.layout.tensor import OBJECT
from holdfast.options import Options
from holdfast.plan.holding import Replica
from holdfast.plan.save import plan_save
from holdfast.store.local import LocalStore

log = logging.getLogger("holdfast")
PutDown = Callable[[Work, list[Replica], dict[str, Any]], list[WrittenFile]]
EXIT_GRACE = 30.0
"""Seconds that pending saves are waited for when the process ends by an exception."""


class Background:
    """One save under way at most; the next waits for it. Arenas and processes are not shared between slots."""

    def __init__(self) -> None:
        self._arena: Arena | None = None
        self._copying = False
        """Does a thread in the background copy into the arena?"""
        self._writer = WriterProcess()
        self._pending: Pending | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def save(
        self,
        make: Callable[[], Save],
        path: str,
        step: int | None,
        budget: int | None,
        retries: int,
    ) -> Pending:
        """Stage what `make` reads, and save it in the background. Waits for the save before this one."""
        if self._pid != os.getpid():
            raise BadInput(
                "This process was forked after an asynchronous save; it can't go on with its parent's."
            )
        with self._lock:
            self._wait_for_the_last()
            pending = Pending(path, step)
            save = make()
            # A process that can't be started is told to the others, too: else they would be one call ahead from then on.
            save.work.trouble = save.work.trouble or read_state(self._writer.start, save.work.held.rank)
            into = DeviceCopies(save.work.held).into
            staged = self._stage(save, budget, into)
            pending.attempt(save)
            self._pending = pending
            if staged is not None:
                _forget(save.work)
                pending.has_staged()
                put_down = partial(self._put_down, staged)
            else:
                assert budget is not None
                put_down = partial(self._in_waves, pending, budget, into)
                retries = 0  # the state that another attempt would copy is not this one any more
            pending.start(lambda: self._run(pending, save, put_down, retries))
            try:
                pending.staging_completion.result()  # in waves it takes as long as the writing of all but the last
            except BaseException:
                pending.cancel()
                raise
        interrupt = save.work.trouble.__cause__ if save.work.trouble is not None else None
        if interrupt is not None and not isinstance(interrupt, Exception):
            raise interrupt  # Ctrl-C while the state was read; the others hear of it
        return pending

    def _wait_for_the_last(self) -> None:
        if self._pending is not None:
            self._pending.wait()  # whoever holds it is told how it ended
            self._pending = None

    def _stage(self, save: Save, budget: int | None, into: Into) -> Staged | None:
        """What was copied; None if it has to be copied in waves."""
        work = save.work
        found: list[Staged | None] = []

        def copy() -> None:
            if self._arena is None:
                self._arena = Arena()
            begun = time.monotonic()
            staged = stage(work.held, work.options, self._arena, budget, into)
            found.append(staged)
            if staged is not None:
                seconds = time.monotonic() - begun
                save.operation.emit("staged", bytes_done=staged.nbytes, seconds=seconds)

        if work.trouble is None:
            work.trouble = read_state(copy, work.held.rank)
        return found[0] if found else Staged([])

    def _run(self, pending: Pending, save: Save, put_down: PutDown, retries: int) -> SaveReport:
        for left in range(retries, -1, -1):
            save.work.put_down = put_down
            try:
                return self._run_once(save)
            except (CommitUnconfirmed, RosterLost, BadInput):
                raise
            except HoldfastError as error:
                if not left or pending.cancelled:
                    raise
                log.warning("%s; it is tried again (%d left).", error.message, left)
                save.begin_again()
                pending.attempt(save)
        raise AssertionError("unreachable")

    def _run_once(self, save: Save) -> SaveReport:
        try:
            return save.run(beside_training=True)
        except BaseException:
            if self._writer.busy or self._copying:  # the thread that does it was left behind
                self._writer.kill()
                self._arena, self._copying = (
                    None,
                    False,
                )  # what it still copies must not get into the next save
            raise

    def _put_down(
        self, staged: Staged, work: Work, replicas: list[Replica], about: dict[str, Any]
    ) -> list[WrittenFile]:
        """Write what was copied."""
        return self._write(work, replicas, about, work.options, staged, None)

    def _in_waves(
        self,
        pending: Pending,
        budget: int,
        into: Into,
        work: Work,
        replicas: list[Replica],
        about: dict[str, Any],
    ) -> list[WrittenFile]:
        """Copy as much as the budget allows, write it as a file, and so on; the caller waits for the last copy."""
        arena = self._arena
        assert arena is not None
        held, limit = work.held, min(work.options.max_file_bytes, budget)
        options = replace(work.options, columns=(), max_file_bytes=limit)
        plan = plan_save(held, replicas, options)
        cuts, digests = split_files(plan, options), witnessed(held, plan)
        made: list[WrittenFile] = []
        for part, cut in enumerate(cuts):
            self._copying = True
            staged = stage_wave(held, plan, cut, arena, into)
            staged.witnessed = digests
            work.operation.still_wanted()
            self._copying = False
            if part == len(cuts) - 1:
                _forget(work)
                pending.has_staged()
            made += self._write(work, replicas, about, options, staged, part)
        return made

    def _write(
        self,
        work: Work,
        replicas: list[Replica],
        about: dict[str, Any],
        options: Options,
        staged: Staged,
        only: int | None,
    ) -> list[WrittenFile]:
        """Files from the arena, by the writer process; by this thread where only this process sees the store."""
        assert self._arena is not None
        held, store = work.held, work.store
        job = Job(
            number=0,
            arena=0,
            size=self._arena.size,
            store=store.url,
            rank=held.rank,
            specs=held.specs,
            boxes=held.boxes,
            replicas=replicas,
            plain=held.plain,
            lates=held.lates,
            base=staged.base,
            witnessed=[(*key, *value) for key, value in staged.witnessed.items()],
            about=about,
            options=options,
            only=only,
        )

        def planned(total: int) -> None:
            work.total = total

        if not isinstance(store, LocalStore):
            return write_job(job, self._arena, store, planned, work.moved)
        try:
            return self._writer.write(self._arena, job, planned, work.moved, work.operation.still_wanted)
        except BaseException:
            self._writer.kill()  # it may be stuck, and what it still wrote would be left behind
            if not work.options.keep_failed:
                _sweep(store, about["attempt"], held.rank)
            raise

    def drain(self) -> Failure | None:
        """At the end of the process: wait for what is under way; that it failed is the process's failure, unless somebody has asked."""
        try:
            return None if self._pending is None else _outcome(self._pending)
        finally:
            self._writer.kill()


def _outcome(pending: Pending) -> Failure | None:
    """Wait for a save at the end of the process; why the process must not end as if it were committed."""
    # After an exception nobody is to wait for long; otherwise the save's own deadline bounds it.
    timeout = EXIT_GRACE if uncaught() is not None else None
    try:
        ended = pending.wait(timeout)
    except KeyboardInterrupt:
        said = f"{pending.who} ends, and its last save to {pending.path} was not committed yet: Ctrl-C at the end of the process."
        return Failure(said, ENDED_BY_INTERRUPT)
    met = (
        pending.upload_completion.failure() if ended else HoldfastError(f"It took longer than {timeout:g} s.")
    )
    if met is None or pending.upload_completion.seen or pending.cancelled is not None:
        return None
    if pending.only_warns:
        log.warning("A save in the background failed: %s", met)
        return None
    said = f"{pending.who} ends, and its last save to {pending.path} failed; nobody had asked how it ended (close() or committed()):"
    if log.hasHandlers():
        log.error("%s %s", said, met)
    return Failure("\n".join([said, *traceback.format_exception_only(met)]).rstrip())


def _forget(work: Work) -> None:
    """What was copied is not held on to, but for objects, which are compared with other ranks'."""
    held = work.held
    held.memory = [
        memory if spec.kind == OBJECT else _COPIED
        for spec, memory in zip(held.specs, held.memory, strict=True)
    ]


def _sweep(store: LocalStore, attempt: str, rank: int) -> None:
    """Delete what a writer that was ended left behind."""
    with suppress(HoldfastError):
        mine = f"{attempt}-r{rank:05d}"
        discard(store, [f"data/{name}" for name in store.list("data") if name.startswith(mine)])


_COPIED = BytesMemory(b"")
_slots: dict[int, Background] = {}
_lock = threading.Lock()


def background(slot: int = 0) -> Background:
    """This process's. There are as many as saves that may be under way at once."""
    with _lock:
        known = _slots.get(slot)
        if known is None or known._pid != os.getpid():
            known = _slots[slot] = Background()
            at_exit(Stage.SAVES, known.drain)
        return known


def wait_for_saves(timeout: float) -> list[Pending]:
    """Wait for what is under way in this process; returns those that are not done by then."""
    ends = time.monotonic() + timeout
    last = last_saves()
    for pending in last:
        pending.wait(max(0.0, ends - time.monotonic()))  # whoever holds it is told how it ended
    return [pending for pending in last if not pending.done()]


def last_saves() -> list[Pending]:
    """The last save of each slot of this process, under way or not."""
    known = [found._pending for found in list(_slots.values()) if found._pid == os.getpid()]
    return [pending for pending in known if pending is not None]


def lane(slot: int = 0) -> str:
    """The lane of the roster on which saves of a slot meet those of other ranks."""
    return f"async-{slot}"
