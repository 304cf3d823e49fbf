"""One call of one rank: its meeting place, its presence, its context, and how it is run."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import pairwise
from typing import Any

from holdfast import events
from holdfast.deadline import REAL_CLOCK, check_seconds
from holdfast.errors import DeadlineExceeded, HoldfastError, Unplaced
from holdfast.flow.effects import Context, Steps
from holdfast.flow.phases import CHOICE_TRANSITIONS, Table
from holdfast.flow.protocol import choice_steps
from holdfast.flow.run import Cancel, run
from holdfast.flow.world import find_participants, meeting_key, rounds
from holdfast.roster.base import Roster
from holdfast.roster.presence import Presence
from holdfast.threads import start_thread


class Operation:
    """A save, load or choice that this rank enters with the other participants."""

    def __init__(
        self,
        kind: str,
        title: str,
        place: str,
        step: int | None,
        signature: object,
        roster: Roster,
        participants: Iterable[int] | None,
        process_group: Any,
        timeout: float,
        stall_timeout: float,
        table: Table,
    ) -> None:
        check_seconds("timeout", timeout)
        check_seconds("stall_timeout", stall_timeout)
        everyone = find_participants(roster, participants, process_group)
        self.kind, self.place, self.step, self.roster = kind, place, step, roster
        self.begun = time.monotonic()
        self.cancel = Cancel()
        self.attempt = ""
        """A name of this attempt that all its ranks share and no other attempt has."""
        self._signature = (step, signature)
        self.presence = Presence(roster, title, min(1.0, stall_timeout / 5))
        me = self.presence.identity
        self.clocks = {"entered": self.begun}
        self.at = Context(
            roster.rank,
            everyone,
            "",
            title,
            REAL_CLOCK,
            timeout,
            stall_timeout,
            table=table,
            step=step,
            on_phase=self._on_phase,
            on_wait=self.presence.wait_for,
            who=f"rank {me.rank} (host {me.host}, pid {me.pid})",
        )
        self.emit("entered")

    def emit(self, name: str, **fields: Any) -> None:
        events.emit(f"{self.kind}.{name}", rank=self.roster.rank, step=self.step, path=self.place, **fields)

    def _on_phase(self, phase: str) -> None:
        self.clocks[phase] = time.monotonic()
        self.presence.phase = phase
        with suppress(HoldfastError):  # a beat that is late is no reason to fail
            self.presence.send()
        self.emit(phase)

    def progress(self, moved: int, total: int = 0) -> None:
        """Note `moved` bytes; raises if the operation was given up meanwhile."""
        self.still_wanted()
        self.presence.progress += moved
        self.emit(self.presence.phase, bytes_done=self.presence.progress, bytes_total=total)

    def tick(self) -> None:
        """Progress that is not bytes."""
        self.still_wanted()
        self.presence.progress += 1

    def still_wanted(self) -> None:
        self.cancel.check()

    def _enter(self) -> None:
        """Find the others, and show this rank to them."""
        key, self.attempt = meeting_key(
            self.kind, self.place, self._signature, self.at.participants, self.roster
        )
        self.at.meet(key)
        self.at.round = rounds(self.roster)[self.at.participants]
        self.presence.begin(key, self.at.outcome if len(self.at.participants) > 1 else None)

    def run(
        self, make: Callable[[], Steps], trouble: HoldfastError | None = None, beside_training: bool = False
    ) -> Any:
        """Run the protocol to its end; returns or raises by the deadline. `trouble` is what reading the
        state met: the protocol tells it to the others, and Ctrl-C among it goes on from here.

        beside_training: the process does something else meanwhile, which needs its garbage collector.
        """
        try:
            with nullcontext() if beside_training else collector_paused():
                result = run(self._enter, make, self.at, self.roster, self.presence, self.cancel)
            rounds(self.roster)[self.at.participants] += 1
            return result
        except HoldfastError as error:
            if not isinstance(error, Unplaced):  # which is no failure: the load begins again, with lengths
                self.emit("raised", error=type(error).__name__, message=str(error))
            cause = trouble.__cause__ if trouble is not None else None
            if cause is not None and not isinstance(cause, Exception):
                raise cause from None
            raise

    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def phases(self) -> dict[str, float]:
        """Seconds spent in each phase so far."""
        marks = [*self.clocks.items(), ("", time.monotonic())]
        return {name: round(after - start, 6) for (name, start), (_, after) in pairwise(marks)}


@contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic garbage collection: ten thousand rows of a plan set it off again and again, and with
    torch loaded each pass walks a million objects, which costs more than the planning."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def read_state(read: Callable[[], None], rank: int) -> HoldfastError | None:
    """Run user code on the caller's thread; what it raises becomes an error for all ranks to hear."""
    try:
        with collector_paused():
            read()
    except HoldfastError as error:
        return error
    except BaseException as error:  # Ctrl-C, too, is told to the others, and raised again after
        trouble = HoldfastError(f"The state could not be read: {type(error).__name__}: {error}", rank=rank)
        trouble.__cause__ = error
        return trouble
    return None


def within(seconds: float, doing: str, action: Callable[[], None]) -> None:
    """Do what may block for ever, storage mostly, on a thread of its own; DeadlineExceeded if it takes too long."""
    ended: list[BaseException | None] = []

    def work() -> None:
        try:
            action()
        except BaseException as error:
            ended.append(error)
        else:
            ended.append(None)

    start_thread(work, "holdfast-look").join(seconds)
    if not ended:
        raise DeadlineExceeded(
            f"{doing} took longer than {seconds:g} s: a call into storage does not return.",
            hint="A stack of its thread `holdfast-look` (py-spy, faulthandler) shows where it is.",
        )
    if ended[0] is not None:
        raise ended[0]


def agree(
    title: str,
    place: str,
    choose: Callable[[dict[int, Any]], Any],
    roster: Roster,
    participants: Iterable[int] | None,
    process_group: Any,
    timeout: float,
    stall_timeout: float,
    mine: Any = None,
) -> Any:
    """The lowest participant's answer, a JSON value, on every participant; it is given what each says (`mine`)."""
    operation = Operation(
        "choice",
        title,
        place,
        None,
        None,
        roster,
        participants,
        process_group,
        timeout,
        stall_timeout,
        CHOICE_TRANSITIONS,
    )
    return operation.run(lambda: choice_steps(operation.at, choose, mine))
