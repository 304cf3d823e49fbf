"""Versions of libraries that are known to hang: a table with dates and threads, and whom it concerns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

import msgspec

from holdfast._watch.evidence import Evidence
from holdfast._watch.verdict import Observation, Verdict

_DISTRIBUTIONS = {"nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"), "torch": ("torch",)}


class KnownHang(msgspec.Struct, frozen=True):
    """One pair of a library and an environment."""

    library: str
    since: str
    """The first version that it was seen with; "" if that isn't known."""
    fixed: str
    """The first version without it."""
    what: str
    thread: str
    noted: str
    """The day on which this entry was written."""
    machine: str = ""
    """Only on such machines, such as `aarch64`."""
    variables: dict[str, str] = {}
    """Only with such environment variables; the value is a pattern."""
    frame: str = ""
    """A native frame that a rank with this hang shows."""

    def __str__(self) -> str:
        return f"{self.what}: fixed in {self.library} {self.fixed} ({self.thread})"

    def has(self, version: str) -> bool:
        """Return whether a version has it."""
        found = _numbers(version)
        return bool(found) and _numbers(self.since) <= found < _numbers(self.fixed)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


@cache
def table() -> tuple[KnownHang, ...]:
    """Return the table of `known.json`."""
    text = files("holdfast._watch").joinpath("known.json").read_bytes()
    return msgspec.json.decode(text, type=tuple[KnownHang, ...])


def versions_here() -> dict[str, str]:
    """Return the versions that this Python has of the table's libraries, by their distributions' names."""
    found: dict[str, str] = {}
    for library, names in _DISTRIBUTIONS.items():
        for name in names:
            with suppress(PackageNotFoundError):
                found.setdefault(library, version(name))
    return found


def affects(versions: Mapping[str, str], machine: str, variables: Mapping[str, str]) -> list[KnownHang]:
    """Return the entries that an environment has. versions: of libraries, by their name in the table."""
    return [
        entry
        for entry in table()
        if entry.has(versions.get(entry.library, ""))
        and entry.machine in ("", machine)
        and all(re.fullmatch(value, variables.get(name, "")) for name, value in entry.variables.items())
    ]


def known_hang(evidence: Evidence) -> Iterator[Verdict]:
    """A rank is in a native frame that is known, and the version has the error."""
    versions = {remark.values[0]: remark for remark in evidence.of("version")}
    machine = next((remark.values[0] for remark in evidence.of("machine")), "")
    for entry in table():
        ranks = [
            rank.rank
            for rank in evidence.ranks.values()
            if entry.frame
            and any(call.function == entry.frame for stack in rank.stacks for call in stack.calls)
        ]
        told = versions.get(entry.library)
        if not ranks:
            continue
        sure = told is not None and entry.has(told.values[1]) and entry.machine in ("", machine)
        yield Verdict(
            "library",
            "signature" if sure else "absence",
            str(entry),
            tuple(ranks),
            seen=(
                *(
                    Observation(f"rank {rank} is in {entry.frame}", evidence.ranks[rank].stacks[0].source)
                    for rank in ranks
                ),
                *([Observation(told.text, told.source)] if told is not None else []),
            ),
            others=() if sure else (f"The version of {entry.library} and the machine (uname -m) tell.",),
        )


RULES = (known_hang,)
