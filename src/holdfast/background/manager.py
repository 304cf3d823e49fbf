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
from weakref import finalize

from holdfast.background.arena import Arena
from holdfast.background.gpu_copy import DeviceCopies
from holdfast.background.pending import Pending
from holdfast.background.stage import Into, Staged, stage, stage_wave, witnessed
from holdfast.background.writer_client import WriterProcess
from holdfast.background.writer_messages import Job
from holdfast.background.writer_process import write_job
from holdfast.errors import BadInput, CommitUnconfirmed, HoldfastError, RosterLost
from holdfast.exits import ENDED_BY_INTERRUPT, Failure, Stage, at_exit, not_at_exit, uncaught
from holdfast.format.names import DATA
from holdfast.io.file_writer import WrittenFile, discard, split_files
from holdfast.layout.tensor import OBJECT
from holdfast.options import Options
from holdfast.plan.save import plan_save
from holdfast.plan.shard_table import Replica
from holdfast.protocol.operation import read_state
from holdfast.saving.job import Save, SaveReport, Work
from holdfast.state.memory import BytesMemory
from holdfast.store.local import LocalStore

log = logging.getLogger("holdfast")
PutDown = Callable[[Work, list[Replica], dict[str, Any]], list[WrittenFile]]
LANE = "async"
"""The lane of the roster on which asynchronous saves meet those of other ranks."""
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
        self._retired = False

    def save(
        self,
        make: Callable[[], Save],
        path: str,
        step: int | None,
        budget: int | None,
        retries: int,
    ) -> Pending:
        """Stage what `make` reads, and save it in the background. Waits for the save before this one."""
        if self.is_of_another_process():
            raise BadInput(
                "This process was forked after an asynchronous save; it can't go on with its parent's."
            )
        with self._lock:
            self._wait_for_the_last()
            pending = Pending(path, step)
            save = make()
            # A process that can't be started is told to the others, too: else they would be one call ahead from then on.
            save.work.trouble = save.work.trouble or read_state(self._writer.start, save.work.held.rank)
            into = DeviceCopies(save.work.streams).into
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

    def release(self) -> None:
        """Give back the arena and the writer process, once nothing is under way. The next save has new ones."""
        with self._lock:
            if self._pending is not None and not self._pending.done():
                return
            self._writer.kill()
            arena, self._arena = self._arena, None
            if arena is not None and not self._copying:
                arena.close()
            unheard = self._pending is not None and self._pending.failed_unseen()
            if self._retired and not unheard:  # what nobody has heard of is told at the end of the process
                not_at_exit(self.drain)
                _known.discard(self)

    def retire(self) -> None:
        """Nobody can begin a save here any more: release what it has once the last one has ended."""
        self._retired = True
        if self._pending is None:
            self.release()
        else:
            self._pending.upload_completion.add_done_callback(lambda future: self.release())

    def _wait_for_the_last(self) -> None:
        if self._pending is not None:
            self._pending.wait()  # whoever holds it is told how it ended
            if self._pending.failed_unseen():
                log.warning(
                    "%r failed, and nobody has asked: %s",
                    self._pending,
                    self._pending.upload_completion.failure(),
                )
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
        pause = 0.1
        for left in range(retries, -1, -1):
            save.work.put_down = put_down
            try:
                return self._run_once(save)
            except (CommitUnconfirmed, RosterLost, BadInput):
                raise
            except HoldfastError as error:
                if not left or pending.cancelled or save.operation.call.deadline.passed():
                    raise
                log.warning("%s; it is tried again (%d left).", error.message, left)
                save.operation.call.deadline.clock.sleep(min(pause, save.operation.call.deadline.left()))
                pause = min(2 * pause, 10.0)  # what storage has against it mostly lasts
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
        work.streams.wait()
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

    def is_of_another_process(self) -> bool:
        """Was it made before this process was forked?"""
        return self._pid != os.getpid()

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
    met = pending.upload_completion.failure()
    if not ended:
        met = HoldfastError(f"It took longer than {timeout:g} s.")
    elif not pending.failed_unseen():
        if met is not None and pending.only_warns:
            log.warning("A save in the background failed: %s", met)
        return None
    assert met is not None
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
        discard(store, [f"{DATA}/{name}" for name in store.list(DATA) if name.startswith(mine)])


_COPIED = BytesMemory(b"")
_known: set[Background] = set()
"""All of this process that may have a save under way, or one that failed and nobody has asked for."""
_of_thread = threading.local()


class _Owner:
    """Lives as long as its thread."""


def background_of(owner: object) -> Background:
    """An arena and a writer process of the owner's, released after its last save once the owner is gone."""
    made = Background()
    _known.add(made)
    at_exit(Stage.SAVES, made.drain)
    finalize(owner, made.retire).atexit = False
    return made


def background_of_this_thread() -> Background:
    """That of `holdfast.async_save`. Threads have one each, so that none waits for another's save."""
    owner: _Owner | None = getattr(_of_thread, "owner", None)
    if owner is None or _of_thread.background.is_of_another_process():
        _of_thread.owner = owner = _Owner()
        _of_thread.background = background_of(owner)
    found: Background = _of_thread.background
    return found


def wait_for_saves(timeout: float) -> list[Pending]:
    """Wait for what is under way in this process; returns those that are not done by then."""
    ends = time.monotonic() + timeout
    last = last_saves()
    for pending in last:
        pending.wait(max(0.0, ends - time.monotonic()))  # whoever holds it is told how it ended
    return [pending for pending in last if not pending.done()]


def last_saves() -> list[Pending]:
    """The last asynchronous save of each thread or run folder of this process, under way or not."""
    known = [found._pending for found in list(_known) if not found.is_of_another_process()]
    return [pending for pending in known if pending is not None]
