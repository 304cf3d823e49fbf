"""How a rank leaves a session after a failure, its own or another's: at once, in bounded time, and in order.

The rank that failed first tells the others, waits until they have heard, and goes last, so that its traceback
is the last on the terminal; the others say in one line why they end. All waits share one deadline, which
begins with the first that is known of the failure.
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
"""Exit code of a process that was ended because a call of it, a collective mostly, did not return after
another rank had failed."""
TOLD = "_holdfast_told"
"""An attribute of exceptions whose story is on the terminal already."""


class _Interrupted(RankFailed):
    """Raised in a body that goes on while the session has ended; the session replaces it by the error
    itself. A body that has no end of its own, an actor's, hears by it who has failed."""

    plain = RankFailed


def _interruption(failure: HoldfastError) -> type[_Interrupted]:
    """What can be raised in another thread: a class, made without arguments."""

    class Interrupted(_Interrupted):
        def __init__(self) -> None:
            super().__init__(failure.message, rank=failure.rank, missing=failure.missing, hint=failure.hint)

    # A traceback shows the public name.
    Interrupted.__name__ = Interrupted.__qualname__ = RankFailed.__name__
    return Interrupted


class Leaving:
    """One of these a session."""

    def __init__(self, lane: Roster, key: str, host: Message, stall_timeout: float, grace: float) -> None:
        self.watch = Monitor(lane, key, host, stall_timeout, self.on_failure)
        self.left, self.over = threading.Event(), threading.Event()
        """Is the body over, and the session?"""
        self._ending = threading.Event()
        """Has the session's end begun?"""
        self.closing: Closing | None = None
        """What a failure elsewhere is to interrupt."""
        self._grace, self._thread = grace, threading.get_ident()
        self._gate, self._said = threading.Lock(), False
        self._ends: float | None = None
        self._world: object = None

    def begin(self) -> None:
        """Watch, from here to the end; what ends the process by force is there before it is needed."""
        self._world = _world()
        self.watch.start()
        start_thread(self._end_by_force, "holdfast-session-end", self.watch.roster.rank)

    def come_back(self) -> None:
        """The body is over: from here on nothing is raised into this thread."""
        while not self.left.is_set():
            with suppress(_Interrupted), self._gate:  # one that was on its way may arrive here
                self.left.set()
                _raise_in(self._thread, None)

    def leave_in_order(self, ends: float) -> None:
        """The lowest rank goes last, as it mostly hosts the message store; nobody asks the store for anything
        after this."""
        self.watch.stop()
        stop()
        # All but the lowest do what needs the store before they say `left`: it may be gone right after.
        if self.watch.roster.rank:
            end_tellers(self.watch.roster)
        self.watch.say("left")
        if not self.watch.roster.rank:
            self.watch.wait_for("left", self._others(), ends)
            end_tellers(self.watch.roster)
        self.watch.ask_no_more()

    def end_in_order(self, ends: float) -> None:
        """Nothing failed."""
        self.leave_in_order(ends)
        self.over.set()
        self._ending.set()

    def _others(self) -> list[int]:
        """Ranks that may still say something."""
        missing = (
            {info.rank for info in self.watch.failure.missing} if self.watch.failure is not None else set()
        )
        return [
            rank
            for rank in range(self.watch.roster.world_size)
            if rank not in {self.watch.roster.rank, *missing}
        ]

    def end(self, error: BaseException | None) -> None:
        """Something failed, here or elsewhere. Returns for `error` to go on; raises what takes its place."""
        self._set_end()
        self._ending.set()
        hurry()
        try:
            self._after(error)
        finally:
            self.over.set()

    def _set_end(self) -> float:
        """From the first that is known of a failure all waits share one deadline."""
        if self._ends is None:
            self._ends = time.monotonic() + self._grace
        return self._ends

    def _end_by_force(self) -> None:
        """Whatever holds this process up on its way out of the session."""
        self._ending.wait()
        if not self.over.wait(2 * self._grace + PATIENCE):
            self._say_stuck("it could not be left in order")
            os._exit(EXIT_STUCK)

    def _after(self, error: BaseException | None) -> None:
        watch, ends = self.watch, self._set_end()
        # Was another rank first? Its word may come a moment later than what it has caused here.
        if self.watch.failure is None and _may_be_echo(error):
            look = min(time.monotonic() + 2.0, ends)  # who failed first is about to be told
            while self.watch.failure is None and time.monotonic() < look:
                watch.look()
                time.sleep(0.05)
        watch.stop()
        # This rank is the first: tell the others, free those that wait in collectives, and leave last.
        if self.watch.failure is None and watch.fail(self._in_words(error)):
            abort_all()
            self._let_go_of_saves(ends)
            watch.wait_for("heard", self._others(), ends)
            self.leave_in_order(ends)
            return
        # Another rank was first. This rank's own exception goes on; anything else becomes that failure.
        failure = self.watch.failure
        assert failure is not None
        own = error is not None and not isinstance(error, HoldfastError) and not _is_echo(error)
        self._follow(failure, error if own else None, ends)
        if not own:
            told = from_message(failure.to_message())
            setattr(told, TOLD, True)
            raise told from None

    def _in_words(self, error: BaseException | None) -> HoldfastError:
        """This rank's failure. If a collective of it broke, those of its ranks are named that are somewhere
        else; the exception itself gets a note of them."""
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
        """Another rank failed first: say so, let go, and leave after it."""
        if own is not None and not hasattr(own, TOLD):
            traceback.print_exception(own)
            setattr(own, TOLD, True)
        self._hear(failure)
        self._let_go_of_saves(ends)
        first = None if failure.missing else failure.rank  # those that are missing say nothing more
        known = self.watch.known(first) if first is not None and first != self.watch.roster.rank else None
        if first:  # the lowest rank itself waits for all others to be gone
            self.watch.wait_for("left", [first], ends)
            self._see_off(known, time.monotonic() + 0.5)
        self.leave_in_order(ends)
        if first == 0:
            self._see_off(known, ends)

    def _see_off(self, known: Message | None, ends: float) -> None:
        """Print this rank's sentence first: the traceback of the rank that failed comes last."""
        while known is not None and time.monotonic() < ends and self.watch.is_alive(known):
            time.sleep(0.02)

    def _let_go_of_saves(self, ends: float) -> None:
        """What is under way may still become a checkpoint; what does not is given up, on all ranks, and part
        of the session's failure."""
        last = last_saves()
        under_way = [pending for pending in last if not pending.done()]
        # Half of the time is left for the rest of the way out.
        for pending in wait_for_saves(max(0.0, ends - time.monotonic()) / 2):
            pending.cancel()
        wait_for_saves(min(1.0, max(0.0, ends - time.monotonic())))
        for pending in last:
            error = pending.upload_completion.failure()
            if pending in under_way or _is_consequence(error):
                pending.upload_completion.seen = True
                log.info("%r ended with the session: %s", pending, error or "committed")

    def _hear(self, failure: HoldfastError) -> None:
        with self._gate:
            # The monitor's thread and the body's both come here; one of them says it.
            said, self._said = self._said, True
        if not said:
            print(f"rank {self.watch.roster.rank} ends: {failure.message}", file=sys.stderr, flush=True)
            self.watch.say("heard")
            abort_all()

    def on_failure(self, failure: HoldfastError) -> None:
        """On the monitor's thread: the body may be in a call that never returns."""
        ends = self._set_end()
        self._hear(failure)
        # A part of the grace is left to the rank that failed first, which goes after this one.
        self._free(failure, ends - 0.3 * self._grace)
        if self.closing is not None:
            self.closing.operation.cancel.set(failure)
        for pending in wait_for_saves(0.0):
            pending.cancel()
        self._free_later_calls(failure)

    def _free(self, failure: HoldfastError, ends: float) -> None:
        """Have the body raise, or end the process."""
        if self.left.wait(0.5):  # groups that are aborted, and peers that are gone, free most calls
            return
        # Under the gate, as in `come_back`: nothing may be raised once the body has been left.
        with self._gate:
            if not self.left.is_set() and not is_between_calls(self._thread):
                _raise_in(self._thread, _interruption(failure))
        if not self._comes_back(max(time.monotonic() + 0.1, ends)):
            self._let_go_of_saves(time.monotonic() + 1.0)
            self._say_stuck("it did not come back to the session's end")
            self.leave_in_order(time.monotonic() + self._grace)
            # Python can't end a thread that is in a call of C code. The process can be ended.
            os._exit(EXIT_STUCK)

    def _free_later_calls(self, failure: HoldfastError) -> None:
        """An actor goes on after its session, and no collective of its next call ends: it has `grace` to come
        back, until the program has opened another world."""
        while not self.left.is_set() and _world() is self._world:
            if not self._comes_back(time.monotonic() + self._grace, in_collective=False):
                abort_all()
                self._free(failure, time.monotonic() + 0.7 * self._grace)
            self.left.wait(0.2)

    def _comes_back(self, ends: float, in_collective: bool = True) -> bool:
        """Is the body over by then, or an actor's call, which somebody else's loop has begun?
        in_collective: wait for a call that is in one."""
        while not self.left.wait(0.1):
            if is_between_calls(self._thread):
                return True
            if time.monotonic() > ends or (not in_collective and is_in_collective(self._thread)):
                return False
        return True

    def _say_stuck(self, why: str) -> None:
        at = calls_of_frame(sys._current_frames().get(self._thread))
        first = "" if self.watch.failure is None else f" {self.watch.failure.message}"
        print(
            f"rank {self.watch.roster.rank} ends with exit code {EXIT_STUCK}: {why}; it is at {at}.{first}",
            file=sys.stderr,
            flush=True,
        )
        # `os._exit` follows, which flushes nothing.
        sys.stdout.flush()


def _world() -> object:
    """The default group of this process, if it has one."""
    return dist.group.WORLD if dist.is_initialized() else None


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


def _is_consequence(error: BaseException | None) -> bool:
    """Is it what a save meets when other ranks have failed, or given it up?"""
    given_up = isinstance(error, HoldfastError) and CANCELLED in error.details
    return given_up or isinstance(error, RankFailed | RosterLost)


def _may_be_echo(error: BaseException | None) -> bool:
    """May it be what this rank notices of another one's failure? Then it looks around before it says that it
    was the first."""
    # A RuntimeError as well, but always this rank's own.
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
