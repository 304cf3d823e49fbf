"""A run as one HTML page: its roll calls, the timeline of its ranks, its saves, loads and waits.

The size of the page is bounded for any number of ranks: ranks without anomalies are drawn as one band that
shows a sample of its members, and of more than `SPANS` spans the shortest are left out.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

from holdfast._core.base.values import Message, age_text, time_text
from holdfast._core.io.index_file import open_index
from holdfast._core.process.recording import LOST
from holdfast._core.store.local import open_store
from holdfast._core.store.run_folder import committed_steps
from holdfast._tools.html import filled
from holdfast._tools.recorded.called import Called, read_called, roll_calls, tree
from holdfast._tools.recorded.calls import JointCall, joined, outliers, waits
from holdfast._tools.recorded.event_log import read_events
from holdfast._tools.recorded.timeline import WORKING, RankTimeline, number, text, timeline_of
from holdfast._watch.verdict import TODO, listed
from holdfast.errors import BadInput, HoldfastError

ROWS = 32
"""Up to this many ranks, each has its own row; with more ranks, only the outliers (at most `UNLIKE`)."""
UNLIKE = 16
DRAWN = 80
"""Maximum number of members drawn in a band."""
SPANS = 100_000
CALLS = 1000
"""Maximum number of listed calls, and of waits: the newest."""
STEPS = 50
_KIND = {
    "entered": "begin",
    **dict.fromkeys(("writing", "reading", "acting"), "move"),
    "committing": "commit",
}
"""The drawing style of a call's phases; other phases are waits."""
COLUMNS = 128
"""Maximum number of columns in the strip that shows which ranks are in a block."""


class RecordedRun:
    """Everything recorded in a run folder, read once."""

    def __init__(self, folder: str) -> None:
        """Raises BadInput if the folder has no such data, or can't be read."""
        if not os.path.isdir(folder):
            raise BadInput(
                f"{folder} is no folder of this host.",
                hint="Give the one that HOLDFAST_EVENTS names in the job.",
            )
        self.folder = folder
        logs = read_events(folder)
        self.skipped = logs.skipped
        self.ranks = {rank: timeline_of(rank, lines) for rank, lines in logs.ranks.items()}
        self.calls = joined(self.ranks.values())
        names = roll_calls(folder)
        self.called = [read_called(folder, name) for name in names[:20]]
        """The newest first."""
        self.more_called = max(len(names) - 20, 0)
        self.steps = _steps(folder)
        if not (self.ranks or self.called or self.steps):
            raise BadInput(
                f"{folder} has no events, roll calls or steps.",
                hint="Set HOLDFAST_EVENTS to this folder in the job, which calls holdfast.install().",
            )
        times = [timeline.first for timeline in self.ranks.values() if timeline.last]
        self.begin = min(times, default=0.0)
        # Open spans are drawn up to the last event of any rank.
        self.end = max(
            [0.0, *(one.last for one in self.ranks.values()), *(one.at for one in self.called if self.ranks)]
        )


def _steps(folder: str) -> list[tuple[int, float, int]]:
    """Return the newest committed steps: number, time of the commit, and number of ranks."""
    found = []
    with suppress(HoldfastError):  # no run folder; show the recordings without steps
        store = open_store(folder)
        steps = committed_steps(store)
        for step in sorted(steps, reverse=True)[:STEPS]:
            with suppress(HoldfastError), open_index(store.child(steps[step])) as index:
                found.append(
                    (step, number(index.about.get("created")), int(number(index.about.get("ranks"))))
                )
    return found


def facts(run: RecordedRun, now: float) -> Message:
    """Return the data of the page, without the timeline. now: the current Unix time."""
    told = waits(run.ranks.values())
    saves = [call for call in run.calls if call.kind == "save" and call.outcome == "committed"]
    return {
        "title": text(os.path.basename(os.path.abspath(run.folder))),
        "path": text(os.path.abspath(run.folder)),
        "made": time_text(now),
        "ranks": len(run.ranks),
        "world": max([len(run.ranks), *(timeline.world for timeline in run.ranks.values())]),
        "begin": run.begin,
        "end": run.end,
        "skipped": run.skipped,
        "lost": sum(
            number(line.fields.get("events"))
            for timeline in run.ranks.values()
            for line in timeline.told
            if line.name == LOST
        ),
        "last_save": _call(saves[-1], run.end) if saves else None,
        "calls": [_call(call, run.end) for call in run.calls[-CALLS:]],
        "waits": [wait._asdict() for wait in told[-CALLS:]],
        "roll_calls": [_called(called, is_newest=not at) for at, called in enumerate(run.called)],
        "more_roll_calls": run.more_called,
        "steps": [
            (step, time_text(created), age_text(created, now), ranks) for step, created, ranks in run.steps
        ],
    }


def page_of(run: RecordedRun, now: float) -> str:
    """Return the HTML page. now: the current Unix time."""
    data = facts(run, now)
    if run.ranks:
        data["timeline"] = _timeline(run)
    return filled(data, Path(__file__).with_suffix(".js"))


def _call(call: JointCall, now: float) -> Message:
    own = [
        (part.seconds(now), one.rank, part.name)
        for one in call.ranks.values()
        for part in one.parts
        if part.name in WORKING
    ]
    seconds, rank, name = max(own, default=(0.0, 0, ""))
    errors = Counter(one.error for one in call.ranks.values() if one.error)
    return {
        "title": call.title,
        "path": call.path,
        "begin": call.begin,
        "seconds": round(call.seconds(now), 3),
        "bytes": call.bytes,
        "ranks": len(call.ranks),
        "outcome": call.outcome,
        "longest": f"rank {rank}: {name}, {seconds:.2f} s" if name else "",
        "error": errors.most_common(1)[0][0] if errors else "",
    }


# -- roll calls ---------------------------------------------------------------------------------------------


def _called(called: Called, is_newest: bool) -> Message:
    told: Message = {"name": called.name, "at": called.at, "answers": called.answers, "says": called.says}
    if called.found is not None and is_newest:
        who, why = called.found.who, called.found.why
        told["todo"] = TODO[why.kind] if why is not None else ""
        guilty = set(who.ranks or ()) if who is not None else set()
        shown = called.evidence.shown()
        size = max([*called.evidence.ranks, (called.found.world_size or 1) - 1]) + 1
        width = -(-size // COLUMNS)
        told["width"] = width
        told["unseen"] = [
            (
                f"rank {rank}",
                text("; ".join([one.state, *(ending.what for ending in one.endings)]).strip("; ")),
            )
            for rank, one in called.evidence.ranks.items()
            if rank not in shown
        ][:200]
        told["tree"] = [
            (
                *(block.parent, block.lines, listed(block.ranks), len(block.ranks), block.does),
                _strip(block.ranks, width, size),
                bool(guilty) and guilty.issuperset(block.ranks),
            )
            for block in tree(called.evidence)
        ]
    return told


def _strip(ranks: tuple[int, ...], width: int, size: int) -> list[float]:
    """Return, for each column of ranks, the share of its ranks that are in `ranks`."""
    counts = Counter(rank // width for rank in ranks)
    return [round(counts[at] / min(width, size - at * width), 3) for at in range(-(-size // width))]


# -- the timeline -------------------------------------------------------------------------------------------


def _timeline(run: RecordedRun) -> Message:
    unlike = outliers(run.ranks, run.calls, run.end)
    if len(run.ranks) <= ROWS:
        rows = [([rank], unlike.get(rank, "")) for rank in run.ranks]
    else:
        own = list(unlike)[:UNLIKE]
        rows = [([rank], unlike[rank]) for rank in own]
        others = [rank for rank in run.ranks if rank not in set(own)]
        rows.append(
            (others, f"like each other, or by less than the {len(own)} above" if own else "like each other")
        )
    shown = [(ranks, note, ranks[:: -(-len(ranks) // DRAWN)]) for ranks, note in rows]
    names: dict[tuple[str, str], int] = {}
    title_of = {id(one): at for at, call in enumerate(run.calls[-CALLS:]) for one in call.ranks.values()}
    spans = {
        rank: _spans(run.ranks[rank], run, names, title_of) for _, _, members in shown for rank in members
    }
    lengths = sorted((span[3] for one in spans.values() for span in one), reverse=True)
    least = lengths[SPANS] if len(lengths) > SPANS else -1  # thousandths of a second
    return {
        "names": [list(name) for name in names],
        "cut": f"Spans of up to {least / 1000:g} s are left out." if least >= 0 else "",
        "rows": [
            {
                "label": listed(ranks),
                "count": len(ranks),
                "note": note,
                "members": [
                    {
                        "rank": rank,
                        "who": run.ranks[rank].who,
                        "spans": [v for span in spans[rank] if span[3] > least for v in span],
                    }
                    for rank in members
                ],
            }
            for ranks, note, members in shown
        ],
    }


def _spans(
    timeline: RankTimeline, run: RecordedRun, names: dict[tuple[str, str], int], title_of: dict[int, int]
) -> list[tuple[int, int, int, int]]:
    """Return the spans of a rank: indices of name and call, begin and length, in milliseconds since the begin
    of the run."""

    def span(kind: str, name: str, call: int, begin: float, end: float | None) -> tuple[int, int, int, int]:
        at = names.setdefault((kind, name), len(names))
        length = (run.end if end is None else end) - begin
        return at, call, round((begin - run.begin) * 1000), max(round(length * 1000), 0)

    found = [span("phase", part.name, -1, part.begin, part.end) for part in timeline.phases]
    for call in timeline.calls:
        at = title_of.get(id(call), -1)
        for part in call.parts:
            name = f"{call.kind} {part.name}"
            found.append(span(_KIND.get(part.name, "wait"), name, at, part.begin, part.end))
        if call.outcome in ("failed", "raised", "unconfirmed") and call.end is not None:
            found.append(span("fail", f"{call.kind} {call.outcome}", at, call.end, call.end))
    return found
