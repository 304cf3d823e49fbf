"""The queue of asynchronous saves: their copies, the processes that write them, and their order.

The caller's thread copies the state and goes on. Another thread runs the same protocol as a synchronous save,
with its own messages (a lane of the roster), and a writer process does its storage work. So a save needs no
collective, training waits only for the copy, and a failed save raises the same error on all ranks.

Several saves may run at once: verl saves a model, its optimizer and the rest as three requests. Each has its
own copy until it is committed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from weakref import finalize

from holdfast._core.background.arena import Arena
from holdfast._core.background.gpu_copy import copies_into
from holdfast._core.background.local_save import LocalSave
from holdfast._core.background.pending import Pending
from holdfast._core.background.sinks import StagedSink, WaveSink, forget_copied, is_written_here
from holdfast._core.background.stage import Into, Staged, aligned_bytes, check_one_wave, plan_copies, stage
from holdfast._core.background.writer_client import WriterClient
from holdfast._core.process.exits import (
    ENDED_BY_INTERRUPT,
    Failure,
    Stage,
    at_exit,
    fail_late,
    is_over,
    not_at_exit,
    uncaught,
)
from holdfast._core.process.native_calls import LONGEST
from holdfast._core.process.under_way import Work, lists_work
from holdfast._core.protocol.operation import read_state
from holdfast._core.saving.job import SaveJob, SaveReport
from holdfast.errors import BadInput, CommitUnconfirmed, DeadlineExceeded, HoldfastError, RosterLost

log = logging.getLogger("holdfast")
LANE = "async"
"""The lane of the roster for the messages of asynchronous saves."""
EXIT_GRACE = 30.0
"""Timeout in seconds of the wait for pending saves when the process ends by an exception."""


@dataclass(eq=False)
class Room:
    """The resources of one save: memory for its copy, and a writer process. Later saves reuse them."""

    writer: WriterClient
    arena: Arena | None = None
    save: Pending | None = None
    """The last save that used it."""

    @property
    def is_free(self) -> bool:
        return self.save is None or self.save.done()

    @property
    def nbytes(self) -> int:
        return self.arena.size if self.arena is not None else 0

    def empty(self) -> None:
        arena, self.arena = self.arena, None
        if arena is not None:
            arena.close()


class SaveQueue:
    """The asynchronous saves of `owner`, until it is garbage-collected: running saves, and ended saves that
    are not settled yet.

    in_order: one writer process writes the saves one after another, and they share the memory. Otherwise each
        running save has its own process and its own memory.
    """

    def __init__(self, owner: object, in_order: bool = True) -> None:
        self.saves: deque[Pending] = deque()
        """Oldest first."""
        self._in_order = in_order
        self.writer = WriterClient()
        """The shared writer process of saves in order."""
        self._rooms: list[Room] = []
        """Sorted by the age of their saves, oldest first."""
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._retired = False
        _known.add(self)
        at_exit(Stage.SAVES, self.drain)
        # Not at process exit, where `drain` waits for the saves at its stage.
        finalize(owner, self.retire).atexit = False

    def save(
        self,
        make: Callable[[], SaveJob],
        path: str,
        step: int | None,
        at_once: int = 1,
        budget: int | None = None,
        retries: int = 0,
    ) -> Pending:
        """Copy the state of the job that `make` creates, and save it in the background.

        at_once: maximum number of running saves; if it is reached, wait for the oldest ones, each of which
            ends by its own deadline.
        budget: maximum bytes of this copy or, if saves are written in order, of all copies together. If the
            copy does not fit beside older ones, wait for the oldest saves; if it does not fit alone, it is
            copied in waves.
        """
        if self.is_of_another_process():
            raise BadInput(
                "This process was forked after an asynchronous save; it can't go on with its parent's."
            )
        with self._lock:
            for ended in self.settle(at_once - 1):
                if ended.failed_unseen():
                    log.warning("%r failed, and nobody has asked: %s", ended, ended.failure())
            pending = Pending(path, step)
            job = make()
            room = self._free_room()
            # If the process can't be started, the other ranks must be told: otherwise the call counters of
            # the ranks would diverge.
            if not room.writer.busy and not is_written_here(job.store):
                job.collect_error = job.collect_error or read_state(room.writer.start, job.rank)
            into = partial(copies_into, job.streams.streams)
            staged = self._stage(job, room, budget, into)
            interrupt = job.collect_error.__cause__ if job.collect_error is not None else None
            if interrupt is not None and not isinstance(interrupt, Exception):
                # Ctrl-C while the state was read: raised once, at the end of this call. Later waits for this
                # save raise the same error as the other ranks.
                assert job.collect_error is not None
                job.collect_error.__cause__ = None
                pending.seen = True
            pending._attempt(job)  # before the thread starts, so that a cancel always finds the job
            before = self.saves[-1] if self._in_order and self.saves else None
            if isinstance(job, LocalSave):
                pending.local = Future()
                job.keep(staged)
            if staged is not None:
                forget_copied(job.table)  # training may free or change its tensors from here on
                pending.has_staged()
                job.sink = StagedSink(room.writer, room.arena, staged)
            else:
                assert budget is not None
                assert room.arena is not None
                job.sink = WaveSink(room.writer, room.arena, pending.has_staged, budget, into)
                retries = 0  # training goes on: another attempt would copy a later state
            run = partial(_run, pending, job, room, retries, before)
            try:
                room.save = pending
                self.saves.append(pending)
                pending.start(run)
                # In waves this takes as long as writing all but the last one; the save's deadline bounds it.
                pending.staging_completion.result()
            except BaseException:
                # Ctrl-C, usually while waves are copied: the caller never gets this handle, so cancel the
                # save on all ranks. Other code waits for its end, so it must be started.
                pending.cancel()
                pending.start(run)
                raise
        if interrupt is not None and not isinstance(interrupt, Exception):
            raise interrupt
        if is_over():
            _end_with(pending)
        return pending

    def settle(self, leave: int = 0, timeout: float | None = None) -> Iterator[Pending]:
        """Remove the oldest saves, each after it has ended, until at most `leave` remain, and yield them.
        DeadlineExceeded if one takes longer than `timeout` seconds."""
        if self.is_of_another_process():
            self.saves.clear()  # only the parent has the threads that end them
        while len(self.saves) > leave:
            if not self.saves[0].wait(timeout):
                raise self.saves[0].late(self.saves[0].goal, timeout)
            yield self.saves.popleft()

    def release(self) -> None:
        """Free the memory and end the writer processes of saves that have ended. The next save makes new
        ones."""
        with self._lock:
            free = [room for room in self._rooms if room.is_free]
            self._rooms = [room for room in self._rooms if room not in free]
            busy = {room.writer for room in self._rooms}
            for room in free:
                if room.writer not in busy:
                    room.writer.kill()
                room.empty()
            # A failure that was not read is reported at process exit.
            if self._retired and not any(not save.done() or save.failed_unseen() for save in self.saves):
                not_at_exit(self.drain)
                _known.discard(self)

    def retire(self) -> None:
        """Release everything after the last save has ended; no more saves can be started."""
        self._retired = True
        self.release()
        for save in self.saves:
            save.add_done_callback(lambda save: self.release())

    def is_of_another_process(self) -> bool:
        """Return whether this queue was created before this process was forked."""
        return self._pid != os.getpid()

    def drain(self) -> Failure | None:
        """At process exit, wait for running saves. A failure makes the process fail, unless it was already
        read."""
        try:
            failures = [failure for save in self.saves if (failure := _outcome(save)) is not None]
        finally:
            for writer in {self.writer, *(room.writer for room in self._rooms)}:
                writer.kill()
            for save in list(self.saves):
                save._join(LONGEST)
        if not failures:
            return None
        return Failure("\n".join(each.message for each in failures), max(each.code for each in failures))

    def _free_room(self) -> Room:
        free = next((room for room in self._rooms if room.is_free), None)
        room = free or Room(self.writer if self._in_order else WriterClient())
        self._rooms = [*(other for other in self._rooms if other is not room), room]
        return room

    def _stage(self, job: SaveJob, room: Room, budget: int | None, into: Into) -> Staged | None:
        """Copy the state; return None if it has to be copied in waves."""
        results: list[Staged | None] = []

        def copy() -> None:
            copies = plan_copies(job.table, job.options)
            nbytes = aligned_bytes(copies)
            if budget is not None and self._in_order:
                self._make_room(min(nbytes, budget), budget, room)
            if room.arena is None:
                room.arena = Arena()
            if budget is not None and nbytes > budget:
                if isinstance(job, LocalSave):
                    raise job.too_large(nbytes, budget)
                check_one_wave(job.table, copies, budget)
                results.append(None)
                return
            begun = time.monotonic()
            staged = stage(job.table, job.options, copies, room.arena, into)
            results.append(staged)
            job.operation.emit("staged", bytes_done=staged.nbytes, seconds=time.monotonic() - begun)

        if job.collect_error is None:
            job.collect_error = read_state(copy, job.rank)
        # Empty if reading failed. The job still enters the call, so that the other ranks are told.
        return results[0] if results else Staged([])

    def _make_room(self, nbytes: int, budget: int, mine: Room) -> None:
        """Free other arenas until all take at most `budget` bytes, including `nbytes` of this save: wait for
        other saves, oldest first."""
        others = [room for room in self._rooms if room is not mine]
        nbytes = max(nbytes, mine.nbytes)  # an arena does not shrink
        for room in others:
            if sum(other.nbytes for other in others) + nbytes <= budget:
                return
            if room.save is not None:
                room.save.wait()  # its own deadline ends it
            room.empty()


def _run(pending: Pending, job: SaveJob, room: Room, retries: int, before: Pending | None) -> SaveReport:
    """Run a save after `before` has ended; retry it if it fails."""
    # All attempts share the deadline of the call, so it ends in time regardless of the number of retries.
    deadline = job.request.call.deadline
    # If the caller has set no timeout, this wait is bounded by the deadline of the save before it.
    if before is not None and not before.wait(None if deadline.moves else deadline.left()):
        # An error on all ranks: this save has no time left, and the writer is not free.
        job.collect_error = job.collect_error or DeadlineExceeded(
            f"{job.request.title}: the save before it, to {before.path}, took all the time of this one.",
            rank=job.rank,
        )
    deadline.note_progress()
    if isinstance(job, LocalSave):
        return job.run_both(
            pending, partial(_attempt, pending, room=room, retries=retries), room.writer, room.arena
        )
    return _attempt(pending, job, room, retries)


def _attempt(pending: Pending, job: SaveJob, room: Room, retries: int) -> SaveReport:
    """Run a save; retry it if it fails."""
    deadline, pause = job.request.call.deadline, 0.1
    while True:
        try:
            return _run_once(job, room)
        except (CommitUnconfirmed, RosterLost, BadInput):
            raise  # perhaps committed; no way to agree with other ranks; wrong the next time, too
        except HoldfastError as error:
            if not retries or pending.is_given_up(error) or deadline.passed():
                raise
            log.warning("%s It is tried again (%d left).", error.message, retries)
            retries -= 1
            deadline.clock.sleep(min(pause, deadline.left()))
            pause = min(2 * pause, 10.0)  # storage errors usually last
            job.begin()
            pending._attempt(job)


def _run_once(job: SaveJob, room: Room) -> SaveReport:
    try:
        # Training allocates in this process meanwhile, and a save may take minutes.
        return job.run(pause_collector=False)
    except BaseException:
        copying = isinstance(job.sink, WaveSink) and job.sink.copying
        # A cancelled save may have left a thread in a system call. That thread keeps its resources, and the
        # next save gets another process and another arena.
        if room.writer.busy or copying:
            room.writer.kill()
        if copying:
            room.arena = None  # bytes that the thread still copies must not get into the next save
        raise


def _end_with(pending: Pending) -> None:
    """Wait for a save started by an `atexit` handler: no other code waits for it or reports its error."""
    try:
        pending.committed()
    except BaseException as error:
        fail_late(Failure("\n".join(traceback.format_exception_only(error)).rstrip()))
        raise
    finally:
        pending._join(LONGEST)


def _outcome(pending: Pending) -> Failure | None:
    """Wait for a save at the end of the process; return why the process must not end with exit code 0."""
    # After an exception the wait must be short; otherwise it is bounded by the save's own deadline.
    timeout = EXIT_GRACE if uncaught() is not None else None
    try:
        ended = pending.wait(timeout)
    except KeyboardInterrupt:
        message = (
            f"{pending.who} ends, and its last save to {pending.path} was not {pending.goal} yet: Ctrl-C at "
            f"the end of the process.{pending.kept}"
        )
        return Failure(message, ENDED_BY_INTERRUPT)
    error = pending.failure()
    if not ended:
        error = HoldfastError(f"It took longer than {timeout:g} s.{pending.kept}")
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


_known: set[SaveQueue] = set()
"""All queues of this process that may have a running save, or a failed one whose error was not read."""
_of_thread = threading.local()


class _Owner:
    """Lives as long as its thread."""


def queue_of_this_thread() -> SaveQueue:
    """Return this thread's queue; each thread has its own, so none waits for another's save."""
    queue: SaveQueue | None = getattr(_of_thread, "queue", None)
    # A fork has its parent's thread-locals, but neither its threads nor its writer.
    if queue is None or queue.is_of_another_process():
        _of_thread.owner = owner = _Owner()
        _of_thread.queue = queue = SaveQueue(owner)
    return queue


def last_saves() -> list[Work]:
    """Return the last asynchronous saves of this process, running or ended."""
    # Iterate over copies, because other threads start and end saves concurrently.
    here = [queue for queue in list(_known) if not queue.is_of_another_process()]
    return [pending for queue in here for pending in list(queue.saves)]


lists_work(last_saves)
