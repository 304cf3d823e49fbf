"""The rows of a benchmark and the file they are kept in.

A row compares two sides of one measurement. `ratio` above 1 means that ours is better than the peer named in the
metric. Where the peer is a physical limit, it is the share of that limit that is reached; where the peer is a target,
it is target over ours. `limit` is the least ratio that the project asks for (None: nothing is asked).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.machine import Machine


@dataclass(frozen=True)
class Row:
    metric: str
    ours: float | None
    peer: float | None
    ratio: float | None
    limit: float | None
    unit: str
    n: int
    note: str = ""
    first: float | None = None
    """Ours in the first call of this kind, which nothing had warmed up; None where it was not measured."""
    peer_first: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.limit is None or self.ratio is None else self.ratio >= self.limit


@dataclass(frozen=True)
class Results:
    """What one run of one benchmark gave, and where and when."""

    bench: str
    quick: bool
    measured: str
    """When it began, in UTC, as ISO 8601."""
    commit: str
    load: float | None
    """Processes that wanted a core in the minute before it began; None where it was not recorded."""
    machine: Machine
    rows: list[Row]

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1, allow_nan=False) + "\n")


def read_results(path: Path) -> Results:
    """Read what `Results.write` wrote."""
    found = json.loads(path.read_text())
    machine, rows = Machine(**found.pop("machine")), [Row(**row) for row in found.pop("rows")]
    return Results(machine=machine, rows=rows, **found)


def number(value: float | None) -> str:
    """Format a figure with three digits, or a dash for none."""
    if value is None:
        return "-"
    if value != 0 and (abs(value) < 0.01 or abs(value) >= 100_000):
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
