"""Asynchronous saves of this process: its arena, its writer process, and what is under way.

The caller's thread copies the state and goes on. Another thread runs the same protocol as a synchronous save,
with its own messages (a lane of the roster), and the writer process does its storage work. So no rank enters
a collective for it, training waits for nothing but the copy, and a failed save is the same error on all
ranks.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections.abc import Callable
from weakref import finalize

from holdfast.background.arena import Arena
from holdfast.background.gpu_copy import DeviceCopies
from holdfast.background.pending import CANCELLED, Pending
from holdfast.background.sinks import StagedSink, WaveSink, forget_copied
from holdfast.background.stage import Into, Staged, copied_bytes, stage
from holdfast.background.writer_client import WriterClient
from holdfast.errors import BadInput, CommitUnconfirmed, DeadlineExceeded, HoldfastError, RosterLost
from holdfast.exits import (
    ENDED_BY_INTERRUPT,
    Failure,
    Stage,
    at_exit,
    fail_late,
    is_over,
    not_at_exit,
    uncaught,
)
from holdfast.protocol.operation import read_state
from holdfast.saving.job import SaveJob, SaveReport
from holdfast.threads import drop_spares, keep_spares

log = logging.getLogger("holdfast")
LANE = "async"
"""The lane of the roster on which asynchronous saves meet those of other ranks."""
EXIT_GRACE = 30.0
"""Seconds that pending saves are waited for when the process ends by an exception."""


class Background:
    """A slot for asynchronous saves: one under way at most, the next waits for it. It has its own arena.

    writer: a writer process shared with other slots, whose saves never write at the same time (`SaveQueue`);
        by default the slot has its own.
    """

    def __init__(self, writer: WriterClient | None = None) -> None:
        self._arena: Arena | None = None
        self._owns_writer = writer is None
        self.writer = writer or WriterClient()
        self._pending: Pending | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._retired = False

    def save(
        self,
        make: Callable[[], SaveJob],
        path: str,
        step: int | None,
        budget: int | None,
        retries: int,
        after: Pending | None = None,
        make_room: Callable[[int], None] | None = None,
    ) -> Pending:
        """Copy the state of the job that `make` gives, and save it in the background. Waits for the previous
        save of this slot.

        after: begin to write once that save has ended. make_room: called with the bytes that the copy takes,
            before it is made.
        """
        if self.is_of_another_process():
            raise BadInput(
                "This process was forked after an asynchronous save; it can't go on with its parent's."
            )
        with self._lock:
            self._wait_for_the_last()
            # Python 3.12 starts no thread once the main thread has ended, and this save may go on until then.
            keep_spares(self)
            pending = Pending(path, step)
            job = make()
            # If the process can't be started, the other ranks must hear of it: otherwise the call counters of
            # the ranks would diverge.
            if not self.writer.busy:
                job.collect_error = job.collect_error or read_state(self.writer.start, job.rank)
            into = DeviceCopies(job.streams).into
            # Counted first, so that the queue can wait for older saves before this one's memory is taken.
            if make_room is not None and job.collect_error is None:
                make_room(copied_bytes(job.table, job.options))
            staged = self._stage(job, budget, into)
            pending.attempt(job)  # before the thread starts, so that a cancel always finds the job
            self._pending = pending
            if staged is not None:
                forget_copied(job)  # training may free or change its tensors from here on
                pending.has_staged()
                job.sink = StagedSink(self.writer, self._arena, staged)
            else:
                assert budget is not None
                assert self._arena is not None
                job.sink = WaveSink(self.writer, self._arena, pending.has_staged, budget, into)
                retries = 0  # training goes on: another attempt would copy a later state
            pending.start(lambda: self._run(pending, job, retries, after))
            try:
                # In waves this takes as long as writing all but the last one; the save's deadline bounds it.
                pending.staging_completion.result()
            except BaseException:
                # Ctrl-C while waves are copied: the caller never gets this save, so all ranks give it up.
                pending.cancel()
                raise
        interrupt = job.collect_error.__cause__ if job.collect_error is not None else None
        if interrupt is not None and not isinstance(interrupt, Exception):
            raise interrupt  # Ctrl-C while the state was read; the others hear of it
        if is_over():
            _end_with(pending)
        return pending

    def release(self) -> None:
        """Free the arena and end the writer process, unless a save is under way. The next save makes new
        ones."""
        with self._lock:
            if self._pending is not None and not self._pending.done():
                return
            if self._owns_writer:
                self.writer.kill()
            drop_spares(self)
            arena, self._arena = self._arena, None
            if arena is not None:
                arena.close()
            unheard = self._pending is not None and self._pending.failed_unseen()
            if self._retired and not unheard:  # an unheard failure is reported at the end of the process
                not_at_exit(self.drain)
                _known.discard(self)

    def retire(self) -> None:
        """Release what this slot has once its last save has ended: nobody can begin another one."""
        self._retired = True
        if self._pending is None:
            self.release()
        else:
            self._pending.upload_completion.add_done_callback(lambda future: self.release())

    def _wait_for_the_last(self) -> None:
        if self._pending is not None:
            self._pending.wait()  # the holder of the Pending learns how it ended
            if self._pending.failed_unseen():
                log.warning(
                    "%r failed, and nobody has asked: %s",
                    self._pending,
                    self._pending.upload_completion.failure(),
                )
            self._pending = None

    def _stage(self, job: SaveJob, budget: int | None, into: Into) -> Staged | None:
        """Copy the state; return None if it has to be copied in waves."""
        results: list[Staged | None] = []

        def copy() -> None:
            if self._arena is None:
                self._arena = Arena()
            begun = time.monotonic()
            staged = stage(job.table, job.options, self._arena, budget, into)
            results.append(staged)
            if staged is not None:
                seconds = time.monotonic() - begun
                job.operation.emit("staged", bytes_done=staged.nbytes, seconds=seconds)

        if job.collect_error is None:
            job.collect_error = read_state(copy, job.rank)
        # Empty if reading failed. The job still enters the call, so that the other ranks hear of it.
        return results[0] if results else Staged([])

    @property
    def is_idle(self) -> bool:
        """Has its last save ended?"""
        return self._pending is None or self._pending.done()

    @property
    def held_bytes(self) -> int:
        """Bytes of its arena."""
        return self._arena.size if self._arena is not None else 0

    def wait(self) -> None:
        """Wait for its last save, which ends by its own deadline at the latest."""
        if self._pending is not None:
            self._pending.wait()

    def _run(self, pending: Pending, job: SaveJob, retries: int, after: Pending | None) -> SaveReport:
        # All attempts share the deadline of the call, so it ends in time however often it fails.
        deadline, pause = job.request.call.deadline, 0.1
        if after is not None and not after.wait(max(0.0, deadline.left())):
            # An error on all ranks: this save has no time left, and the writer is not free.
            job.collect_error = job.collect_error or DeadlineExceeded(
                f"{job.request.title}: the save before it, to {after.path}, took all the time of this one.",
                rank=job.rank,
            )
        for left in range(retries, -1, -1):
            try:
                return self._run_once(job)
            except (CommitUnconfirmed, RosterLost, BadInput):
                raise  # perhaps committed; no way to agree with other ranks; wrong the next time, too
            except HoldfastError as error:
                if not left or pending.cancelled or CANCELLED in error.details or deadline.passed():
                    raise
                log.warning("%s; it is tried again (%d left).", error.message, left)
                deadline.clock.sleep(min(pause, deadline.left()))
                pause = min(2 * pause, 10.0)  # trouble with storage mostly lasts
                job.begin()
                pending.attempt(job)
        raise AssertionError("unreachable")

    def _run_once(self, job: SaveJob) -> SaveReport:
        try:
            # Training allocates in this process meanwhile, and a save may take minutes.
            return job.run(pause_collector=False)
        except BaseException:
            copying = isinstance(job.sink, WaveSink) and job.sink.copying
            # A save that was given up may have left a thread in a system call. That thread keeps what it
            # uses, and the next save gets another process and another arena.
            if self.writer.busy or copying:
                self.writer.kill()
            if copying:
                self._arena = None  # what the thread still copies must not get into the next save
            raise

    def is_of_another_process(self) -> bool:
        """Return whether it was made before this process was forked."""
        return self._pid != os.getpid()

    def drain(self) -> Failure | None:
        """Wait, at the end of the process, for the save under way. Its failure is the process's failure,
        unless somebody has asked for it."""
        try:
            return None if self._pending is None else _outcome(self._pending)
        finally:
            if self._owns_writer:
                self.writer.kill()


def _end_with(pending: Pending) -> None:
    """Wait for a save that an `atexit` handler has begun: nothing else does, and nobody sees its error."""
    try:
        pending.committed()
    except BaseException as error:
        fail_late(Failure("\n".join(traceback.format_exception_only(error)).rstrip()))
        raise


def _outcome(pending: Pending) -> Failure | None:
    """Wait for a save at the end of the process; return why the process must not end with exit code 0."""
    # After an exception nobody should wait for long; otherwise the save's own deadline bounds the wait.
    timeout = EXIT_GRACE if uncaught() is not None else None
    try:
        ended = pending.wait(timeout)
    except KeyboardInterrupt:
        message = (
            f"{pending.who} ends, and its last save to {pending.path} was not committed yet: Ctrl-C at the "
            "end of the process."
        )
        return Failure(message, ENDED_BY_INTERRUPT)
    error = pending.upload_completion.failure()
    if not ended:
        error = HoldfastError(f"It took longer than {timeout:g} s.")
    elif not pending.failed_unseen():
        if error is not None and pending.only_warns:
            log.warning("A save in the background failed: %s", error)
        return None
    assert error is not None
    message = (
        f"{pending.who} ends, and its last save to {pending.path} failed; nobody had asked how it ended "
        "(close() or committed()):"
    )
    if log.hasHandlers():
        log.error("%s %s", message, error)
    return Failure("\n".join([message, *traceback.format_exception_only(error)]).rstrip())


_known: set[Background] = set()
"""All slots of this process that may have a save under way, or a failed one that nobody has asked for."""
_of_thread = threading.local()


class _Owner:
    """Lives as long as its thread."""


def background_of(owner: object, writer: WriterClient | None = None) -> Background:
    """Make a slot for `owner`, which is released after its last save once the owner is gone."""
    made = Background(writer)
    _known.add(made)
    at_exit(Stage.SAVES, made.drain)
    # Not at the end of the process, where `drain` waits for the save in its stage.
    finalize(owner, made.retire).atexit = False
    return made


def background_of_this_thread() -> Background:
    """Return this thread's slot for `holdfast.async_save`: no thread waits for another's save."""
    owner: _Owner | None = getattr(_of_thread, "owner", None)
    # A fork has its parent's thread-locals, but neither its threads nor, by `_forked`, its writer.
    if owner is None or _of_thread.background.is_of_another_process():
        _of_thread.owner = owner = _Owner()
        _of_thread.background = background_of(owner)
    background: Background = _of_thread.background
    return background


def wait_for_saves(timeout: float) -> list[Pending]:
    """Wait for the saves under way in this process; return those that are not done by then."""
    ends = time.monotonic() + timeout
    last = last_saves()
    for pending in last:
        pending.wait(max(0.0, ends - time.monotonic()))  # the holder of the Pending learns how it ended
    return [pending for pending in last if not pending.done()]


def last_saves() -> list[Pending]:
    """Return the last asynchronous save of each slot of this process, under way or not."""
    # A copy: other threads begin and end saves meanwhile.
    known = [background._pending for background in list(_known) if not background.is_of_another_process()]
    return [pending for pending in known if pending is not None]
