"""The queue of asynchronous saves: their copies, the processes that write them, and their order.

The caller's thread copies the state and goes on. Another thread runs the same protocol as a synchronous save,
with its own messages (a lane of the roster), and a writer process does its storage work. So no rank enters
a collective for it, training waits for nothing but the copy, and a failed save is the same error on all
ranks.

Several saves may be under way: verl saves a model, its optimizer and the rest as three requests. Each has its
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
from dataclasses import dataclass
from functools import partial
from weakref import finalize

from holdfast._core.background.arena import Arena
from holdfast._core.background.gpu_copy import copies_into
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
from holdfast._core.process.under_way import Work, lists_work
from holdfast._core.protocol.operation import read_state
from holdfast._core.saving.job import SaveJob, SaveReport
from holdfast.errors import BadInput, CommitUnconfirmed, DeadlineExceeded, HoldfastError, RosterLost

log = logging.getLogger("holdfast")
LANE = "async"
"""The lane of the roster on which asynchronous saves meet those of other ranks."""
EXIT_GRACE = 30.0
"""Seconds that pending saves are waited for when the process ends by an exception."""


@dataclass(eq=False)
class Room:
    """What one save takes: memory for its copy, and the process that writes it. Later saves use it again."""

    writer: WriterClient
    arena: Arena | None = None
    save: Pending | None = None
    """The last save that took it."""

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
    """The asynchronous saves of `owner`, until it is garbage-collected: those under way, and those that have
    ended and were not settled yet.

    in_order: one writer process writes the saves one after another, and they share the memory. Otherwise each
        save that is under way has its own process and its own part of the memory.
    """

    def __init__(self, owner: object, in_order: bool = True) -> None:
        self.saves: deque[Pending] = deque()
        """The oldest first."""
        self._in_order = in_order
        self.writer = WriterClient()
        """That of saves in order."""
        self._rooms: list[Room] = []
        """Ordered by their saves, the oldest first."""
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._retired = False
        _known.add(self)
        at_exit(Stage.SAVES, self.drain)
        # Not at the end of the process, where `drain` waits for the saves in its stage.
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
        """Copy the state of the job that `make` gives, and save it in the background.

        at_once: how many saves may be under way; this waits for the oldest ones, each of which ends by its
            own deadline.
        budget: bytes that copies may take: this one, or, if saves are written in order, those of all saves
            together. This waits for the oldest if its copy does not fit beside theirs; if it does not fit
            alone, it is copied in waves.
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
            # If the process can't be started, the other ranks must hear of it: otherwise the call counters of
            # the ranks would diverge.
            if not room.writer.busy and not is_written_here(job.store):
                job.collect_error = job.collect_error or read_state(room.writer.start, job.rank)
            into = partial(copies_into, job.streams.streams)
            staged = self._stage(job, room, budget, into)
            interrupt = job.collect_error.__cause__ if job.collect_error is not None else None
            if interrupt is not None and not isinstance(interrupt, Exception):
                # Ctrl-C while the state was read: raised at the end of this call, once. Calls that wait for
                # this save raise what the other ranks raise then.
                assert job.collect_error is not None
                job.collect_error.__cause__ = None
                pending.seen = True
            pending._attempt(job)  # before the thread starts, so that a cancel always finds the job
            before = self.saves[-1] if self._in_order and self.saves else None
            if staged is not None:
                forget_copied(job)  # training may free or change its tensors from here on
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
                # Ctrl-C, mostly while waves are copied: the caller never gets this save, so all ranks give it
                # up. Others wait for its end, so it must have begun.
                pending.cancel()
                pending.start(run)
                raise
        if interrupt is not None and not isinstance(interrupt, Exception):
            raise interrupt
        if is_over():
            _end_with(pending)
        return pending

    def settle(self, leave: int = 0, timeout: float | None = None) -> Iterator[Pending]:
        """Take the oldest saves out, each once it has ended, until at most `leave` are left. DeadlineExceeded
        if one goes on for longer than `timeout` seconds."""
        if self.is_of_another_process():
            self.saves.clear()  # only the parent has the threads that end them
        while len(self.saves) > leave:
            if not self.saves[0].wait(timeout):
                raise self.saves[0].late("committed", timeout)
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
            # A failure that nobody has heard of is reported at the end of the process.
            if self._retired and not any(not save.done() or save.failed_unseen() for save in self.saves):
                not_at_exit(self.drain)
                _known.discard(self)

    def retire(self) -> None:
        """Release everything once the last save has ended: nobody can begin another one."""
        self._retired = True
        self.release()
        for save in self.saves:
            save.add_done_callback(lambda save: self.release())

    def is_of_another_process(self) -> bool:
        """Return whether it was made before this process was forked."""
        return self._pid != os.getpid()

    def drain(self) -> Failure | None:
        """Wait, at the end of the process, for the saves under way. Their failures are those of the process,
        unless somebody has asked for them."""
        try:
            failures = [failure for save in self.saves if (failure := _outcome(save)) is not None]
        finally:
            for writer in {self.writer, *(room.writer for room in self._rooms)}:
                writer.kill()
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
                check_one_wave(job.table, copies, budget)
                results.append(None)
                return
            begun = time.monotonic()
            staged = stage(job.table, job.options, copies, room.arena, into)
            results.append(staged)
            job.operation.emit("staged", bytes_done=staged.nbytes, seconds=time.monotonic() - begun)

        if job.collect_error is None:
            job.collect_error = read_state(copy, job.rank)
        # Empty if reading failed. The job still enters the call, so that the other ranks hear of it.
        return results[0] if results else Staged([])

    def _make_room(self, nbytes: int, budget: int, mine: Room) -> None:
        """Free arenas until all take at most `budget` bytes with this save's `nbytes`: wait for other saves,
        the oldest first."""
        others = [room for room in self._rooms if room is not mine]
        nbytes = max(nbytes, mine.nbytes)  # an arena does not shrink
        for room in others:
            if sum(other.nbytes for other in others) + nbytes <= budget:
                return
            if room.save is not None:
                room.save.wait()  # its own deadline ends it
            room.empty()


def _run(pending: Pending, job: SaveJob, room: Room, retries: int, before: Pending | None) -> SaveReport:
    """Save once `before` has ended; try a failed save again."""
    # All attempts share the deadline of the call, so it ends in time however often it fails.
    deadline, pause = job.request.call.deadline, 0.1
    # Without a timeout of the caller's, the deadline of the save before it ends this wait.
    if before is not None and not before.wait(None if deadline.moves else deadline.left()):
        # An error on all ranks: this save has no time left, and the writer is not free.
        job.collect_error = job.collect_error or DeadlineExceeded(
            f"{job.request.title}: the save before it, to {before.path}, took all the time of this one.",
            rank=job.rank,
        )
    deadline.note_progress()
    while True:
        try:
            return _run_once(job, room)
        except (CommitUnconfirmed, RosterLost, BadInput):
            raise  # perhaps committed; no way to agree with other ranks; wrong the next time, too
        except HoldfastError as error:
            if not retries or pending.is_given_up(error) or deadline.passed():
                raise
            log.warning("%s; it is tried again (%d left).", error.message, retries)
            retries -= 1
            deadline.clock.sleep(min(pause, deadline.left()))
            pause = min(2 * pause, 10.0)  # trouble with storage mostly lasts
            job.begin()
            pending._attempt(job)


def _run_once(job: SaveJob, room: Room) -> SaveReport:
    try:
        # Training allocates in this process meanwhile, and a save may take minutes.
        return job.run(pause_collector=False)
    except BaseException:
        copying = isinstance(job.sink, WaveSink) and job.sink.copying
        # A save that was given up may have left a thread in a system call. That thread keeps what it uses,
        # and the next save gets another process and another arena.
        if room.writer.busy or copying:
            room.writer.kill()
        if copying:
            room.arena = None  # what the thread still copies must not get into the next save
        raise


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
    error = pending.failure()
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


_known: set[SaveQueue] = set()
"""All queues of this process that may have a save under way, or a failed one that nobody has asked for."""
_of_thread = threading.local()


class _Owner:
    """Lives as long as its thread."""


def queue_of_this_thread() -> SaveQueue:
    """Return this thread's queue: no thread waits for another's save."""
    queue: SaveQueue | None = getattr(_of_thread, "queue", None)
    # A fork has its parent's thread-locals, but neither its threads nor its writer.
    if queue is None or queue.is_of_another_process():
        _of_thread.owner = owner = _Owner()
        _of_thread.queue = queue = SaveQueue(owner)
    return queue


def last_saves() -> list[Work]:
    """Return the last asynchronous saves of this process, under way or not."""
    # Copies: other threads begin and end saves meanwhile.
    here = [queue for queue in list(_known) if not queue.is_of_another_process()]
    return [pending for queue in here for pending in list(queue.saves)]


lists_work(last_saves)
