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
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist

from holdfast.deadline import check_seconds
from holdfast.errors import HoldfastError, RankFailed, RosterLost, from_message
from holdfast.flow.background import wait_for_saves
from holdfast.flow.checkpoints import Checkpoints
from holdfast.flow.turn import Turn
from holdfast.flow.world import find_roster
from holdfast.groups.close import Closing, abort_all
from holdfast.groups.doctor import stop
from holdfast.groups.monitor import PATIENCE, Monitor
from holdfast.groups.open import Groups, open_groups
from holdfast.groups.start import start_world
from holdfast.groups.warm_up import WarmUpReport, warm_up
from holdfast.layout.grid import Grid
from holdfast.roster.base import Message
from holdfast.torch_private import known_groups

EXIT_STUCK = 86
"""Exit code of a process that was ended because a call of it, a collective mostly, did not return after another rank had failed."""
_open: list[Session] = []
"""Sessions that have begun, and not come to their end."""
_ALREADY = "_holdfast_told"
"""An attribute of exceptions whose story is on the terminal already."""


class _Interrupted(RankFailed):
    """Raised in a body that goes on while the session has ended; the session replaces it by the error itself."""

    def __init__(self) -> None:
        super().__init__("The session has ended: another rank failed.")


class _Beginning(Turn):
    """All ranks are here, and hear a name of this session that no other has."""

    def choose(self, said: dict[int, Message]) -> dict[int, Message]:
        token = secrets.token_hex(6)
        return {rank: {"token": token} for rank in said}

    def act(self, answer: Message) -> Message:
        self.token = str(answer["token"])
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
        self._left, self._over = threading.Event(), threading.Event()
        self._gate, self._said = threading.Lock(), False
        self._ends: float | None = None
        self._exit_code: object = None
        self._monitor: Monitor | None = None
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
        return None if self._monitor is None else self._monitor.failure

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        started = not dist.is_initialized()
        if started:
            start_world(self._backend, self._timeout, self._stall)
        self._owns_world = started if self._owns_world is None else self._owns_world
        self._roster = find_roster(None, False)
        lane = self._roster.lane("session")
        timeout, stall = self._timeout, self._stall
        beginning = _Beginning(
            "beginning of a session", "groups://session", lane, timeout=timeout, stall_timeout=stall
        )
        beginning.run()
        self._monitor = Monitor(lane, f"session/{beginning.token}", self._stall, self._on_failure)
        self._monitor.start()
        _open.append(self)
        _install_hook()
        try:
            if self.grid is not None:
                self.groups = open_groups(
                    self.grid, backend=self._backend, timeout=timeout, stall_timeout=stall
                )
            if self._warm:
                self.warmed = warm_up(
                    operations=self._operations,
                    timeout=0.75 * timeout,  # the collectives' own, later, names nobody
                    stall_timeout=stall,
                    memory_budget=self._budget,
                )
        except BaseException as error:
            self._come_back()
            self._end(error)
            raise
        return self

    def until_exit(self) -> Self:
        """Instead of a `with` block: from here to the end of the process, for a program whose body is somebody else's."""
        self.__enter__()
        exits = sys.exit

        def leave(code: object = None) -> NoReturn:
            self._exit_code = code
            exits(code)  # type: ignore[arg-type]

        sys.exit = leave
        atexit.register(self._at_exit)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._come_back()
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

    def _at_exit(self) -> None:
        if self._left.is_set():
            return
        code = self._exit_code
        try:
            self.__exit__(None, SystemExit(code) if code else None, None)
        except BaseException as error:
            if not hasattr(error, _ALREADY):
                print(f"rank {self._roster.rank} ends: {error}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)  # the interpreter would say that all is well

    def _raised(self, error: BaseException) -> BaseException:
        """Nobody has caught this; returns what is to be printed at the end."""
        self._come_back()
        try:
            self._end(error)
        except BaseException as instead:
            return instead
        return error

    def _come_back(self) -> None:
        """The body is over: from here on nothing is raised into this thread."""
        while not self._left.is_set():
            with suppress(_Interrupted), self._gate:  # one that was on its way may arrive here
                self._left.set()
                _raise_in(self._thread, None)

    @property
    def _watch(self) -> Monitor:
        assert self._monitor is not None
        return self._monitor

    def _close(self) -> None:
        """Together with the others."""
        ends = time.monotonic() + self._timeout

        def left() -> float:
            return max(0.1, ends - time.monotonic())

        self._watch.presence.phase = "waiting for its saves"
        for checkpoints in self._checkpoints:
            checkpoints.close(left())  # raises on all ranks
        wait_for_saves(left())
        made = self.groups.distinct() if self.groups is not None else []
        mine = [group for group in made if group is not dist.group.WORLD]
        if self._owns_world:
            mine = [found.group for found in known_groups()]
        self._watch.hand_over()
        self._closing = Closing(mine, self._watch.roster, left(), self._stall)
        if self.failure is not None:
            raise self.failure
        self._closing.run()
        self._leave_in_order(time.monotonic() + self._grace)
        self._over.set()
        _open.remove(self)

    def _leave_in_order(self, ends: float) -> None:
        """The lowest rank goes last, as it mostly hosts the message store; nobody asks the store for anything after this."""
        self._watch.stop()
        stop()
        self._watch.say("left")
        if not self._roster.rank:
            self._watch.wait_for("left", self._others(), ends)

    def _others(self) -> list[int]:
        """Ranks that may still say something."""
        missing = {info.rank for info in self.failure.missing} if self.failure is not None else set()
        return [rank for rank in range(self._roster.world_size) if rank not in {self._roster.rank, *missing}]

    def _end(self, error: BaseException | None) -> None:
        """Something failed, here or elsewhere. Returns for `error` to go on; raises what takes its place."""
        atexit.register(faulthandler.dump_traceback_later, self._grace + 30.0, exit=True)
        self._set_end()
        threading.Thread(target=self._end_by_force, name="holdfast-session-end", daemon=True).start()
        try:
            self._after(error)
        finally:
            self._over.set()
            if self in _open:
                _open.remove(self)

    def _set_end(self) -> float:
        """From the first that is known of a failure all waits share one deadline."""
        if self._ends is None:
            self._ends = time.monotonic() + self._grace
        return self._ends

    def _end_by_force(self) -> None:
        """Whatever holds this process up on its way out."""
        if not self._over.wait(2 * self._grace + PATIENCE):
            self._say_stuck("it could not be left in order")
            os._exit(EXIT_STUCK)

    def _after(self, error: BaseException | None) -> None:
        watch, ends = self._watch, self._set_end()
        if self.failure is None and _may_be_echo(error):
            look = min(time.monotonic() + 2.0, ends)  # who failed first is about to be told
            while self.failure is None and time.monotonic() < look:
                watch.look()
                time.sleep(0.05)
        watch.stop()
        if self.failure is None and watch.fail(self._in_words(error)):
            abort_all()
            self._let_go_of_saves(ends)
            watch.wait_for("heard", self._others(), ends)
            self._leave_in_order(ends)
            return
        failure = self.failure
        assert failure is not None
        own = error is not None and not isinstance(error, HoldfastError) and not _is_echo(error)
        self._follow(failure, error if own else None, ends)
        if not own:
            told = from_message(failure.to_message())
            setattr(told, _ALREADY, True)
            raise told from None

    def _in_words(self, error: BaseException | None) -> HoldfastError:
        if isinstance(error, HoldfastError) and error.missing:
            return error
        me = self._watch.presence.identity
        said = traceback.format_exception_only(error)[-1].strip() if error is not None else "nothing"
        return RankFailed(
            f"The session ended because rank {me.rank} (host {me.host}, pid {me.pid}) raised {said[:500]}.",
            rank=me.rank,
            hint="Its traceback is in that rank's output.",
        )

    def _follow(self, failure: HoldfastError, own: BaseException | None, ends: float) -> None:
        """Another rank failed first: say so, let go, and leave after it."""
        if own is not None and not hasattr(own, _ALREADY):
            traceback.print_exception(own)
            setattr(own, _ALREADY, True)
        self._hear(failure)
        self._let_go_of_saves(ends)
        first = None if failure.missing else failure.rank  # those that are missing say nothing more
        known = self._watch.known(first) if first is not None and first != self._roster.rank else None
        if first:  # the lowest rank itself waits for all others to be gone
            self._watch.wait_for("left", [first], ends)
            self._see_off(known, time.monotonic() + 0.5)
        self._leave_in_order(ends)
        if first == 0:
            self._see_off(known, ends)

    def _see_off(self, known: Message | None, ends: float) -> None:
        """The rank that failed prints its traceback; what this one says comes before."""
        while known is not None and time.monotonic() < ends and self._watch.is_alive(known):
            time.sleep(0.02)

    def _let_go_of_saves(self, ends: float) -> None:
        """What is under way may still become a checkpoint; what does not is given up, on all ranks."""
        for pending in wait_for_saves(max(0.0, ends - time.monotonic()) / 2):
            pending.cancel()
        wait_for_saves(min(1.0, max(0.0, ends - time.monotonic())))

    def _hear(self, failure: HoldfastError) -> None:
        with self._gate:
            said, self._said = self._said, True
        if not said:
            print(f"rank {self._roster.rank} ends: {failure.message}", file=sys.stderr, flush=True)
            self._watch.say("heard")
            abort_all()

    def _on_failure(self, failure: HoldfastError) -> None:
        """On the monitor's thread: the body may be in a call that never returns."""
        ends = self._set_end()
        self._hear(failure)
        if not self._left.wait(0.5):  # groups that are aborted, and peers that are gone, free most calls
            with self._gate:
                if not self._left.is_set():
                    _raise_in(self._thread, _Interrupted)
            # A part of the grace is left to the rank that failed first, which goes after this one.
            if not self._left.wait(max(0.1, ends - time.monotonic() - 0.3 * self._grace)):
                self._let_go_of_saves(time.monotonic() + 1.0)
                self._say_stuck("it did not come back to the session's end")
                self._leave_in_order(time.monotonic() + self._grace)
                os._exit(EXIT_STUCK)
        if self._closing is not None:
            self._closing.operation.cancel.set(failure)
        for pending in wait_for_saves(0.0):
            pending.cancel()

    def _say_stuck(self, why: str) -> None:
        frame = sys._current_frames().get(self._thread)
        calls = traceback.extract_stack(frame)[-4:]
        at = " > ".join(f"{call.filename.rpartition('/')[2]}:{call.lineno} {call.name}" for call in calls)
        print(
            f"rank {self._roster.rank} ends with exit code {EXIT_STUCK}: {why}; it is at {at}.",
            file=sys.stderr,
            flush=True,
        )
        sys.stdout.flush()


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
    timeout: seconds for each of start, opening and warm-up, for collectives of the groups, and for the end, a rank that is busy alone
        before it included. stall_timeout: seconds that a rank's process may be silent, at any time.
    grace: seconds that processes have to end after the first is known of a failure; one that is stuck in a call exits with code 86
        then. What else holds one up is ended by force after twice that and five seconds.
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


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Have a thread raise, once it is back in Python; None: take that back."""
    what = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


_BROKEN = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "timed out waiting",
    "gloo",
    "nccl",
)


def _may_be_echo(error: BaseException | None) -> bool:
    """May it be what this rank notices of another one's failure? Then it looks around before it says that it was the first."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return error is None or isinstance(error, RankFailed | RosterLost | RuntimeError)


def _is_echo(error: BaseException | None) -> bool:
    """Is it what a collective or the store says when another rank is gone?"""
    if error is None or isinstance(error, RankFailed | RosterLost | dist.DistError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    return any(word in str(error).lower() for word in _BROKEN)


def _install_hook() -> None:
    """An exception that nobody caught ends sessions without a block first; what is on the terminal already is not printed again."""
    if hasattr(sys.excepthook, _ALREADY):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shown = error
        for session in _open:
            if not session._left.is_set():  # also one whose block was left by an interruption of its very end
                shown = session._raised(shown)
        if not hasattr(shown, _ALREADY):
            before(type(shown), shown, shown.__traceback__)

    setattr(hook, _ALREADY, True)
    sys.excepthook = hook
