"""What a drill found, and the file it is kept in."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from bench.machine import Machine


@dataclass(frozen=True)
class Side:
    """What one side of a scenario did."""

    seconds: float
    """Until the last rank that was waited for had an answer, or was given up by the drill."""
    message: str
    """What a user reads, on one line."""
    named: tuple[int, ...] = ()
    """Ranks that other ranks blame in it."""
    launcher: int | None = None
    """The rank that torchrun names as the first that failed, if the job ran under it."""


@dataclass(frozen=True)
class Check:
    """One expectation, as a sentence."""

    expects: str
    held: bool


@dataclass(frozen=True)
class Row:
    """One scenario, on both sides."""

    report: str
    """Empty for a healthy job."""
    scenario: str
    stock: Side
    ours: Side
    checks: tuple[Check, ...]

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (self.report, self.scenario)))

    @property
    def failed(self) -> list[str]:
        return [check.expects for check in self.checks if not check.held]


@dataclass(frozen=True)
class Results:
    """One run of the drill, and where and when."""

    measured: str
    """When it began, in UTC, as ISO 8601."""
    seconds: float
    commit: str
    load: float
    """Processes that wanted a core in the minute before it began."""
    machine: Machine
    versions: dict[str, str]
    rows: list[Row]
    healthy: list[Row] = field(default_factory=list)
    """Jobs that must go on."""

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1, allow_nan=False) + "\n")


def read_results(path: Path) -> Results:
    """Read what `Results.write` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=Results)
