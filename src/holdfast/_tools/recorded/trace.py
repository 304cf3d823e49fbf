"""Writes the timeline of a run as a Chrome trace for ui.perfetto.dev and chrome://tracing. Each rank is a
process.

Format: "Trace Event Format"
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TextIO

import msgspec

from holdfast._core.base.values import Message
from holdfast._tools.recorded.calls import title
from holdfast._tools.recorded.report import RecordedRun
from holdfast._tools.recorded.timeline import RankTimeline, text


def write_trace(run: RecordedRun, file: TextIO) -> int:
    """Write the trace; return the number of its events."""
    file.write('{"displayTimeUnit":"ms","traceEvents":[')
    count = 0
    for event in _events(run):
        file.write((",\n" if count else "\n") + msgspec.json.encode(event).decode())
        count += 1
    file.write("\n]}\n")
    return count


def _events(run: RecordedRun) -> Iterator[Message]:
    for rank, timeline in run.ranks.items():
        yield _meta(
            rank, 0, "process_name", name=f"rank {rank}" + (f" ({timeline.who})" if timeline.who else "")
        )
        yield _meta(rank, 0, "process_sort_index", sort_index=rank)
        yield from _of_rank(timeline, run)
    for called in run.called:
        if called.at and run.ranks:
            yield _instant(min(run.ranks), called.at, run, "g", "roll call", {"says": called.says})


class _Span(NamedTuple):
    begin: float
    end: float
    depth: int
    """Orders spans with the same begin and end: the outer one has the smaller depth."""
    name: str
    kind: str
    about: Message


def _of_rank(timeline: RankTimeline, run: RecordedRun) -> Iterator[Message]:
    tracks: dict[str, list[list[float]]] = {"phases": [], "calls": []}
    for span in sorted(_spans(timeline, run), key=lambda span: (span.begin, -span.end, span.depth)):
        before = len(tracks[span.kind])
        track = _track(span, tracks[span.kind])
        thread = track + 1 if span.kind == "phases" else track + 100
        if track == before:
            yield _meta(timeline.rank, thread, "thread_name", name=span.kind)
        begin, end = _micro(span.begin, run), _micro(span.end, run)
        event = {"ph": "X", "name": span.name, "cat": span.kind, "pid": timeline.rank, "tid": thread}
        yield event | {"ts": begin, "dur": end - begin, "args": span.about}
    for line in timeline.told:
        about = {text(key): text(value) for key, value in line.fields.items()}
        yield _instant(timeline.rank, line.at, run, "p", text(line.name), about)


def _spans(timeline: RankTimeline, run: RecordedRun) -> Iterator[_Span]:
    for call in timeline.calls:
        end = run.end if call.end is None else call.end
        about = {"path": call.path, "outcome": call.outcome, "bytes": call.bytes, "error": call.error}
        yield _Span(call.begin, end, 0, title(call.kind, call.step), "calls", about)
        for part in call.parts:
            yield _Span(part.begin, part.begin + part.seconds(end), 1, part.name, "calls", {})
    for part in timeline.phases:
        yield _Span(part.begin, part.begin + part.seconds(run.end), 0, part.name, "phases", {})


def _track(span: _Span, tracks: list[list[float]]) -> int:
    """Return the first track in which a span nests in the open spans or follows them; a new one if there is
    none. tracks: for each track, the ends of its open spans, the outermost first."""
    for at, ends in enumerate(tracks):
        while ends and ends[-1] <= span.begin:
            ends.pop()
        if not ends or span.end <= ends[-1]:
            ends.append(span.end)
            return at
    tracks.append([span.end])
    return len(tracks) - 1


def _micro(at: float, run: RecordedRun) -> int:
    return round((at - run.begin) * 1e6)


def _meta(rank: int, thread: int, what: str, **about: object) -> Message:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": about}


def _instant(rank: int, at: float, run: RecordedRun, scope: str, name: str, about: dict[str, str]) -> Message:
    return {"ph": "i", "name": name, "pid": rank, "tid": 0, "ts": _micro(at, run), "s": scope, "args": about}
