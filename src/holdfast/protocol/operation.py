"""One call of one rank: its rendezvous, its presence, its context, and how it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from itertools import pairwise
from typing import Any

from holdfast import events
from holdfast.collector import collector_paused
from holdfast.errors import HoldfastError, RosterLost, Unplaced
from holdfast.protocol.call import Call
from holdfast.protocol.core import choice_steps
from holdfast.protocol.effects import Context, Steps
from holdfast.protocol.phases import CHOICE_TRANSITIONS, Transitions
from holdfast.protocol.rendezvous import CallSignature, history_of, leave, meet
from holdfast.protocol.runner import CallSteps, Cancel, run
from holdfast.protocol.whereabouts import Inquiry, tell_where
from holdfast.roster.base import Roster
from holdfast.roster.memory import MemoryRoster
from holdfast.roster.presence import Presence
from holdfast.values import Json

_HINTS = {
    "save": "Nothing was committed; what was committed before is untouched.",
    "load": "The state may be partly overwritten; what is in storage is untouched.",
}


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
        self.begun = time.monotonic()
        self.cancel = Cancel()
        self.attempt = ""
        """A name of this attempt that all its ranks share and no other attempt has."""
        self.bytes_total = 0
        """Bytes that `progress` will have noted at the end; 0 until that is known."""
        self.alone = len(call.participants) == 1
        # A call of one rank needs no message store, and leaves nothing in it.
        self.roster: Roster = MemoryRoster(call.rank, call.roster.world_size) if self.alone else call.roster
        self._signature = CallSignature(kind, place, {"step": step, **(arguments or {})}, call.participants)
        self._history = history_of(self.roster, call.participants)
        # At least five beats per stall timeout, so that one late beat does not look like a stall.
        self.presence = Presence(call.roster, title, min(1.0, call.stall_timeout / 5))
        self.presence.about = self._signature.about
        me = self.presence.identity
        self.clocks = {"entered": self.begun}
        self.context = Context(
            call.rank,
            call.participants,
            "",
            title,
            call.deadline,
            call.stall_timeout,
            transitions=transitions,
            step=step,
            on_phase=self._on_phase,
            on_wait=self.presence.wait_for,
            inquiry=Inquiry(self.roster),
            who=f"rank {me.rank} (host {me.host}, pid {me.pid})",
            hint=_HINTS.get(kind, ""),
            about=self._signature.about,
        )
        tell_where(self.roster)
        self.emit("entered")

    def emit(self, name: str, **fields: object) -> None:
        events.emit(f"{self.kind}.{name}", rank=self.roster.rank, step=self.step, path=self.place, **fields)

    def _on_phase(self, phase: str) -> None:
        self.clocks[phase] = time.monotonic()
        self.presence.phase = phase
        with suppress(HoldfastError):  # a late beat is no reason to fail
            self.presence.beacon.send()
        # Subscribers are user code. If one hangs, the error must not blame the message store
        # (`runner._stuck`).
        with self.presence.working():
            self.emit(phase)

    def progress(self, moved: int) -> None:
        """Note `moved` more bytes. Raises if the operation was given up meanwhile."""
        self.cancel.check()
        self.presence.progress += moved
        self.emit(self.presence.phase, bytes_done=self.presence.progress, bytes_total=self.bytes_total)

    def tick(self) -> None:
        """Note progress that is not bytes."""
        self.cancel.check()
        self.presence.progress += 1

    def _meet(self) -> Steps:
        """Find the other ranks, and show this rank to them."""
        self.attempt = yield from meet(self.context, self._signature, self._history)
        try:
            self.presence.begin(self.context.key, None if self.alone else self.context.outcome_key)
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

        collect_error: what collecting the state has raised. The protocol tells it to the others. If its cause
            is Ctrl-C, that is raised here.
        pause_collector: pause the garbage collector meanwhile; False if the process trains at the same time.
        """
        try:
            with collector_paused() if pause_collector else nullcontext():
                whole = CallSteps(self._meet(), steps, leave(self.context, self._history))
                return run(whole, self.context, self.roster, self.presence, self.cancel)
        except HoldfastError as error:
            if not isinstance(error, Unplaced):  # not a failure: the load begins again, with lengths
                self.emit("raised", error=type(error).__name__, message=str(error))
            cause = collect_error.__cause__ if collect_error is not None else None
            if cause is not None and not isinstance(cause, Exception):
                raise cause from None
            raise
        finally:
            # A thread that was left behind has not run `leave`. The next call then determines how this one
            # ended.
            if self.context.known_outcome is None:
                self._history.give_up(self.context.key)

    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def phases(self) -> dict[str, float]:
        """Return the seconds spent in each phase so far."""
        marks = [*self.clocks.items(), ("", time.monotonic())]
        return {name: round(after - start, 6) for (name, start), (_, after) in pairwise(marks)}


def read_state(read: Callable[[], None], rank: int) -> HoldfastError | None:
    """Call user code on the caller's thread. What it raises is returned as an error for all ranks."""
    try:
        with collector_paused():
            read()
    except HoldfastError as error:
        return error
    # Not raised here: this rank must still enter the call, or the others would wait for it in vain.
    except BaseException as error:  # also Ctrl-C: the others are told, and then it is raised again
        collect_error = HoldfastError(
            f"The state could not be read: {type(error).__name__}: {error}", rank=rank
        )
        collect_error.__cause__ = error
        return collect_error
    return None


def agree(
    title: str, place: str, choose: Callable[[dict[int, Json]], Json], call: Call, mine: Json = None
) -> Json:
    """Return on every participant the JSON value that the lowest one chooses from the values of all
    (`mine`)."""
    operation = Operation("choice", title, place, call, CHOICE_TRANSITIONS)
    return operation.run(choice_steps(operation.context, choose, mine))
