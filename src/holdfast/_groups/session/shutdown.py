"""Shutdown of a session after a failure of any rank: immediate, in bounded time, and in order.

The rank that failed first notifies the others, waits for their acknowledgement, and leaves last, so that its
traceback is the last on the terminal. The others log one line with the reason. All waits share one deadline,
which starts when this rank first learns of the failure.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist

from holdfast._core.base.stacks import calls_of_frame
from holdfast._core.base.threads import start_thread
from holdfast._core.process.exits import hurry, say
from holdfast._core.process.under_way import last_works, wait_for_works
from holdfast._core.protocol.task import CollectiveTask
from holdfast._core.roster.base import Roster
from holdfast._core.roster.lost import by_kernel
from holdfast._core.roster.presence import Vitals
from holdfast._groups.ending.bound import arm, disarm
from holdfast._groups.lifecycle.close import abort_all
from holdfast._groups.session.blame import (
    in_words,
    innermost_call,
    not_in_the_collective,
    ranks_of_collective,
)
from holdfast._groups.session.monitor import Monitor
from holdfast.errors import HoldfastError, RankFailed, RankInfo, RosterLost, from_message

log = logging.getLogger("holdfast")

EXIT_STUCK = 86
"""Exit code of a process that was ended because a call, usually a collective, did not return after another
rank had failed."""
PATIENCE = 5.0
"""Seconds, in addition to twice the grace, after which a process stuck in its shutdown is ended."""
NOTICED = 0.3
"""Seconds after which the launcher has noticed the end of a process. torchrun polls every 0.1 s, and if
several processes have ended since the last poll, it reports the lowest rank as the cause."""
TOLD = "_holdfast_told"
"""An attribute that marks exceptions already printed on the terminal."""


class _Interrupted(RankFailed):
    """Raised in a body that still runs when the session has failed; the session replaces it by the error.

    In an actor, whose body does not end by itself, it reaches the caller, and names the failed rank.
    """

    plain = RankFailed


def _interruption(failure: HoldfastError) -> type[_Interrupted]:
    """Return an exception class without arguments, as required for raising in another thread."""

    class Interrupted(_Interrupted):
        def __init__(self) -> None:
            super().__init__(failure.message, rank=failure.rank, missing=failure.missing, hint=failure.hint)

    # A traceback shows the public name.
    Interrupted.__name__ = Interrupted.__qualname__ = RankFailed.__name__
    return Interrupted


class Leaving:
    """The shutdown of a session on one rank."""

    def __init__(
        self, lane: Roster, key: str, host: Vitals | None, stall_timeout: float | None, grace: float
    ) -> None:
        self.watch = Monitor(lane, key, host, stall_timeout, self.on_failure)
        self.left = threading.Event()
        """Set when the body is over."""
        self.closing: CollectiveTask | None = None
        """A task at the end of the session, which a failure elsewhere interrupts."""
        self._grace, self._thread = grace, threading.get_ident()
        self._gate, self._announced, self._raised = threading.Lock(), False, False
        self._ends: float | None = None
        self._world: object = None
        self.is_between_calls: Callable[[int], bool] = lambda thread: False
        """Whether the thread with this ID is not in a call, if the body consists of calls, as in an actor."""

    def begin(self) -> None:
        """Start the monitor."""
        self._world = _world()
        self.watch.start()

    def come_back(self) -> None:
        """Mark the body as ended: from here on, nothing is raised in this thread."""
        while not self.left.is_set():
            with suppress(_Interrupted), self._gate:  # one that was raised before may arrive here
                self.left.set()
                if self._raised:
                    _take_back(self._thread)

    def leave_in_order(self, ends: float) -> None:
        """Leave; the rank that hosts the message store leaves last.

        This rank does not use the store after this.
        """
        self.watch.stop()
        if self.watch.server == self.watch.roster.rank:
            self.watch.wait_for("left", self._others(), ends)
        self.watch.say("left")
        self.watch.leave()

    def _others(self) -> list[int]:
        """Return the other ranks, without those that the failure reports as missing."""
        missing = (
            {info.rank for info in self.watch.failure.missing} if self.watch.failure is not None else set()
        )
        return [
            rank
            for rank in range(self.watch.roster.world_size)
            if rank not in {self.watch.roster.rank, *missing}
        ]

    def end(self, error: BaseException | None) -> None:
        """Leave after a failure, here or elsewhere. May raise another error in place of `error`."""
        self._set_end()
        hurry()
        # A timer outside of Python: no Python thread can end a process that is stuck in a call with the GIL.
        arm(2 * self._grace + PATIENCE)
        try:
            self._after(error)
        finally:
            disarm()

    def _set_end(self) -> float:
        """Return the deadline that all waits share; it starts when a failure is first known."""
        if self._ends is None:
            self._ends = time.monotonic() + self._grace
        return self._ends

    def _after(self, error: BaseException | None) -> None:
        watch, ends = self.watch, self._set_end()
        # Another rank's failure may cause an error here before its message arrives.
        if watch.failure is None and _may_be_echo(error):
            if error is not None:
                watch.say("raised")
            until = min(time.monotonic() + 2.0, ends)
            while watch.failure is None and time.monotonic() < until:
                watch.look()
                time.sleep(0.05)
        watch.stop()
        # This rank failed first: notify the others, unblock ranks that wait in collectives, and leave last.
        if watch.failure is None and watch.fail(self._in_words(error)):
            abort_all()
            self._let_go_of_saves(ends)
            watch.wait_for("heard", self._others(), ends)
            self.leave_in_order(ends)
            return
        # Another rank failed first. An independent exception of this rank is kept; any other is replaced.
        failure = watch.failure
        assert failure is not None
        own = error is not None and not isinstance(error, HoldfastError) and not _is_echo(error)
        self._follow(failure, error if own else None, ends)
        if not own:
            copy = from_message(failure.to_message())
            setattr(copy, TOLD, True)
            raise copy from None

    def _in_words(self, error: BaseException | None) -> HoldfastError:
        """Return this rank's failure.

        If a collective broke, the failure and a note on the exception name the ranks that had not entered it.
        """
        watch = self.watch
        elsewhere: tuple[RankInfo, ...] = ()
        if error is not None and not isinstance(error, HoldfastError) and _is_echo(error):
            ranks = ranks_of_collective(error, watch.roster.world_size)
            elsewhere = watch.ask_where(ranks, innermost_call(error))
        failure = in_words(error, watch.presence.beacon.who, elsewhere)
        if elsewhere and error is not None:
            error.add_note(f"holdfast: {not_in_the_collective(elsewhere)}.")
        return failure

    def _follow(self, failure: HoldfastError, own: BaseException | None, ends: float) -> None:
        """Leave after another rank that failed first."""
        if own is not None and not hasattr(own, TOLD):
            traceback.print_exception(own)
            setattr(own, TOLD, True)
        self._hear(failure)
        self._let_go_of_saves(ends)
        first = None if failure.missing else failure.rank  # missing ranks announce nothing more
        known = self.watch.known(first) if first is not None and first != self.watch.roster.rank else None
        if known is not None and first != self.watch.server:
            self.watch.wait_for("left", [known.who.rank], ends)
            see_off(known, min(time.monotonic() + 2.0, ends))
        self.leave_in_order(ends)
        if first == self.watch.server:  # it has waited for all others
            see_off(known, ends)

    def _let_go_of_saves(self, ends: float) -> None:
        """Wait for saves under way, then cancel the rest on all ranks, as a part of the session's failure."""
        last = last_works()
        under_way = [save for save in last if not save.done()]
        # The other half of the time is for the rest of the shutdown.
        for save in wait_for_works(max(0.0, ends - time.monotonic()) / 2):
            save.cancel()
        wait_for_works(min(1.0, max(0.0, ends - time.monotonic())))
        for save in last:
            error = save.failure()
            # Errors that follow from the failure of other ranks are reported with that failure.
            if save in under_way or save.cancelled() or isinstance(error, RankFailed | RosterLost):
                save.seen = True
                log.info("%r ended with the session: %s", save, error or "committed")

    def _hear(self, failure: HoldfastError) -> None:
        """Announce the failure of another rank once, and abort all groups."""
        with self._gate:
            # Called on the monitor's thread and on the body's thread.
            announced, self._announced = self._announced, True
        if not announced:
            say(f"rank {self.watch.roster.rank} ends: {failure.message}")
            self.watch.say("heard")
            abort_all()

    def on_failure(self, failure: HoldfastError) -> None:
        """Unblock the body and end its saves. Runs on a separate thread: the body may be in a stuck call."""
        ends = self._set_end()
        self._hear(failure)
        # The rest of the grace is for the rank that failed first, which leaves after this one.
        self._free(failure, ends - 0.3 * self._grace)
        if self.closing is not None:
            self.closing.operation.cancel.set(failure)
        for save in wait_for_works(0.0):
            save.cancel()
        self._free_later_calls(failure)

    def _free(self, failure: HoldfastError, ends: float) -> None:
        """Raise the failure in the body, or end the process if the body does not return."""
        if self.left.wait(0.5):  # most calls return once groups are aborted and peers are gone
            return
        # Under the gate, as in `come_back`: nothing may be raised once the body has been left.
        with self._gate:
            if not self.left.is_set() and not self.is_between_calls(self._thread):
                self._raised = True
                _raise_in(self._thread, _interruption(failure))
        if not self._comes_back(max(time.monotonic() + 0.1, ends)):
            self._let_go_of_saves(time.monotonic() + 1.0)
            self._say_stuck()
            self.leave_in_order(time.monotonic() + self._grace)
            # Python can't end a thread that is in a call of C code, so the process is ended.
            os._exit(EXIT_STUCK)

    def _free_later_calls(self, failure: HoldfastError) -> None:
        """Unblock later calls of an actor, which continues after its session has failed.

        A collective in such a call never ends. Each call has `grace` to return, until the program has
        initialised torch.distributed again.
        """
        while not self.left.is_set() and _world() is self._world:
            if not self._comes_back(time.monotonic() + self._grace, in_collective=False):
                abort_all()
                self._free(failure, time.monotonic() + 0.7 * self._grace)
            self.left.wait(0.2)

    def _comes_back(self, ends: float, in_collective: bool = True) -> bool:
        """Wait until `ends`; return whether the body is over, or the actor is between two calls.

        in_collective: also wait while the thread is in a collective; False: return False once it is in one.
        """
        while not self.left.wait(0.1):
            if self.is_between_calls(self._thread):
                return True
            if time.monotonic() > ends or (not in_collective and self._is_in_collective()):
                return False
        return True

    def _is_in_collective(self) -> bool:
        """Return whether the body's thread is in a call of torch.distributed."""
        frame = sys._current_frames().get(self._thread)
        while frame is not None:
            if str(frame.f_globals.get("__name__")).startswith("torch.distributed."):
                return True
            frame = frame.f_back
        return False

    def _say_stuck(self) -> None:
        where = calls_of_frame(sys._current_frames().get(self._thread))
        first = "" if self.watch.failure is None else f" {self.watch.failure.message}"
        say(
            f"rank {self.watch.roster.rank} ends with exit code {EXIT_STUCK}: it did not come back to the "
            f"session's end; it is at {where}.{first}"
        )
        # `os._exit` follows, which flushes nothing.
        with suppress(Exception):
            sys.stdout.flush()


def see_off(known: Vitals | None, ends: float) -> None:
    """Wait until the process of the rank that failed has ended, and its launcher has noticed.

    ends: of `time.monotonic()`: the latest time until which the end of that process is waited for.

    This rank's own lines are printed by then, so the other rank's traceback comes last.
    """
    if known is None or by_kernel(known.who).there is None:
        return
    while by_kernel(known.who).there:
        if time.monotonic() >= ends:
            return
        time.sleep(0.02)
    time.sleep(NOTICED)


def _world() -> object:
    """Return the default group of this process, if it has one."""
    return dist.group.WORLD if dist.is_initialized() else None


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    """Raise an exception in a thread, once it is back in Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


class _Nothing(BaseException):
    """Raised only to clear the interpreter's flag (`_take_back`)."""


def _take_back(thread: int) -> None:
    """Cancel an exception that is pending in a thread.

    Up to Python 3.12, cancelling leaves the interpreter's flag for pending exceptions set, and only delivery
    of an exception clears it. With the flag set, calls and loops stay slower (3.12), and a profiler hangs
    (3.11). So another exception is delivered, on a separate thread, where Ctrl-C can't interfere.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)

    def clear() -> None:
        try:
            _raise_in(threading.get_ident(), _Nothing)
            while True:  # until it is delivered, which is immediate
                time.sleep(0)
        except _Nothing:
            pass

    with suppress(HoldfastError):  # no thread can be started: the flag stays set
        start_thread(clear, "holdfast-take-back").join(1.0)


_BROKEN = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "timed out waiting",
    "gloo",
    "nccl",
)


def _may_be_echo(error: BaseException | None) -> bool:
    """Return whether an error may be the effect of another rank's failure.

    If so, this rank checks for that failure before it claims to be the first.
    """
    # A RuntimeError too, but always this rank's own failure.
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return error is None or isinstance(error, RankFailed | RosterLost | RuntimeError)


def _is_echo(error: BaseException | None) -> bool:
    """Return whether an error is typical of a collective or the store after the loss of another rank."""
    if error is None or isinstance(error, RankFailed | RosterLost | dist.DistError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    return any(word in str(error).lower() for word in _BROKEN)
