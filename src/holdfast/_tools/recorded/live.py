"""The current state of the ranks of a run, from their event logs: `holdfast watch`."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable

import msgspec

from holdfast._core.base.values import age_text, size_text
from holdfast._tools.recorded.called import Called, read_called, roll_calls
from holdfast._tools.recorded.calls import JointCall, joined, waits
from holdfast._tools.recorded.event_log import read_events
from holdfast._tools.recorded.timeline import RankTimeline, text, timeline_of
from holdfast._watch.shared_call import ROLL_CALLS
from holdfast._watch.verdict import listed
from holdfast.errors import BadInput

READ = 16 << 20
"""Maximum number of bytes of all logs that one refresh reads."""
NEWEST = 4
"""Only this many newest calls may be running: an older one without an end has lost its last events."""
QUIET = 300.0
"""Seconds without an event after which a run may be over."""
ANSWERING = 30.0
"""Approximate duration of a roll call in seconds; no answers are expected after it."""


class Doing(msgspec.Struct, frozen=True):
    """Ranks with the same activity."""

    ranks: str
    does: str
    phase: str
    """The innermost phase of the program (`holdfast.events.phase`)."""
    seconds: float
    """The longest time that one of them has done it."""


class State(msgspec.Struct, frozen=True):
    """The state of a run at one time."""

    ranks: int
    """Number of ranks that have recorded events."""
    world: int
    doing: tuple[Doing, ...]
    """The fewest ranks first."""
    call: str
    """The newest running call, and the ranks that are behind in it; "" if none is running."""
    behind: tuple[int, ...]
    last_save: str
    failed_save: str
    """The newest save, if it has ended, and was not committed."""
    roll_calls: tuple[str, ...]
    skipped: int
    """Number of invalid log lines."""
    quiet: float = 0.0
    """Seconds since the last event of any rank; if large, the state may be outdated."""


class Looker:
    """Reads the state of a run folder repeatedly."""

    def __init__(self, run: str) -> None:
        if not os.path.isdir(run):
            raise BadInput(
                f"{run} is no folder of this host.",
                hint="Give the one that HOLDFAST_EVENTS names in the job.",
            )
        self._run = run
        self._called: tuple[tuple[str, int], Called] | None = None

    def look(self, now: float) -> State:
        """Return the state of the run. now: the current Unix time. Raises BadInput if the folder can't be
        read."""
        logs = read_events(self._run, READ)
        timelines = [timeline_of(rank, lines) for rank, lines in logs.ranks.items()]
        world = max([len(timelines), *(timeline.world for timeline in timelines)])
        calls = joined(timelines)
        running = next((call for call in reversed(calls[-NEWEST:]) if not call.outcome), None)
        behind = running.behind(range(world)) if running is not None else {}
        saves = [call for call in calls if call.kind == "save" and call.outcome]
        good = [call for call in saves if call.outcome == "committed"]
        return State(
            len(timelines),
            world,
            tuple(_doing(timelines, now)),
            "" if running is None else _running(running, behind, now),
            tuple(sorted(behind)),
            _saved(good[-1], now) if good else "",
            _failed(saves[-1], timelines, now) if saves and saves[-1] not in good else "",
            tuple(self._roll_calls(timelines, now)),
            logs.skipped,
            _quiet(timelines, now),
        )

    def _roll_calls(self, timelines: list[RankTimeline], now: float) -> Iterable[str]:
        names = roll_calls(self._run)
        if not names:
            return
        # Read the newest roll call again only if its folder has changed.
        key = names[0], os.stat(os.path.join(self._run, ROLL_CALLS, names[0])).st_mtime_ns
        if self._called is None or self._called[0] != key:
            self._called = key, read_called(self._run, names[0])
        called = self._called[1]
        told = [line for timeline in timelines for line in timeline.told if line.at >= called.at]
        ended = next((line for line in told if line.name == "roll_call.over"), None)
        answering = not any(line.name == "roll_call.told" for line in told) and now - called.at < ANSWERING
        state = f"{called.answers} have answered" if answering else "not known to be over"
        have_ended = bool(timelines) and all(timeline.ended is not None for timeline in timelines)
        if have_ended or _quiet(timelines, now) > QUIET:
            state = "its end was not recorded"
        if ended is not None:
            state = text(ended.fields.get("how") or "is over")
        yield f"{called.name}, {age_text(called.at, now)} ago, {state}: {called.says}"
        if len(names) > 1:
            yield f"and {len(names) - 1} before it"


def _doing(timelines: list[RankTimeline], now: float) -> list[Doing]:
    ranks: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for timeline in timelines:
        call = next((call for call in reversed(timeline.calls) if call.end is None), None)
        phase = next((phase for phase in reversed(timeline.phases) if phase.end is None), None)
        ends = [call.end for call in timeline.calls[-8:] if call.end is not None]
        if call is not None and call.parts:
            does, since = f"{call.kind} {call.parts[-1].name}", call.parts[-1].begin
        elif timeline.ended is not None:
            does, since = "recording ended", timeline.ended
        else:
            does, since = (
                "in no call of Holdfast",
                phase.begin if phase is not None else max([*ends, timeline.first]),
            )
        ranks[does, phase.name if phase is not None else ""][timeline.rank] = now - since
    return [
        Doing(listed(set(seconds)), *key, round(max(seconds.values()), 1))
        for key, seconds in sorted(ranks.items(), key=lambda item: len(item[1]))
    ]


def _running(call: JointCall, behind: dict[int, str], now: float) -> str:
    """Format the progress of a call, as `save of step 3, for 12 s; behind: rank 3: writing, 40%`."""
    phases: dict[str, list[int]] = defaultdict(list)
    for rank, phase in behind.items():
        phases[phase or "has not come"].append(rank)
    parts = [f"{listed(ranks)}: {phase}{_share(call, ranks)}" for phase, ranks in phases.items()]
    return f"{call.title}, for {call.seconds(now):.0f} s" + (f"; behind: {'; '.join(parts)}" if parts else "")


def _share(call: JointCall, ranks: list[int]) -> str:
    there = [call.ranks[rank] for rank in ranks if rank in call.ranks]
    done, total = sum(one.bytes for one in there), sum(one.bytes_total for one in there)
    return f", {min(done / total, 1.0):.0%}" if total else ""


def _saved(call: JointCall, now: float) -> str:
    seconds = call.seconds(now)
    speed = call.bytes / max(seconds, 1e-6)
    unit = next((unit for unit in (("GB", 1e9), ("MB", 1e6)) if speed >= unit[1]), ("kB", 1e3))
    speed_text = f"{speed / unit[1]:,.{1 if unit[0] == 'GB' else 0}f} {unit[0]}/s"
    return f"{_ended(call, now)}: {seconds:.1f} s, {size_text(call.bytes)}, {speed_text}"


def _failed(call: JointCall, timelines: list[RankTimeline], now: float) -> str:
    """Format how a save ended that was not committed, and which ranks were late in it."""
    late = [wait for wait in waits(timelines) if wait.title == call.title and not wait.came]
    whom = f"; late to {late[-1].what}: {late[-1].late}" if late else ""
    return f"{_ended(call, now)}: {call.outcome} after {call.seconds(now):.1f} s{whom}"


def _ended(call: JointCall, now: float) -> str:
    end = max(one.end or one.begin for one in call.ranks.values())
    what = f"step {call.step}" if call.step is not None else call.path
    return f"{what}, {age_text(end, now)} ago"


def _quiet(timelines: list[RankTimeline], now: float) -> float:
    """Return the seconds since the last event of any rank."""
    return max(now - max((timeline.last for timeline in timelines), default=now), 0.0)
