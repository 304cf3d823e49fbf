"""A session: the lifetime of process groups, with a bounded end in success and failure.

At a normal end, the session waits for running saves and for all ranks, and destroys groups in reverse order;
the rank that hosts the message store leaves last. At process exit it waits for the others `grace` seconds
only: a finished program ends, as without a session, and that is no failure. After an exception there is no
collective: the rank that raised notifies the others, each aborts its groups, and every process ends in
bounded time (`grace`). The first error is printed last.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch.distributed as dist

from holdfast._core.base.deadline import check_seconds
from holdfast._core.base.values import Message
from holdfast._core.layout.grid import Grid
from holdfast._core.process.exits import Failure, Stage, at_exit, error_of_child, say
from holdfast._core.process.under_way import wait_for_works
from holdfast._core.protocol.call import begin_call, find_roster
from holdfast._core.protocol.job import Job, job_of, limits_of
from holdfast._core.protocol.task import CollectiveTask
from holdfast._core.roster.presence import Vitals, read
from holdfast._core.roster.process import stack_dump
from holdfast._core.torch_private import TorchStore, default_store, known_groups
from holdfast._groups.ending.bound import watch_end
from holdfast._groups.ending.system_exit import how_it_ended, program_exit, see_exits
from holdfast._groups.lifecycle.close import Closing
from holdfast._groups.lifecycle.open import Groups, open_groups
from holdfast._groups.lifecycle.report import WarmUpReport
from holdfast._groups.lifecycle.start import start_world
from holdfast._groups.lifecycle.warm_up import chosen_operations, warm_up
from holdfast._groups.session.shutdown import TOLD, Leaving
from holdfast.errors import HoldfastError, RosterLost

LOOK = 0.25
"""Seconds between two checks for failed ranks while waiting for others."""
log = logging.getLogger("holdfast")
open_sessions: list[GroupSession] = []
"""Sessions that have begun and not ended."""


class _Beginning(CollectiveTask):
    """Wait for all ranks; distribute a unique name of the session, and the rank that hosts the message
    store."""

    def contribute(self) -> Message:
        return self.operation.presence.beacon.message() if self.roster.serves() else {}

    def decide(self, contributions: dict[int, Message]) -> dict[int, Message]:
        # A token for the session's keys, so that messages of an earlier session are not read in this one.
        token = secrets.token_hex(6)
        serving = [message for message in contributions.values() if "who" in message]
        return {rank: {"token": token, "serving": serving} for rank in contributions}

    def execute(self, answer: Message) -> Message:
        self.token = str(answer["token"])
        self.server = next((read(message, Vitals) for message in answer["serving"]), None)
        return {}


class _Meeting(CollectiveTask):
    """Wait for all ranks."""


class GroupSession:
    """See `holdfast.session`."""

    def __init__(
        self,
        grid: Grid | None = None,
        *,
        backend: str | None = None,
        grace: float = 10.0,
        after_end: float | None = None,
        warm: bool = True,
        operations: Sequence[str] | None = None,
        memory_budget: int | None = None,
        job: Job | None = None,
        owns_world: bool | None = None,
    ) -> None:
        job = job_of(job).within(600.0)
        assert job.timeout is not None
        self._timeout = job.timeout
        self.job: Job = replace(job, grid=job.grid if grid is None else grid)
        check_seconds("grace", grace)
        if after_end is not None:
            check_seconds("after_end", after_end)
        self.grid: Grid | None = self.job.grid
        self.groups: Groups | None = None
        self.warmed: WarmUpReport | None = None
        self._backend, self._grace = backend, grace
        self._warm, self._budget = warm, memory_budget
        self._operations = chosen_operations(operations)
        self._after_end, self._owns_world = after_end, owns_world
        self._pid = os.getpid()
        self._leaving: Leaving | None = None
        self._store: TorchStore | None = None
        self.closed_first: list[Callable[[], None]] = []
        """Called at a normal end, before groups are closed."""

    # -- in the body ----------------------------------------------------------------------------

    @property
    def failure(self) -> HoldfastError | None:
        """The error that has ended the session on all ranks, if any."""
        return None if self._leaving is None else self._leaving.watch.failure

    def __enter__(self) -> Self:
        started = not dist.is_initialized()
        if started:
            start_world(self._backend, self._timeout, self.job)
        self._owns_world = started if self._owns_world is None else self._owns_world
        self._roster = find_roster(self.job)
        # Kept, so that ranks can still send messages after the body has destroyed the default group.
        self._store = default_store()
        lane = self._roster.lane("session")
        beginning = _Beginning(
            "beginning of a session",
            "groups://session",
            begin_call(replace(self.job, roster=lane)),
        )
        # All ranks meet before the monitors start, because from then on a silent rank is a failure.
        beginning.run()
        self._leaving = Leaving(
            lane, f"session/{beginning.token}", beginning.server, self.job.stall_timeout, self._grace
        )
        self._leaving.watch.presence.beacon.set_limits(limits_of(self.job))
        stack_dump.begin(self)
        self._pid = os.getpid()
        open_sessions.append(self)
        _install_hook()
        try:
            self._leaving.begin()
            watch_end(f"rank {self._roster.rank}", self.job.report_after, self._after_end)
            if self.grid is not None:
                self.groups = open_groups(self.grid, backend=self._backend, job=self.job)
            if self._warm:
                self.warmed = warm_up(
                    operations=self._operations,
                    memory_budget=self._budget,
                    # Shorter than the timeout of the collectives, whose error names no rank.
                    job=replace(self.job, timeout=0.75 * self._timeout),
                )
        except BaseException as error:
            self._end(error)
            raise
        return self

    def until_exit(self, is_between_calls: Callable[[int], bool] | None = None) -> Self:
        """Begin the session, and end it at the end of the process.

        Use it in place of a `with` block where you can't put one around the program's code.
        is_between_calls: for programs that consist of calls from elsewhere: returns whether the thread with
            this id is outside of any call; then no error is raised in it.
        """
        self.__enter__()
        if is_between_calls is not None:
            self._way.is_between_calls = is_between_calls
        see_exits(self)
        at_exit(Stage.SESSIONS, self._at_exit)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_inherited:
            return
        self._way.come_back()
        clean = error is None or (isinstance(error, SystemExit) and not error.code)
        if clean and self.failure is None:
            try:
                self._close()
                return
            except BaseException as raised:
                self._end(raised)
                raise
        self._end(error)

    # -- the end --------------------------------------------------------------------------------

    def _at_exit(self) -> Failure | None:
        if self._way.left.is_set():
            return None
        exited = program_exit()
        self._way.come_back()
        try:
            error = SystemExit(exited.code) if exited is not None and exited.code else error_of_child()
            if self.failure is None and error is None:
                self._close_at_exit()
            else:
                self._end(error)
        except BaseException as error:
            if not hasattr(error, TOLD):
                say(f"rank {self._roster.rank} ends: {error}")
            return Failure("")
        return None

    def _raised(self, error: BaseException) -> BaseException:
        """End the session after an uncaught exception. Return the exception to print at the end."""
        try:
            self._end(error)
        except BaseException as instead:
            return instead
        return error

    def _close(self) -> None:
        """End the session together with the other ranks; waits for them as long as they are alive."""
        self._finish_saves()
        meeting = _Meeting(
            "end of a session",
            "groups://end",
            begin_call(Job(roster=self._way.watch.roster), while_alive=True),
        )
        self._run(meeting)
        self._destroy_groups()
        self._leave()

    def _close_at_exit(self) -> None:
        """End the session of a finished program. If all ranks end at the same time, groups are destroyed
        together; otherwise that is left to the process exit, and the other ranks go on."""
        watch = self._way.watch
        try:
            self._finish_saves()
            watch.presence.beacon.end(how_it_ended())
            watch.say("closing")
            ends = time.monotonic() + self._grace
            others = [rank for rank in range(self._roster.world_size) if rank != self._roster.rank]
            # The others need the message store for as long as they live, if it is in this process.
            while others and (time.monotonic() < ends or watch.server == self._roster.rank):
                others = watch.wait_for("closing", others, time.monotonic() + LOOK)
                if self.failure is not None:
                    raise self.failure
            if watch.decide("end", "alone" if others else "together") == "together":
                self._destroy_groups(past_end=True)  # all have said that they are at their end
        except RosterLost as error:  # the program has finished, and needs no other rank
            log.info("The session ends without the others: %s", error)
        except BaseException as error:
            self._end(error)
            raise
        self._leave()

    def _finish_saves(self) -> None:
        # They need the message store and all ranks, and have deadlines of their own.
        self._way.watch.presence.phase = "waiting for its saves"
        for close in self.closed_first:
            close()  # raises on all ranks
        wait_for_works(None)

    def _destroy_groups(self, past_end: bool = False) -> None:
        made = self.groups.distinct() if self.groups is not None else []
        mine = [group for group in made if group is not dist.group.WORLD]
        if self._owns_world:
            mine = [entry.group for entry in known_groups()]
        call = begin_call(Job(roster=self._way.watch.roster, timeout=self.job.timeout), past_end=past_end)
        self._run(Closing(mine, call))

    def _run(self, task: CollectiveTask) -> None:
        """Run a task at the end of the session; a failure on another rank interrupts it."""
        self._way.closing = task
        # Checked after `closing` is set, because a failure before that found nothing to cancel.
        if self.failure is not None:
            raise self.failure
        task.run()

    def _leave(self) -> None:
        stack_dump.end(self)
        self._way.leave_in_order(time.monotonic() + self._grace)
        self._store = None
        open_sessions.remove(self)

    def _end(self, error: BaseException | None) -> None:
        """End the session after a failure on any rank. Raise the error that replaces `error`, if any."""
        self._way.come_back()
        stack_dump.end(self)
        try:
            self._way.end(error)
        finally:
            self._store = None
            if self in open_sessions:
                open_sessions.remove(self)

    @property
    def _is_inherited(self) -> bool:
        """Whether this is a fork of the session's process. A fork leaves the job alone, however it ends."""
        return self._pid != os.getpid()

    @property
    def _way(self) -> Leaving:
        assert self._leaving is not None, "the session has not begun"
        return self._leaving


def _install_hook() -> None:
    """Install an excepthook that ends the open sessions before it prints, and prints no error twice."""
    if hasattr(sys.excepthook, TOLD):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shown = error
        for session in tuple(reversed(open_sessions)):  # ending one takes it off the list
            if session._is_inherited or session._way.left.is_set():
                continue
            # It has no block, or the very end of its block was interrupted.
            shown = session._raised(shown)
        if not hasattr(shown, TOLD):
            before(type(shown), shown, shown.__traceback__)

    # Marks it as Holdfast's, so that it is installed only once.
    setattr(hook, TOLD, True)
    sys.excepthook = hook
