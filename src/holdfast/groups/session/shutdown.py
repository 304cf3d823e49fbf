"""Leave a session after a failure, of this rank or another: at once, in bounded time, and in order.

The rank that failed first tells the others, waits until they have heard, and leaves last, so that its
traceback is the last on the terminal. The others say in one line why they end. All waits share one deadline,
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
from contextlib import suppress

import torch
import torch.distributed as dist

from holdfast.background.manager import last_saves, wait_for_saves
from holdfast.background.pending import CANCELLED
from holdfast.errors import HoldfastError, RankFailed, RankInfo, RosterLost, from_message
from holdfast.exits import hurry
from holdfast.groups.audit.doctor import stop
from holdfast.groups.lifecycle.close import Closing, abort_all
from holdfast.groups.session.blame import (
    in_words,
    innermost_call,
    not_in_the_collective,
    ranks_of_collective,
)
from holdfast.groups.session.calls import is_between_calls, is_in_collective
from holdfast.groups.session.monitor import PATIENCE, Monitor
from holdfast.protocol.whereabouts import end_tellers
from holdfast.roster.base import Roster
from holdfast.stacks import calls_of_frame
from holdfast.threads import start_thread
from holdfast.values import Message

log = logging.getLogger("holdfast")

EXIT_STUCK = 86
"""Exit code of a process that was ended because a call in it, mostly a collective, did not return after
another rank had failed."""
TOLD = "_holdfast_told"
"""An attribute of exceptions that are on the terminal already."""


class _Interrupted(RankFailed):
    """Raised in a body that still runs when the session has failed; the session replaces it by the error.

    In an actor, whose body has no end of its own, the caller gets it, and sees which rank has failed.
    """

    plain = RankFailed


def _interruption(failure: HoldfastError) -> type[_Interrupted]:
    """Return an exception class that needs no arguments: only such can be raised in another thread."""

    class Interrupted(_Interrupted):
        def __init__(self) -> None:
            super().__init__(failure.message, rank=failure.rank, missing=failure.missing, hint=failure.hint)

    # A traceback shows the public name.
    Interrupted.__name__ = Interrupted.__qualname__ = RankFailed.__name__
    return Interrupted


class Leaving:
    """The way of one rank out of one session."""

    def __init__(self, lane: Roster, key: str, host: Message, stall_timeout: float, grace: float) -> None:
        self.watch = Monitor(lane, key, host, stall_timeout, self.on_failure)
        self.left, self.over = threading.Event(), threading.Event()
        """Set when the body is over, and when the session is."""
        self._ending = threading.Event()
        """Set when the session's end has begun."""
        self.closing: Closing | None = None
        """The closing of groups, which a failure elsewhere interrupts."""
        self._grace, self._thread = grace, threading.get_ident()
        self._gate, self._announced = threading.Lock(), False
        self._ends: float | None = None
        self._world: object = None

    def begin(self) -> None:
        """Start the monitor, and in advance the thread that may have to end the process by force."""
        self._world = _world()
        self.watch.start()
        start_thread(self._end_by_force, "holdfast-session-end", self.watch.roster.rank)

    def come_back(self) -> None:
        """Note that the body is over: from here on nothing is raised into this thread."""
        while not self.left.is_set():
            with suppress(_Interrupted), self._gate:  # one that was raised before may arrive here
                self.left.set()
                _raise_in(self._thread, None)

    def leave_in_order(self, ends: float) -> None:
        """Leave; the lowest rank leaves last, because it mostly hosts the message store.

        This rank does not use the store after this.
        """
        self.watch.stop()
        stop()
        # The others do what needs the store before they say `left`, because it may be gone right after.
        if self.watch.roster.rank:
            end_tellers(self.watch.roster)
        self.watch.say("left")
        if not self.watch.roster.rank:
            self.watch.wait_for("left", self._others(), ends)
            end_tellers(self.watch.roster)
        self.watch.ask_no_more()

    def end_in_order(self, ends: float) -> None:
        """Leave after a session without failure."""
        self.leave_in_order(ends)
        self.over.set()
        self._ending.set()

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
        """Leave after a failure, here or elsewhere. Raise what replaces `error`, if anything."""
        self._set_end()
        self._ending.set()
        hurry()
        try:
            self._after(error)
        finally:
            self.over.set()

    def _set_end(self) -> float:
        """Return the deadline that all waits share; it starts when a failure is first known."""
        if self._ends is None:
            self._ends = time.monotonic() + self._grace
        return self._ends

    def _end_by_force(self) -> None:
        """End the process if anything keeps it from leaving the session."""
        self._ending.wait()
        if not self.over.wait(2 * self._grace + PATIENCE):
            self._say_stuck("it could not be left in order")
            os._exit(EXIT_STUCK)

    def _after(self, error: BaseException | None) -> None:
        watch, ends = self.watch, self._set_end()
        # Another rank's failure may cause an error here before its message arrives.
        if watch.failure is None and _may_be_echo(error):
            until = min(time.monotonic() + 2.0, ends)
            while watch.failure is None and time.monotonic() < until:
                watch.look()
                time.sleep(0.05)
        watch.stop()
        # This rank is the first: tell the others, free those that wait in collectives, and leave last.
        if watch.failure is None and watch.fail(self._in_words(error)):
            abort_all()
            self._let_go_of_saves(ends)
            watch.wait_for("heard", self._others(), ends)
            self.leave_in_order(ends)
            return
        # Another rank was first. An own exception of this rank stands; any other is replaced by that failure.
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

        If a collective broke, the failure and a note on the exception name its ranks that were not in it.
        """
        watch = self.watch
        elsewhere: tuple[RankInfo, ...] = ()
        if error is not None and not isinstance(error, HoldfastError) and _is_echo(error):
            ranks = ranks_of_collective(error, watch.roster.world_size)
            elsewhere = watch.ask_where(ranks, innermost_call(error))
        failure = in_words(error, watch.presence.identity, elsewhere)
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
        first = None if failure.missing else failure.rank  # missing ranks say nothing more
        known = self.watch.known(first) if first is not None and first != self.watch.roster.rank else None
        if first:  # if rank 0 failed first, it waits for all others
            self.watch.wait_for("left", [first], ends)
            self._see_off(known, time.monotonic() + 0.5)
        self.leave_in_order(ends)
        if first == 0:
            self._see_off(known, ends)

    def _see_off(self, known: Message | None, ends: float) -> None:
        """Wait until the process of the rank that failed has ended.

        This rank's own lines are printed by then, so the traceback of that rank comes last.
        """
        while known is not None and time.monotonic() < ends and self.watch.is_alive(known):
            time.sleep(0.02)

    def _let_go_of_saves(self, ends: float) -> None:
        """Wait for saves under way, then cancel the rest on all ranks, as a part of the session's failure."""
        last = last_saves()
        under_way = [pending for pending in last if not pending.done()]
        # The other half of the time is for the rest of the way out.
        for pending in wait_for_saves(max(0.0, ends - time.monotonic()) / 2):
            pending.cancel()
        wait_for_saves(min(1.0, max(0.0, ends - time.monotonic())))
        for pending in last:
            error = pending.upload_completion.failure()
            if pending in under_way or _is_consequence(error):
                pending.upload_completion.seen = True
                log.info("%r ended with the session: %s", pending, error or "committed")

    def _hear(self, failure: HoldfastError) -> None:
        """Announce the failure of another rank once, and abort all groups."""
        with self._gate:
            # The monitor's thread and the body's thread both come here.
            announced, self._announced = self._announced, True
        if not announced:
            print(f"rank {self.watch.roster.rank} ends: {failure.message}", file=sys.stderr, flush=True)
            self.watch.say("heard")
            abort_all()

    def on_failure(self, failure: HoldfastError) -> None:
        """Free the body and end its saves. Runs on the monitor's thread: the body may be in a stuck call."""
        ends = self._set_end()
        self._hear(failure)
        # A part of the grace is for the rank that failed first, which leaves after this one.
        self._free(failure, ends - 0.3 * self._grace)
        if self.closing is not None:
            self.closing.operation.cancel.set(failure)
        for pending in wait_for_saves(0.0):
            pending.cancel()
        self._free_later_calls(failure)

    def _free(self, failure: HoldfastError, ends: float) -> None:
        """Raise the failure in the body, or end the process if the body does not return."""
        if self.left.wait(0.5):  # most calls return once groups are aborted and peers are gone
            return
        # Under the gate, as in `come_back`: nothing may be raised once the body has been left.
        with self._gate:
            if not self.left.is_set() and not is_between_calls(self._thread):
                _raise_in(self._thread, _interruption(failure))
        if not self._comes_back(max(time.monotonic() + 0.1, ends)):
            self._let_go_of_saves(time.monotonic() + 1.0)
            self._say_stuck("it did not come back to the session's end")
            self.leave_in_order(time.monotonic() + self._grace)
            # Python can't end a thread that is in a call of C code, so the process is ended.
            os._exit(EXIT_STUCK)

    def _free_later_calls(self, failure: HoldfastError) -> None:
        """Free the later calls of an actor, which goes on after its session has failed.

        A collective of such a call never ends. Each has `grace` to return, until the program has initialised
        torch.distributed again.
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
            if is_between_calls(self._thread):
                return True
            if time.monotonic() > ends or (not in_collective and is_in_collective(self._thread)):
                return False
        return True

    def _say_stuck(self, why: str) -> None:
        where = calls_of_frame(sys._current_frames().get(self._thread))
        first = "" if self.watch.failure is None else f" {self.watch.failure.message}"
        print(
            f"rank {self.watch.roster.rank} ends with exit code {EXIT_STUCK}: {why}; "
            f"it is at {where}.{first}",
            file=sys.stderr,
            flush=True,
        )
        # `os._exit` follows, which flushes nothing.
        sys.stdout.flush()


def _world() -> object:
    """Return the default group of this process, if it has one."""
    return dist.group.WORLD if dist.is_initialized() else None


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Raise an exception in a thread, once it is back in Python; None: take that back."""
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


def _is_consequence(error: BaseException | None) -> bool:
    """Return whether this error of a save is a consequence of other ranks that failed or cancelled it."""
    given_up = isinstance(error, HoldfastError) and CANCELLED in error.details
    return given_up or isinstance(error, RankFailed | RosterLost)


def _may_be_echo(error: BaseException | None) -> bool:
    """Return whether an error may be the effect of another rank's failure.

    If so, this rank looks for that failure before it claims to be the first.
    """
    # It is a RuntimeError too, but always this rank's own.
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return error is None or isinstance(error, RankFailed | RosterLost | RuntimeError)


def _is_echo(error: BaseException | None) -> bool:
    """Return whether an error is one that a collective or the store raises when another rank is gone."""
    if error is None or isinstance(error, RankFailed | RosterLost | dist.DistError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    return any(word in str(error).lower() for word in _BROKEN)
