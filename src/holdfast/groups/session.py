"""`session`: process groups from their opening to their end, whatever happens in between.

Normal end: saves that are under way are waited for, all ranks say that they are here, groups are destroyed in reverse order under
a deadline, and the rank that hosts the message store goes last. After an exception there is no collective: the rank that raised tells
the others, each lets go of its groups, and every process ends within `grace`, with the first error last on the terminal.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch.distributed as dist

from holdfast.deadline import check_seconds
from holdfast.errors import HoldfastError, RankFailed, RosterLost
from holdfast.flow.background import wait_for_saves
from holdfast.flow.checkpoints import Checkpoints
from holdfast.flow.world import find_roster
from holdfast.groups.close import Closing, abort_all
from holdfast.groups.doctor import stop
from holdfast.groups.monitor import Monitor
from holdfast.groups.open import Groups, open_groups
from holdfast.groups.start import start_world
from holdfast.groups.warm_up import WarmUpReport, warm_up
from holdfast.layout.grid import Grid
from holdfast.roster.base import Message, Roster
from holdfast.torch_private import known_groups

EXIT_STUCK = 86
"""Exit code of a process that was ended because a call of it, a collective mostly, did not return after another rank had failed."""
_made: WeakKeyDictionary[Roster, Counter[str]] = WeakKeyDictionary()
_told: list[BaseException] = []
"""Exceptions whose story is on the terminal already."""


_to_the_end: list[Session] = []
"""Sessions without a `with` block."""


def _is_told(error: BaseException) -> bool:
    return any(error is told for told in _told)


class _Interrupted(RankFailed):
    """Raised in a body that goes on while the session has ended; the session replaces it by the error itself."""

    def __init__(self) -> None:
        super().__init__("The session has ended: another rank failed.")


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
        warm: bool = True,
        operations: Sequence[str] = ("all_reduce",),
        memory_budget: int | None = None,
        owns_world: bool | None = None,
    ) -> None:
        for name, value in {"timeout": timeout, "stall_timeout": stall_timeout, "grace": grace}.items():
            check_seconds(name, value)
        self.grid = grid
        self.groups: Groups | None = None
        self.warmed: WarmUpReport | None = None
        self._backend, self._timeout, self._stall, self._grace = backend, timeout, stall_timeout, grace
        self._warm, self._operations, self._budget = warm, tuple(operations), memory_budget
        self._owns_world = owns_world
        self._left = threading.Event()
        self._closing: Closing | None = None
        self._checkpoints: list[Checkpoints] = []

    # -- in the body ----------------------------------------------------------------------------

    def checkpoints(self, run: str | os.PathLike[str], **how: Any) -> Checkpoints:
        """`holdfast.Checkpoints` that the session closes at its end."""
        made = Checkpoints(run, **{"grid": self.grid, **how})
        self._checkpoints.append(made)
        return made

    @property
    def failure(self) -> HoldfastError | None:
        """Why the session is over on all ranks, if it is."""
        return self._monitor.failure

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        started = not dist.is_initialized()
        if started:
            start_world(self._backend, self._timeout, self._stall)
        self._owns_world = started if self._owns_world is None else self._owns_world
        self._roster = find_roster(None, False)
        try:
            if self.grid is not None:
                self.groups = open_groups(
                    self.grid, backend=self._backend, timeout=self._timeout, stall_timeout=self._stall
                )
            if self._warm:
                self.warmed = warm_up(
                    operations=self._operations,
                    timeout=self._timeout,
                    stall_timeout=self._stall,
                    memory_budget=self._budget,
                )
        except BaseException:
            self._arm()
            abort_all()
            raise
        made = _made.setdefault(self._roster, Counter())
        made["session"] += 1
        self._lane = self._roster.lane("session")
        self._monitor = Monitor(self._lane, f"session/{made['session']}", self._stall, self._on_failure)
        self._monitor.start()
        _install_hook()
        return self

    def until_exit(self) -> Self:
        """Instead of a `with` block: from here to the end of the process, for a program whose body is somebody else's."""
        self.__enter__()
        _to_the_end.append(self)
        atexit.register(self._at_exit)
        return self

    def _at_exit(self) -> None:
        if self._left.is_set():
            return
        try:
            self.__exit__(None, None, None)
        except BaseException as error:
            if not _is_told(error):
                print(f"rank {self._roster.rank} ends: {error}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)  # the interpreter would say that all is well

    def _raised(self, error: BaseException) -> BaseException | None:
        """Nobody has caught this; returns what is to be printed at the end."""
        self._left.set()
        try:
            self._after(error)
        except BaseException as instead:
            error = instead
        return None if _is_told(error) else error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        clean = error is None or (isinstance(error, SystemExit) and not error.code)
        if clean and self.failure is None:
            try:
                self._close()
                return
            except BaseException as raised:
                error = raised
                self._after(raised)
                raise
        self._after(error)

    # -- the end --------------------------------------------------------------------------------

    def _close(self) -> None:
        """Together with the others."""
        ends = time.monotonic() + self._timeout
        self._monitor.presence.phase = "waiting for its saves"
        for checkpoints in self._checkpoints:
            checkpoints.close()  # by its own deadline; raises on all ranks
        wait_for_saves(max(0.1, ends - time.monotonic()))
        made = self.groups.distinct() if self.groups is not None else []
        mine = [group for group in made if group is not dist.group.WORLD]
        if self._owns_world:
            mine = [found.group for found in known_groups()]
        self._monitor.hand_over()
        self._closing = Closing(mine, self._lane, max(0.1, ends - time.monotonic()), self._stall)
        self._closing.run()
        self._leave_in_order()

    def _leave_in_order(self) -> None:
        """The lowest rank goes last, as it mostly hosts the message store; nobody asks the store for anything after this."""
        self._monitor.stop()
        stop()
        with suppress(RosterLost):
            self._monitor.say("left")
            if not self._roster.rank:
                self._monitor.wait_for("left", list(range(1, self._roster.world_size)), self._grace)

    def _after(self, error: BaseException | None) -> None:
        """Something failed, here or elsewhere. Returns for `error` to go on; raises what takes its place."""
        self._arm()
        if self.failure is None and _is_echo(error):
            ends = time.monotonic() + min(2.0, self._grace)  # who failed first is about to be told
            while self.failure is None and time.monotonic() < ends:
                self._monitor.look()
                time.sleep(0.05)
        self._monitor.stop()
        first = self.failure is None and self._monitor.fail(self._in_words(error))
        if first:
            self._lead_out()
            return
        failure = self.failure
        assert failure is not None
        own = None if error is None or isinstance(error, HoldfastError) or _is_echo(error) else error
        self._follow_out(failure, own)
        if own is None:
            told = type(failure)(
                failure.message, rank=failure.rank, missing=failure.missing, hint=failure.hint
            )
            _told.append(told)
            raise told from None

    def _in_words(self, error: BaseException | None) -> HoldfastError:
        if isinstance(error, HoldfastError) and error.missing:
            return error
        me = self._monitor.presence.identity
        said = traceback.format_exception_only(error)[-1].strip() if error is not None else "nothing"
        return RankFailed(
            f"The session ended because rank {me.rank} (host {me.host}, pid {me.pid}) raised {said[:500]}.",
            rank=me.rank,
            hint="Its traceback is in that rank's output.",
        )

    def _lead_out(self) -> None:
        """This rank failed first: its error is to be the last that is printed."""
        rank, world = self._roster.rank, self._roster.world_size
        others = [other for other in range(world) if other != rank]
        abort_all()
        self._let_go_of_saves()
        with suppress(RosterLost):
            self._monitor.wait_for("heard", others, self._grace)
            if rank:
                self._monitor.say("left")
                return
        self._leave_in_order()

    def _follow_out(self, failure: HoldfastError, own: BaseException | None) -> None:
        """Another rank failed first: say so, let go, and leave after it."""
        if own is not None and own not in _told:
            traceback.print_exception(own)
            _told.append(own)
        self._hear(failure)
        self._let_go_of_saves()
        first = failure.rank
        known = self._monitor.known(first) if first is not None and first != self._roster.rank else None
        if first:  # the lowest rank itself waits for all others to be gone
            with suppress(RosterLost):
                self._monitor.wait_for("left", [first], self._grace)
            self._see_off(known, 0.5)
        self._leave_in_order()
        if first == 0:
            self._see_off(known, self._grace)

    def _see_off(self, known: Message | None, seconds: float) -> None:
        """The rank that failed prints its traceback; what this one says comes before."""
        ends = time.monotonic() + seconds
        while known is not None and time.monotonic() < ends:
            if self._monitor.presence.identity.alive(known) is not True:
                return
            time.sleep(0.02)

    def _let_go_of_saves(self) -> None:
        """What is under way may still become a checkpoint; what does not is given up, on all ranks."""
        for pending in wait_for_saves(self._grace / 2):
            pending.cancel()
        wait_for_saves(1.0)

    def _hear(self, failure: HoldfastError) -> None:
        if not self._said:
            self._said = True
            print(f"rank {self._roster.rank} ends: {failure.message}", file=sys.stderr, flush=True)
            with suppress(RosterLost):
                self._monitor.say("heard")
            abort_all()

    _said = False

    def _on_failure(self, failure: HoldfastError) -> None:
        """On the monitor's thread: the body may be in a call that never returns."""
        self._hear(failure)
        if self._left.is_set():
            if self._closing is not None:
                self._closing.operation.cancel.set(failure)
            return
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._thread), ctypes.py_object(_Interrupted)
        )
        if not self._left.wait(self._grace):
            self._let_go_of_saves()
            self._leave_in_order()
            print(
                f"rank {self._roster.rank} ends with exit code {EXIT_STUCK}: it was in a call that did not return.",
                file=sys.stderr,
                flush=True,
            )
            os._exit(EXIT_STUCK)

    def _arm(self) -> None:
        """End the process if its interpreter can't, say because the destructor of a communicator waits."""
        atexit.register(faulthandler.dump_traceback_later, self._grace + 30.0, exit=True)


def session(
    grid: Grid | None = None,
    *,
    backend: str | None = None,
    timeout: float = 600.0,
    stall_timeout: float = 60.0,
    grace: float = 10.0,
    warm: bool = True,
    operations: Sequence[str] = ("all_reduce",),
    memory_budget: int | None = None,
) -> Session:
    """Process groups for the length of a `with` block, on all ranks: opened, warmed up, watched, closed.

        with holdfast.session(holdfast.Grid(16, tp=2, pp=2, ep=2), timeout=600) as s:
            checkpoints = s.checkpoints("run/", keep=3)
            train(s.groups["tp"], s.groups["edp"])

    grid: the layout, whose groups are `s.groups`; None: no groups are made. Initialises torch.distributed (torchrun's environment) if
        that was not done, naming the ranks that do not come, and destroys it at the end if it did.
    timeout: seconds for opening and warm-up, for collectives of the groups, and for the end, a rank that is busy alone before it
        included. stall_timeout: seconds that a rank's process may be silent, at any time.
    grace: seconds that processes have to end after a failure; one that is stuck in a call exits with code 86 then.
    warm, operations, memory_budget: see `warm_up`; all groups that torch knows are warmed up.

    If the body raises on one rank, that rank's exception is raised there and `RankFailed`, which quotes it, on all others, also those
    that wait for it in a collective; the same if a rank dies.
    """
    return Session(
        grid,
        backend=backend,
        timeout=timeout,
        stall_timeout=stall_timeout,
        grace=grace,
        warm=warm,
        operations=operations,
        memory_budget=memory_budget,
    )


def _is_echo(error: BaseException | None) -> bool:
    """Is it what a collective or the store says when another rank is gone?"""
    if error is None or isinstance(error, RankFailed | RosterLost | dist.DistError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, RuntimeError) and bool(frames) and "torch/distributed" in frames[-1].filename


def _install_hook() -> None:
    """What is on the terminal already is not printed again when the process ends by it."""
    if getattr(sys.excepthook, "_holdfast", False):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shown: BaseException | None = error
        for session in _to_the_end:
            if shown is not None and not session._left.is_set():
                shown = session._raised(shown)
        if shown is not None and not _is_told(shown):
            before(type(shown), shown, shown.__traceback__)

    hook._holdfast = True  # type: ignore[attr-defined]
    sys.excepthook = hook
