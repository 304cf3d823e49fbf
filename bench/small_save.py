"""What a save and a load cost before any byte counts: ten tensors of 4 KiB on each rank.

Wall time of the slowest rank. Holdfast, torch DCP and a plain write with fsync take turns on the same ranks. On tmpfs
the time is that of the code; on a disk it has the fsync of each file and folder in it, of which DCP does fewer: it syncs
no folder.
"""

from __future__ import annotations

import sys

from bench.harness import Bench, main, run_ranks, scratch
from bench.per_tensor import Case, job
from bench.turns import Figures

SIDES = ("floor", "DCP", "holdfast")
REPS = 15


def rows(bench: Bench, case: Case, place: str, figures: Figures) -> None:
    for verb in ("save", "load"):
        what = (
            f"{verb} {case.count} x {case.label}, {case.world} rank{'s' if case.world > 1 else ''}, {place}"
        )
        for side in SIDES:
            if (fault := figures.fault((verb, side))) is not None:
                bench.error(f"{what}, {side}: {fault}")
        ours = milliseconds(figures.wall(verb, "holdfast"))
        for peer in ("DCP", "floor"):
            bench.compare(
                f"{what} / {peer}",
                ours,
                milliseconds(figures.wall(verb, peer)),
                "ms",
                first=first(figures, verb, "holdfast"),
                peer_first=first(figures, verb, peer),
            )


def milliseconds(seconds: list[float]) -> list[float]:
    return [value * 1e3 for value in seconds]


def first(figures: Figures, verb: str, side: str) -> float | None:
    seconds = figures.first_wall(verb, side)
    return None if seconds is None else seconds * 1e3


def run(bench: Bench) -> None:
    for place in ("tmpfs", "disk"):
        for world in (1, 4):
            case = Case("4 KiB", 10, 4 << 10, world)
            with scratch(place) as root:
                outcomes = run_ranks(job, world, (case, REPS, root, SIDES), limit_s=120.0)
            rows(bench, case, place, Figures(outcomes))


if __name__ == "__main__":
    sys.exit(main("small_save", run))
