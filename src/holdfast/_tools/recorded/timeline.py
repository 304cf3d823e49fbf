"""The timeline of one rank from its event log: calls with their phases, program phases, and other events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast._core.base.values import Json, printable, shortened
from holdfast._core.process.recording import BEGUN, ENDED, EventLine
from holdfast._core.protocol.phases import CHOICE_TRANSITIONS, LOAD_TRANSITIONS, TASK_TRANSITIONS, TRANSITIONS
from holdfast._watch.collector import RANKS

_TABLES = (TRANSITIONS, LOAD_TRANSITIONS, TASK_TRANSITIONS, CHOICE_TRANSITIONS)
ORDER = {phase: at for table in _TABLES for at, phase in enumerate(table)}
"""The position of each phase in its call."""
FINAL = {phase for table in _TABLES for phase, following in table.items() if not following} | {"raised"}
WORKING = {"entered", "writing", "committing", "reading", "acting"}
"""Phases in which a rank does its own work; in other phases it waits."""
GOOD = ("committed", "loaded", "done", "chosen")
CUT = "its process began anew"
LABEL = 120
"""Maximum length of a text."""


class TimedPhase(NamedTuple):
    """A phase of a call or of the program."""

    name: str
    begin: float
    end: float | None
    """None: it has not ended."""

    def seconds(self, now: float) -> float:
        return (now if self.end is None else self.end) - self.begin


@dataclass(slots=True)
class RankCall:
    """One call, such as a save, on one rank."""

    rank: int
    kind: str
    path: str
    step: int | None
    begin: float
    end: float | None = None
    parts: list[TimedPhase] = field(default_factory=list)
    outcome: str = ""
    """A phase of `FINAL`, or `CUT`; "" until it ends."""
    error: str = ""
    bytes: float = 0.0
    """Bytes transferred by this rank so far."""
    bytes_total: float = 0.0
    """Total bytes to transfer; 0: not known."""

    def advance(self, phase: str, at: float) -> None:
        """Enter the next phase."""
        if self.parts:
            self.parts[-1] = self.parts[-1]._replace(end=at)
        if phase in FINAL or phase == CUT:
            self.end, self.outcome = at, phase
        else:
            self.parts.append(TimedPhase(phase, at, None))


@dataclass(slots=True)
class RankTimeline:
    """See the module. Times are Unix times by the clock of the rank's host."""

    rank: int
    calls: list[RankCall] = field(default_factory=list)
    phases: list[TimedPhase] = field(default_factory=list)
    """In the order of their ends, followed by the open phases, the outermost first."""
    told: list[EventLine] = field(default_factory=list)
    """Events other than phases, such as reports of late ranks."""
    first: float = 0.0
    last: float = 0.0
    world: int = 0
    """The world size recorded by this rank."""
    who: str = ""
    """The host and pid of its process."""
    ended: float | None = None
    """When its process ended its recording; None if it has not, or was killed."""


def number(value: Json) -> float:
    """Convert an unchecked value to a number; 0 if it is not a usable one."""
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e18 else 0.0


def text(value: object, most: int = LABEL) -> str:
    """Convert an unchecked value to a short text, with control characters escaped."""
    return shortened(printable(value), most)


def timeline_of(rank: int, lines: list[EventLine]) -> RankTimeline:
    """Build the timeline of a rank from its events."""
    found = RankTimeline(rank)
    open_calls: dict[tuple[str, str], RankCall] = {}
    open_phases: list[TimedPhase] = []
    ended: dict[tuple[str, str], RankCall] = {}

    found.first = min((line.at for line in lines), default=0.0)
    for line in lines:
        kind, _, what = line.name.rpartition(".")
        key = (kind, line.path)
        if line.name == BEGUN:
            for call in open_calls.values():
                call.advance(CUT, found.last)
            found.phases += [phase._replace(end=found.last) for phase in open_phases]
            open_calls, open_phases = {}, []
            found.ended = None
            found.world = min(int(number(line.fields.get("world"))), RANKS)
            found.who = f"host {text(line.fields.get('host'))}, pid {text(line.fields.get('pid'))}"
        elif line.name == ENDED:
            found.ended = line.at
        elif kind == "phase":
            name, seconds = text(line.fields.get("phase")), number(line.fields.get("seconds"))
            if open_phases and open_phases[-1].name == name and what == "left":
                open_phases.pop()
            if what == "left":
                found.phases.append(TimedPhase(name, max(line.at - seconds, found.first), line.at))
            elif len(open_phases) < 64:
                open_phases.append(TimedPhase(name, line.at, None))
        elif "bytes_done" in line.fields:
            if key in open_calls:
                call = open_calls[key]
                call.bytes, call.bytes_total = (
                    number(line.fields.get(f"bytes_{of}")) for of in ("done", "total")
                )
        elif what == "raised" and key not in open_calls and key in ended:
            ended[key].error = text(line.fields.get("message"))
        elif what in ORDER or what == "raised":
            if what == "entered" and key in open_calls:
                open_calls.pop(key).advance(CUT, line.at)
            # The event of the begin may be lost to log rotation.
            since = line.at - number(line.fields.get("seconds"))
            if key not in open_calls:
                open_calls[key] = RankCall(rank, text(kind), text(line.path), line.step, since)
                found.calls.append(open_calls[key])
            call = open_calls[key]
            call.step = line.step if call.step is None else call.step  # a load learns it
            call.advance(what, line.at)
            call.bytes = number(line.fields.get("bytes")) or call.bytes
            if what == "raised":
                call.error = text(line.fields.get("message"))
            if call.end is not None:
                ended[key] = open_calls.pop(key)
        else:
            found.told.append(line)
        found.last = max(found.last, line.at)
    found.phases += open_phases
    return found
