"""Finds public threads with similar symptoms by a table of known cases (`looks_like.json`); not a verdict.

A known case has log lines, stack frames and operations as symptoms, and the number of them that must match.
`*` in a line matches anything. A frame is a function and, if that is ambiguous, the end of its file name; an
operation is its name and, if known, its sizes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import msgspec

from holdfast._core.ready import ready
from holdfast._watch.evidence import Evidence, Frame, GroupOperation
from holdfast._watch.names import family
from holdfast._watch.verdict import Likeness, Observation

MOST = 5
"""Maximum number of threads in a diagnosis."""


class KnownCase(msgspec.Struct, frozen=True):
    """The symptoms, cause and cure in one public thread."""

    title: str
    thread: str
    cause: str
    """The cause according to the thread; "not found" if it has none."""
    cure: str
    noted: str
    """The day on which this entry was written."""
    needs: int = 1
    """Number of its symptoms that must match."""
    lines: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()


class Symptom(NamedTuple):
    """A symptom of a known case."""

    title: str
    part: str


@cache
def table() -> tuple[KnownCase, ...]:
    """Return the known cases of `looks_like.json`."""
    text = files("holdfast._watch").joinpath("looks_like.json").read_bytes()
    return msgspec.json.decode(text, type=ready(tuple[KnownCase, ...]))


@cache
def lines() -> tuple[tuple[Symptom, str, re.Pattern[str]], ...]:
    """Return the lines of known cases, each with its longest literal text and its pattern."""
    return tuple(
        (
            Symptom(entry.title, line),
            max(line.split("*"), key=len),
            re.compile(".*".join(map(re.escape, line.split("*")))),
        )
        for entry in table()
        for line in entry.lines
    )


@cache
def _frames() -> dict[str, list[tuple[Symptom, str]]]:
    """Return the frames of known cases and the ends of their file names, by function name."""
    found: dict[str, list[tuple[Symptom, str]]] = defaultdict(list)
    for entry in table():
        for frame in entry.frames:
            function, _, file = frame.partition(" ")
            found[function].append((Symptom(entry.title, frame), file))
    return dict(found)


def parts_of_line(text: str) -> Iterator[Symptom]:
    """Yield the symptoms of known cases that match a log line."""
    for part, longest, pattern in lines():
        if longest in text and pattern.search(text) is not None:
            yield part


def parts_of_call(call: Frame) -> Iterator[Symptom]:
    """Yield the symptoms of known cases that match a stack frame."""
    for part, file in _frames().get(call.function, ()):
        if call.file.endswith(file):
            yield part


def _parts_of_operation(operation: GroupOperation) -> Iterator[Symptom]:
    for entry in table():
        for part in entry.operations:
            name, *sizes = part.split()
            if family(name) == operation.kind and operation.sizes[: len(sizes)] == tuple(map(int, sizes)):
                yield Symptom(entry.title, part)


def _seen(evidence: Evidence) -> Iterator[tuple[Symptom, Observation]]:
    for remark in evidence.of("looks like"):
        yield Symptom(*remark.values), Observation(remark.text, remark.source)
    for rank in evidence.ranks.values():
        for stack in (*rank.stacks, *rank.later):
            for call in stack.calls:
                for part in parts_of_call(call):
                    yield part, Observation(f"rank {rank.rank} is in {call}", stack.source)
    waits = [(f"rank {rank}", operation) for rank, operation in evidence.operations()]
    for whose, one in (*waits, *(("a rank", one) for one in evidence.loose)):
        if one.is_pending:
            where = [(part, f", called by {call}") for call in one.calls for part in parts_of_call(call)]
            for part, called in (*((part, "") for part in _parts_of_operation(one)), *where):
                yield part, Observation(f"{whose} waits in {one.label}{called}", one.source)


def looks_like(evidence: Evidence) -> tuple[Likeness, ...]:
    """Return up to `MOST` threads that match the evidence, those with the most matching parts first."""
    seen: dict[str, dict[str, Observation]] = defaultdict(dict)
    for part, observation in _seen(evidence):
        seen[part.title].setdefault(part.part, observation)
    found = [entry for entry in table() if len(seen.get(entry.title, ())) >= entry.needs]
    found.sort(key=lambda entry: -len(seen[entry.title]))
    return tuple(
        Likeness(entry.title, entry.thread, entry.cause, entry.cure, tuple(seen[entry.title].values()))
        for entry in found[:MOST]
    )
