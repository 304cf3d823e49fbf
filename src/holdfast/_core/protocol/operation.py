"""One call on one rank: its rendezvous, presence, context and execution."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from itertools import pairwise
from typing import Any

from holdfast import events
from holdfast._core.base.bar import Bar
from holdfast._core.base.collector import collector_paused
from holdfast._core.base.options import read_place
from holdfast._core.base.values import Json, size_text
from holdfast._core.protocol.call import Call
from holdfast._core.protocol.core import choice_steps
from holdfast._core.protocol.effects import THIS_PROCESS, Context, Late, Steps, abandon
from holdfast._core.protocol.messages import Final, Outcome, from_roster, to_message
from holdfast._core.protocol.phases import CHOICE_TRANSITIONS, Transitions
from holdfast._core.protocol.rendezvous import CallSignature, history_of, leave, meet
from holdfast._core.protocol.runner import CallSteps, Cancel, perform, run
from holdfast._core.roster.base import Roster
from holdfast._core.roster.beacon import Presence
from holdfast._core.roster.lost import Gone, describe, see
from holdfast._core.roster.memory import MemoryRoster
from holdfast._core.roster.whereabouts import Inquiry, note_caller
from holdfast.errors import HoldfastError, IdleRanks, RankFailed, RosterLost, Unplaced

log = logging.getLogger("holdfast")
TELL_EVERY = 10.0
"""Seconds between two progress log lines of a long save or load."""
LINGER = 1.0
"""Seconds that a failed call waits for the others to read the error, if this process hosts the store."""
_HINTS = {
    "save": "Nothing was committed; what was committed before is untouched.",
    "load": "The state may be partly overwritten; what is in storage is untouched.",
}


_other_callers = threading.Event()
"""Set once a thread of the program that is not its main thread has made a call."""


def _is_only_caller() -> bool:
    """Return whether all calls of this process so far, and this one, come from its main thread."""
    thread = threading.current_thread()
    if thread is threading.main_thread():
        return not _other_callers.is_set()
    if not thread.name.startswith("holdfast-"):
        _other_callers.set()
    return False


class Operation:
    """A save, load or choice that this rank enters with the other participants of a call.

    kind, place, arguments: identify the call; ranks with different ones never meet. title: its name in
        errors.
    """

    def __init__(
        self,
        kind: str,
        title: str,
        place: str,
        call: Call,
        transitions: Transitions,
        step: int | None = None,
        arguments: Mapping[str, object] | None = None,
    ) -> None:
        self.kind, self.place, self.step, self.call = kind, place, step, call
        self.begun = self._told = time.monotonic()
        self.cancel = Cancel()
        self.attempt = ""
        """A unique name of this attempt, equal on all its ranks."""
        self.bytes_done = 0
        """Bytes reported by `progress` so far."""
        self.bytes_total = 0
        """Bytes that `progress` will have reported at the end; 0 until known."""
        self._bar: Bar | None = None
        self.alone = len(call.participants) == 1
        # A call of one rank needs no message store, and leaves nothing in it.
        self.roster: Roster = MemoryRoster(call.rank, call.roster.world_size) if self.alone else call.roster
        self._signature = CallSignature(kind, place, {"step": step, **(arguments or {})}, call.participants)
        self._history = history_of(self.roster, call.participants)
        self.presence = Presence(call.roster, title, call.participants)
        line = (
            {} if call.line is None else {"line": call.line.name, "step": step, "pending": call.line.pending}
        )
        about = self._signature.about | line
        self.presence.about = about | {"blocks": _is_only_caller()}
        self.presence.look, self.presence.on_gone = self._look, self._on_gone
        me, is_single = self.presence.beacon.who, call.roster.world_size == 1 and read_place()[1] == 1
        self.clocks = {"entered": self.begun}
        self.context = Context(
            call.rank,
            call.participants,
            "",
            title,
            call.deadline,
            call.limits,
            transitions=transitions,
            step=step,
            on_phase=self._on_phase,
            on_wait=self.presence.wait_for,
            on_progress=self.presence.pass_on_progress,
            on_late=self._on_late,
            heard_outcome=lambda: self.presence.outcome,
            inquiry=None if self.alone else Inquiry(self.roster),
            blocks=self.presence.about["blocks"],
            mine=self._keys,
            who=THIS_PROCESS if is_single else f"rank {me.rank} (host {me.host}, pid {me.pid})",
            hint=_HINTS.get(kind, ""),
            about=about,
        )
        if not self.alone:
            self.presence.beacon.answering.caller = note_caller(self.roster)
            self.presence.beacon.watch.lost_after = call.limits.lost_after
            self.presence.beacon.keep_pace(call.limits.stall_timeout)
        self.emit("entered")

    def _keys(self) -> list[str]:
        return [presence.operation for presence in self.presence.beacon.operations]

    def read_state(self, read: Callable[[], None]) -> HoldfastError | None:
        """Call `read_state`; ranks that wait for this one in the call are told so."""
        with self.presence.beacon.reading_for(str(self._signature.about["site"])):
            return read_state(read, self.call.rank)

    def emit(self, name: str, **fields: object) -> None:
        events.emit(f"{self.kind}.{name}", rank=self.roster.rank, step=self.step, path=self.place, **fields)

    def _on_late(self, late: Late) -> None:
        """Log a long wait, or its end."""
        names = "; ".join(map(str, late.ranks)) + (
            f"; and {late.everyone - len(late.ranks)} more" if late.everyone > len(late.ranks) else ""
        )
        fields = {"ranks": [info.rank for info in late.ranks], "waited": late.waited}
        if late.came:
            came = ", ".join(f"rank {info.rank}" for info in late.ranks)
            log.warning("%s: %s came after %.0f s.", self.context.title, came, late.waited)
            self.emit("came", **fields)
            return
        whom = f"rank {late.ranks[0].rank}" if late.everyone == 1 else f"{late.everyone} ranks"
        until = " without progress" if self.context.deadline.moves else ""
        log.warning(
            "%s: rank %d has waited %.0f s for %s to %s: %s. It waits on, for up to %.0f s%s.%s",
            *(self.context.title, self.call.rank, late.waited, whom, late.what, names, late.left, until),
            f" {late.hint}" if late.hint else "",
        )
        self.emit("late", what=late.what, left=late.left, **fields)

    def _look(self, roster: Roster) -> None:
        """Poll for the outcome on the heart's thread, because the call's own thread may be stuck."""
        if self.presence.outcome is None and self.context.key and not self.alone:
            lane = self.roster.bounded()
            self.presence.outcome = lane.get([self.context.outcome_key])[0]
            self.presence.looks += 1

    def _on_gone(self, rank: int, gone: Gone) -> None:
        """If the committer has ended, abandon the call on all ranks. Runs on the heart's thread.

        If another rank has ended, the committer checks what that rank had completed, and decides.
        """
        if rank != self.context.committer or not self.context.key:
            return
        lane = self.roster.bounded()
        with suppress(RosterLost):
            seen = see(lane, [rank])[rank].told(gone)
            if not seen.is_lost(self.call.limits.past_end):
                return
            info = describe(rank, seen, time.time(), gone.how, self.context.key)
            error = RankFailed(
                f"{self.context.title} failed after {self.context.deadline.elapsed():.1f} s: {info}.",
                step=self.step,
                rank=rank,
                missing=(info,),
                hint=self.context.hint,
            )
            steps = abandon(self.context.key, self.call.rank, error)
            standing = perform(steps, lane, self.presence, Cancel())
            assert isinstance(standing, dict)
            if from_roster(standing, Outcome).state == "agreed":  # ranks wait for its `final`
                lane.claim(self.context.final_key, to_message(Final(error.to_message())))

    def _on_phase(self, phase: str) -> None:
        self.clocks[phase] = time.monotonic()
        self.presence.phase = phase
        with suppress(HoldfastError):  # a late beat is no reason to fail
            self.presence.beacon.send()
        # Subscribers are user code. If one hangs, the error must not blame the message store
        # (`runner._stuck`).
        with self.presence.working():
            self.emit(phase, bytes=self.bytes_done, seconds=self.seconds())

    def progress(self, moved: int) -> None:
        """Report `moved` more transferred bytes. Raises if the operation was cancelled meanwhile."""
        self.cancel.check()
        self.presence.progress += moved
        self.bytes_done += moved
        self.call.deadline.note_progress()
        self.emit(self.presence.phase, bytes_done=self.bytes_done, bytes_total=self.bytes_total)
        if self._bar is not None:
            self._bar.draw(self.bytes_done, self.bytes_total)
        if time.monotonic() - self._told >= TELL_EVERY:
            self._tell()

    def _tell(self) -> None:
        """Log the progress, on the lowest rank only, because all ranks have about the same amount of work."""
        self._told, done = time.monotonic(), self.bytes_done
        if self.call.rank == self.call.participants[0]:
            speed = size_text(done / max(self.seconds(), 1e-6))
            log.info(
                "%s: rank %d has moved %s of %s in %.1f s (%s/s).",
                *(self.context.title, self.call.rank, size_text(done), size_text(self.bytes_total)),
                *(self.seconds(), speed),
            )

    def tick(self) -> None:
        """Report progress other than bytes."""
        self.cancel.check()
        self.presence.progress += 1
        self.call.deadline.note_progress()

    def _meet(self) -> Steps:
        """Run the rendezvous with the other ranks, and publish this rank's presence."""
        self.attempt = yield from meet(self.context, self._signature, self._history)
        try:
            self.presence.begin(self.context.key, beats=not self.alone)
        except RosterLost:
            # A call of one rank needs no store, so a lost store is no reason to fail.
            if not self.alone:
                raise
        except HoldfastError as error:  # no thread for the beat: the protocol tells the others
            self.cancel.set(error)

    def run(
        self, steps: Steps, collect_error: HoldfastError | None = None, pause_collector: bool = True
    ) -> Any:
        """Run the protocol to its end. Returns or raises by the deadline.

        collect_error: an error while collecting the state; the protocol sends it to the others. If its cause
            is Ctrl-C, KeyboardInterrupt is raised here.
        pause_collector: pause the garbage collector meanwhile; False if the process trains at the same time.
        """
        self.context.collect_error = collect_error
        # A progress bar only on the lowest rank, and only if progress is not logged.
        waits = pause_collector and self.call.rank == self.call.participants[0]
        if waits and not log.isEnabledFor(logging.INFO):
            self._bar = Bar(self.context.title)
        try:
            with collector_paused() if pause_collector else nullcontext():
                whole = CallSteps(self._meet(), steps, leave(self.context, self._history))
                self.presence.deadline = self.context.deadline
                value = run(whole, self.context, self.roster, self.presence, self.cancel)
            if self.bytes_total:
                self._tell()
            return value
        except HoldfastError as error:
            if not self.alone:
                # The caller may end this process at once. But the call ends soon after its deadline.
                past = max(0.0, self.context.clock.now() - self.context.deadline.at)
                self.presence.beacon.see_off(LINGER - past)
            if not isinstance(error, Unplaced | IdleRanks):  # no failures: the call begins again
                self.emit("raised", error=type(error).__name__, message=str(error))
            cause = collect_error.__cause__ if collect_error is not None else None
            if cause is not None and not isinstance(cause, Exception):
                raise cause from None
            raise
        finally:
            if self._bar is not None:
                self._bar.clear()
            # An abandoned thread has not run `leave`; the next call then determines this one's outcome.
            if self.context.known_outcome is None:
                self._history.give_up(self.context.key)

    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def phases(self) -> dict[str, float]:
        """Return the seconds spent in each phase so far."""
        marks = [*self.clocks.items(), ("", time.monotonic())]
        return {name: round(after - start, 6) for (name, start), (_, after) in pairwise(marks)}


def read_state(read: Callable[[], None], rank: int) -> HoldfastError | None:
    """Call user code on the caller's thread. Return its exception as an error for all ranks."""
    try:
        with collector_paused():
            read()
    except HoldfastError as error:
        return error
    # Not raised here: this rank must still enter the call, or the others would wait for it in vain.
    except BaseException as error:  # also Ctrl-C: the others are told, and then it is raised again
        what = ": ".join(filter(None, (type(error).__name__, str(error))))  # Ctrl-C has no text
        collect_error = HoldfastError(f"The state could not be read: {what}", rank=rank)
        collect_error.__cause__ = error
        return collect_error
    return None


def agree(
    title: str, place: str, choose: Callable[[dict[int, Json]], Json], call: Call, mine: Json = None
) -> Json:
    """Return, on every participant, the JSON value that the lowest one chooses from all ranks' values
    (`mine`)."""
    operation = Operation("choice", title, place, call, CHOICE_TRANSITIONS)
    return operation.run(choice_steps(operation.context, choose, mine))
