"""Joins the calls of all ranks: which of them form one save or load, which ranks waited for which, and which
ranks are outliers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import median
from typing import NamedTuple

from holdfast._tools.recorded.timeline import CUT, GOOD, WORKING, RankCall, RankTimeline, number, text
from holdfast._watch.verdict import listed

NOTABLE = 1.0
"""Minimum seconds beyond the median for an outlier; it must exceed `SHARE` of the median, too."""
SHARE = 0.5


class JointCall(NamedTuple):
    """One save, load or other call on all of its ranks."""

    kind: str
    path: str
    step: int | None
    ranks: dict[int, RankCall]

    @property
    def title(self) -> str:
        return title(self.kind, self.step)

    @property
    def begin(self) -> float:
        return min(call.begin for call in self.ranks.values())

    def seconds(self, now: float) -> float:
        """Return the duration on the slowest rank."""
        return max((now if call.end is None else call.end) - call.begin for call in self.ranks.values())

    @property
    def bytes(self) -> float:
        return sum(call.bytes for call in self.ranks.values())

    @property
    def outcome(self) -> str:
        """Return the worst outcome of any rank; "" if none went wrong and a rank is not done yet."""
        outcomes = {call.outcome for call in self.ranks.values()}
        wrong = [outcome for outcome in ("failed", "raised", "unconfirmed", CUT) if outcome in outcomes]
        return wrong[0] if wrong else "" if "" in outcomes else max(outcomes)

    def behind(self, world: Iterable[int]) -> dict[int, str]:
        """Return the ranks that others wait for in this call, each with its phase; "": it has not entered
        the call."""
        working = {
            rank: call.parts[-1].name
            for rank, call in self.ranks.items()
            if call.end is None and call.parts and call.parts[-1].name in WORKING
        }
        absent = [rank for rank in world if rank not in self.ranks]
        # If only a minority has entered, the call may be for some ranks only.
        behind = dict.fromkeys(absent, "") if len(absent) < len(self.ranks) else {}
        return behind | (working if len(working) < len(self.ranks) else {})


def title(kind: str, step: int | None) -> str:
    return kind + (f" of step {step}" if step is not None else "")


def joined(timelines: Iterable[RankTimeline]) -> list[JointCall]:
    """Join the calls of all ranks, in the order of their begin: calls with the same kind, path and step form
    one call until a rank begins another such call."""
    calls: list[JointCall] = []
    newest: dict[tuple[str, str, int | None], JointCall] = {}
    of_ranks = (call for timeline in timelines for call in timeline.calls)
    for call in sorted(of_ranks, key=lambda call: call.begin):
        key = (call.kind, call.path, call.step)
        if key not in newest or call.rank in newest[key].ranks:
            newest[key] = JointCall(*key, {})
            calls.append(newest[key])
        newest[key].ranks[call.rank] = call
    return calls


class ReportedWait(NamedTuple):
    """A wait for late ranks, as reported in the event logs."""

    at: float
    title: str
    what: str
    """The action that the late ranks are expected to do."""
    late: str
    waiting: str
    seconds: float
    came: bool


def waits(timelines: Iterable[RankTimeline]) -> list[ReportedWait]:
    """List the reported waits; reports by several ranks about the same late ranks are merged."""
    found: dict[tuple[str, str, str, int | None], list[tuple[int, float, float, str]]] = defaultdict(list)
    came: dict[tuple[str, str, str, int | None], float] = {}
    for timeline in timelines:
        for line in timeline.told:
            kind, _, what = line.name.rpartition(".")
            ranks = line.fields.get("ranks")
            if what not in ("late", "came") or not isinstance(ranks, list):
                continue
            late = listed({int(number(rank)) for rank in ranks})
            key = (text(kind), text(line.path), late, line.step)
            seconds = number(line.fields.get("waited"))
            if what == "came":
                came[key] = max(came.get(key, 0.0), seconds)
            else:
                found[key].append(
                    (timeline.rank, line.at - seconds, seconds, text(line.fields.get("what") or ""))
                )
    return sorted(
        ReportedWait(
            min(one[1] for one in told),
            title(key[0], key[3]),
            told[-1][3],
            key[2],
            listed({one[0] for one in told}),
            max(came.get(key, 0.0), *(one[2] for one in told)),
            key in came,
        )
        for key, told in found.items()
    )


def outliers(timelines: dict[int, RankTimeline], calls: list[JointCall], now: float) -> dict[int, str]:
    """Return the outliers, the worst first, each with the reason: the rank failed, did not enter a call, or
    took longer than the median for its own part."""
    worst: dict[int, tuple[float, str]] = {}
    for rank, seconds, reason in _reasons(timelines, calls, now):
        if seconds > worst.get(rank, (0.0, ""))[0]:
            worst[rank] = seconds, reason
    return {rank: reason for rank, (_, reason) in sorted(worst.items(), key=lambda item: -item[1][0])}


def _reasons(
    timelines: dict[int, RankTimeline], calls: list[JointCall], now: float
) -> Iterator[tuple[int, float, str]]:
    for call in calls:
        ranks = call.ranks
        failed = [rank for rank, one in ranks.items() if one.outcome and one.outcome not in GOOD]
        if 2 * len(failed) < len(ranks):
            yield from ((rank, 1e9, f"{ranks[rank].outcome} in the {call.title}") for rank in failed)
        first = call.begin  # read once: it iterates over all ranks
        absent = [rank for rank, one in timelines.items() if rank not in ranks and one.first <= first]
        if 2 * len(absent) < len(ranks):
            yield from ((rank, 1e8, f"not in the {call.title}") for rank in absent)
        begins = {rank: one.begin - first for rank, one in ranks.items()}
        yield from _long(begins, f"came to the {call.title}", "after the first")
        own: dict[str, dict[int, float]] = defaultdict(dict)
        for rank, one in ranks.items():
            for part in one.parts:
                if part.name in WORKING and part.name != "committing":  # one rank commits for all
                    own[part.name][rank] = part.seconds(now)
        for name, seconds in own.items():
            yield from _long(seconds, f"in {name} of the {call.title} for", "")
    together: dict[str, dict[int, float]] = defaultdict(dict)
    for rank, timeline in timelines.items():
        for part in timeline.phases:
            together[part.name][rank] = together[part.name].get(rank, 0.0) + part.seconds(now)
    for name, seconds in together.items():
        yield from _long(seconds, f"in phase {name} for", "in all")


def _long(seconds: dict[int, float], what: str, unit: str) -> Iterator[tuple[int, float, str]]:
    if len(seconds) < 3:
        return
    usual = median(seconds.values())
    for rank, taken in seconds.items():
        if taken - usual > max(NOTABLE, SHARE * usual):
            yield (
                rank,
                taken - usual,
                f"{what} {taken:.1f} s {unit}".rstrip() + f"; the median is {usual:.1f} s",
            )
