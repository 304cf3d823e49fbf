"""`session`: process groups from their opening to their end, whatever happens in between.

At a normal end, the session waits for saves that are under way and for all ranks, and destroys groups in
reverse order under a deadline; the rank that hosts the message store leaves last. After an exception there is
no collective: the rank that raised tells the others, each aborts its groups, and every process ends in
bounded time (`grace`). The first error is printed last.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from holdfast.background.manager import wait_for_saves
from holdfast.deadline import check_seconds
from holdfast.errors import HoldfastError
from holdfast.exits import Failure, Stage, at_exit, given
from holdfast.groups.lifecycle.close import Closing
from holdfast.groups.lifecycle.open import Groups, open_groups
from holdfast.groups.lifecycle.report import WarmUpReport
from holdfast.groups.lifecycle.start import start_world
from holdfast.groups.lifecycle.warm_up import chosen_operations, warm_up
from holdfast.groups.session.exit_bound import bound_exit
from holdfast.groups.session.shutdown import TOLD, Leaving
from holdfast.layout.grid import Grid
from holdfast.protocol.call import begin_call, find_roster
from holdfast.protocol.task import CollectiveTask
from holdfast.run.checkpoints import Checkpoints
from holdfast.threads import keep_spares
from holdfast.torch_private import Store, default_store, known_groups
from holdfast.values import Message

open_sessions: list[Session] = []
"""Sessions that have begun and not ended."""


class _Beginning(CollectiveTask):
    """Wait for all ranks; give them a unique name of the session, and the host of the message store."""

    def decide(self, contributions: dict[int, Message]) -> dict[int, Message]:
        # A token for the session's keys, so that messages of an earlier session are not read in this one.
        token = secrets.token_hex(6)
        host = self.operation.presence.beacon.message()  # `decide` runs on the lowest rank
        return {rank: {"token": token, "host": host} for rank in contributions}

    def execute(self, answer: Message) -> Message:
        self.token, self.host = str(answer["token"]), dict(answer["host"])
        return {}


class Session:
    """See `session`."""

    def __init__(
        self,
        grid: Grid | None = None,
        *,
        backend: str | None = None,
        timeout: float = 600.0,
        stall_timeout: float = 60.0,
        grace: float = 10.0,
        after_end: float | None = 120.0,
        warm: bool = True,
        operations: Sequence[str] | None = None,
        memory_budget: int | None = None,
        owns_world: bool | None = None,
    ) -> None:
        bounds = {"timeout": timeout, "stall_timeout": stall_timeout, "grace": grace}
        for name, value in bounds.items():
            check_seconds(name, value)
        if after_end is not None:
            check_seconds("after_end", after_end)
        self.grid = grid
        self.groups: Groups | None = None
        self.warmed: WarmUpReport | None = None
        self._backend, self._timeout, self._stall, self._grace = backend, timeout, stall_timeout, grace
        self._warm, self._budget = warm, memory_budget
        self._operations = chosen_operations(operations)
        self._after_end, self._owns_world = after_end, owns_world
        self._pid = os.getpid()
        self._leaving: Leaving | None = None
        self._store: Store | None = None
        self._checkpoints: list[Checkpoints] = []

    # -- in the body ----------------------------------------------------------------------------

    def checkpoints(self, run: str | os.PathLike[str], **how: Any) -> Checkpoints:
        """Return `holdfast.Checkpoints` that the session closes at its end."""
        made = Checkpoints(run, **{"grid": self.grid, **how})
        self._checkpoints.append(made)
        return made

    @property
    def failure(self) -> HoldfastError | None:
        """The error that has ended the session on all ranks, if any."""
        return None if self._leaving is None else self._leaving.watch.failure

    def __enter__(self) -> Self:
        started = not dist.is_initialized()
        if started:
            start_world(self._backend, self._timeout, self._stall)
        self._owns_world = started if self._owns_world is None else self._owns_world
        self._roster = find_roster(None, False)
        # Kept, so that ranks can still send messages after the body has destroyed the default group.
        self._store = default_store()
        lane = self._roster.lane("session")
        timeout, stall = self._timeout, self._stall
        beginning = _Beginning(
            "beginning of a session",
            "groups://session",
            begin_call(lane, timeout=timeout, stall_timeout=stall),
        )
        # All ranks meet before the monitors start, because from then on a silent rank is a failure.
        beginning.run()
        self._leaving = Leaving(lane, f"session/{beginning.token}", beginning.host, self._stall, self._grace)
        self._pid = os.getpid()
        open_sessions.append(self)
        _install_hook()
        try:
            self._leaving.begin()
            if self._after_end is not None:
                bound_exit(self._after_end, f"rank {self._roster.rank}")
            if self.grid is not None:
                self.groups = open_groups(
                    self.grid, backend=self._backend, timeout=timeout, stall_timeout=stall
                )
            if self._warm:
                self.warmed = warm_up(
                    operations=self._operations,
                    timeout=0.75 * timeout,  # before that of the collectives, whose error names no rank
                    stall_timeout=stall,
                    memory_budget=self._budget,
                )
        except BaseException as error:
            self._end(error)
            raise
        return self

    def until_exit(self) -> Self:
        """Begin the session, and end it at the end of the process.

        Use it in place of a `with` block where you can't put one around the program's code.
        """
        self.__enter__()
        keep_spares(self)
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
        exited = given()
        try:
            self.__exit__(None, SystemExit(exited.code) if exited is not None else None, None)
        except BaseException as error:
            if not hasattr(error, TOLD):
                print(f"rank {self._roster.rank} ends: {error}", file=sys.stderr, flush=True)
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
        """End the session together with the other ranks."""
        ends = time.monotonic() + self._timeout

        def left() -> float:
            # Above 0, because calls refuse a timeout of 0.
            return max(0.1, ends - time.monotonic())

        # Saves first, because they need the message store and all ranks.
        self._way.watch.presence.phase = "waiting for its saves"
        for checkpoints in self._checkpoints:
            checkpoints.close(left())  # raises on all ranks
        wait_for_saves(left())
        made = self.groups.distinct() if self.groups is not None else []
        mine = [group for group in made if group is not dist.group.WORLD]
        if self._owns_world:
            mine = [entry.group for entry in known_groups()]
        # From here the heartbeats of the closing, not of the monitor, show that this rank is alive.
        self._way.watch.hand_over()
        call = begin_call(self._way.watch.roster, timeout=left(), stall_timeout=self._stall)
        closing = self._way.closing = Closing(mine, call)
        # Checked after `closing` is set, because a failure before that found nothing to cancel.
        if self.failure is not None:
            raise self.failure
        closing.run()
        self._way.end_in_order(time.monotonic() + self._grace)
        self._store = None
        open_sessions.remove(self)

    def _end(self, error: BaseException | None) -> None:
        """End the session after a failure, here or elsewhere. Raise what replaces `error`, if anything."""
        self._way.come_back()
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


def session(
    grid: Grid | None = None,
    *,
    backend: str | None = None,
    timeout: float = 600.0,
    stall_timeout: float = 60.0,
    grace: float = 10.0,
    after_end: float | None = 120.0,
    warm: bool = True,
    operations: Sequence[str] | None = None,
    memory_budget: int | None = None,
) -> Session:
    """Open, warm up, watch and close process groups around a `with` block, on all ranks.

        with holdfast.session(holdfast.Grid(16, tp=2, pp=2, ep=2), timeout=600) as s:
            checkpoints = s.checkpoints("run/", keep=3)
            train(s.groups["tp"], s.groups["edp"])

    grid: the layout, whose groups are `s.groups`; None: no groups are made.
    timeout: seconds for each of start, opening and warm-up, for collectives of the groups, and for the end;
        the latter includes the time in which ranks wait for a slower one.
    stall_timeout: seconds that a rank's process may be silent, at any time.
    grace: seconds that processes have to end after a failure becomes known. A process that is stuck in a call
        then exits with code 86. If anything else blocks it in the session's end, it is ended by force after
        twice that time and five seconds.
    after_end: seconds that a process may still be there after the end of its main thread. Then its stacks are
        written, with what keeps it alive, and it exits with code 87. None: no bound. A program that goes on
        after the session is not touched.
    warm: whether to warm up all groups that torch knows.
    operations, memory_budget: see `warm_up`.

    If torch.distributed is not initialised, the session initialises it from torchrun's environment, with an
    error that names missing ranks, and destroys it at the end.

    If the body raises on one rank, that rank raises its exception, and all others raise `RankFailed`, which
    quotes it, also if they wait in a collective. If a rank dies, all others raise `RankFailed` too.
    """
    return Session(
        grid,
        backend=backend,
        timeout=timeout,
        stall_timeout=stall_timeout,
        grace=grace,
        after_end=after_end,
        warm=warm,
        operations=operations,
        memory_budget=memory_budget,
    )


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
