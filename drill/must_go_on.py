"""Healthy jobs, stock and with `install()`, whose limits are all shorter than what the jobs take: the same outcome,
and hardly later.

Both sides of a job run at the same time, so that a busy machine is the same for both. What steps of training cost is
measured in turns, as CPU time.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from drill.healthy import JOBS, SAID, Job, limits
from drill.ranks import one_line
from drill.results import Check, Row, Side
from drill.torchrun import Ended, Launcher, launcher

SECONDS, LIMIT_S = 5.0, 2.0
"""How long a job is late or busy, and what every limit of `install` is."""
PATIENCE_S = 150.0
"""Seconds until the drill kills a job: it is healthy, and must have ended."""
AT_MOST = 1.02
SLACK_S = 5.0
"""How much longer a job may take with `install`, and seconds for its start and end on a busy machine."""
PAIRS = 4
"""Jobs that run at a time, each on both sides."""
TURNS, TURN_S = 4, 2.0
"""Jobs of training on each side, and seconds of each."""
STEPS = "steps"


class Outcome(NamedTuple):
    """What one side has come to."""

    ended: list[Ended]
    """The copies of the job."""
    files: list[list[str]]

    @property
    def seconds(self) -> float:
        return max(one.seconds for one in self.ended)

    @property
    def found(self) -> list[list[str]]:
        return [sorted(_after(SAID, one.said)) for one in self.ended]

    @property
    def codes(self) -> list[int]:
        return [
            code
            for one in self.ended
            for code in (one.code, *(one.codes[rank] for rank in sorted(one.codes)))
        ]

    def told(self) -> str:
        """The first line that Holdfast has said, if any."""
        lines = [line for one in self.ended for line in one.said.splitlines()]
        return next((line for line in lines if " has waited " in line or "has not answered" in line), "")

    def side(self) -> Side:
        if any(self.codes):
            lines = [line for one in self.ended for line in one.said.splitlines()]
            why = [
                line
                for line in lines
                if re.match(r"rank \d+ ends|Timeout \(|\[rank\d+\]: \w+(Error|Failed)\b", line)
            ]
            return Side(round(self.seconds, 1), one_line(f"exit codes {self.codes}: {' '.join(why[:2])}"))
        told = f"; told: {self.told()}" if self.told() else ""
        return Side(round(self.seconds, 1), one_line(f"all end with 0{told}"))


def go(
    start: Launcher, name: str, how: str, folder: Path, seconds: float, limit: float, patience: float
) -> Outcome:
    """One side of a job."""
    job = JOBS[name]

    def one(number: int) -> Ended:
        place = folder / str(number)
        place.mkdir(parents=True)
        args = [name, how, str(place), str(seconds), str(limit)]
        if job.by_command:
            args[1] = "stock"  # the line is the command's
            return start.command("drill.healthy", args, job.world, place, patience, _options(how, limit))
        return start.run("drill.healthy", args, job.world, place, patience)

    with ThreadPoolExecutor(job.copies) as pool:
        ended = list(pool.map(one, range(job.copies)))
    places = [folder / str(number) for number in range(job.copies)]
    return Outcome(ended, [sorted(file.name for file in place.iterdir()) for place in places])


def went_well(job: Job, outcome: Outcome) -> bool:
    """Has it ended well, with its files complete, and has every rank found what it was to find?"""
    return (
        not any(outcome.codes)
        and all(set(job.files) <= set(files) for files in outcome.files)
        and not any(file.endswith(".part") for files in outcome.files for file in files)
        and all(len(found) == job.found * job.world for found in outcome.found)
    )


def row(name: str, stock: Outcome, ours: Outcome) -> Row:
    job = JOBS[name]
    checks = (
        Check("stock goes on to its end", went_well(job, stock)),
        Check(
            "with install() the same: exit codes, files, what ranks found",
            went_well(job, ours)
            and (ours.codes, ours.files, ours.found) == (stock.codes, stock.files, stock.found),
        ),
        Check(
            f"not more than 2 % and {SLACK_S:g} s later",
            ours.seconds <= AT_MOST * stock.seconds + SLACK_S,
        ),
    )
    return Row("", job.scenario, stock.side(), ours.side(), checks)


def run(names: Collection[str] = JOBS) -> list[Row]:
    with TemporaryDirectory(prefix="holdfast-drill-") as top, launcher() as start:
        with ThreadPoolExecutor(PAIRS) as pool:
            rows = list(
                pool.map(lambda name: _pair(start, name, Path(top)), [n for n in names if n != STEPS])
            )
        return rows + ([_steps(start, Path(top))] if STEPS in names else [])


def _pair(start: Launcher, name: str, top: Path) -> Row:
    def side(how: str) -> Outcome:
        return go(start, name, how, top / f"{name} {how}".replace(" ", "-"), SECONDS, LIMIT_S, PATIENCE_S)

    with ThreadPoolExecutor(2) as pool:
        stock, ours = pool.map(side, ("stock", "install"))
    return row(name, stock, ours)


def _steps(start: Launcher, top: Path) -> Row:
    """The CPU time of a step, in turns; medians of the jobs, each the median of its ranks."""
    costs: dict[str, list[float]] = {"stock": [], "install": []}
    shares, seconds = [], {"stock": 0.0, "install": 0.0}
    for turn in range(TURNS):
        for how, found in costs.items():
            outcome = go(start, STEPS, how, top / f"steps-{how}-{turn}", TURN_S, LIMIT_S, PATIENCE_S)
            figures = [tuple(map(float, line.split())) for line in outcome.found[0]]
            if any(outcome.codes) or len(figures) != JOBS[STEPS].world:
                raise RuntimeError(f"{STEPS}, {how}: {outcome.codes}\n{outcome.ended[0].said}")
            found.append(median(cost for cost, _ in figures))
            seconds[how] += outcome.seconds
            shares += [share for _, share in figures] if how == "install" else []
    stock, ours = (median(found) for found in costs.values())
    share = max(shares)
    checks = (
        Check(
            "of the CPU time of training, Holdfast's threads take at most 2 % on any rank",
            share <= AT_MOST - 1,
        ),
    )
    measured = f"{1e3 * ours:.2f} ms, {ours / stock:.3f} of it; Holdfast's threads take {100 * share:.2f} %"
    return Row(
        "",
        f"{JOBS[STEPS].scenario}, {TURNS} jobs of each in turns: CPU time of a step",
        Side(round(seconds["stock"], 1), f"{1e3 * stock:.2f} ms"),
        Side(round(seconds["install"], 1), measured),
        checks,
    )


def _options(how: str, limit: float) -> list[str] | None:
    """What `holdfast run` is given; None: stock."""
    if how == "stock":
        return None
    given = limits(limit)
    job = given["job"]
    given = {
        "timeout": job.timeout,
        "report_after": job.report_after,
        "lost_after": job.lost_after,
        "after_end": given["after_end"],
    }
    return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _after(mark: str, text: str) -> list[str]:
    return [line.removeprefix(mark) for line in text.splitlines() if line.startswith(mark)]
