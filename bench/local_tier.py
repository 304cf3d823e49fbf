"""Node-local first: how long a save holds training up, and when it is committed on this host, beside the same save into the
local folder alone.

Two ranks take turns on one machine; the local folder is on tmpfs, the run on disk. After each save the ranks wait until all of
it is durable, so that the next one finds nothing under way.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.harness import MIB, Bench, Rank, main, median, run_ranks, scratch
from bench.rows import number
from bench.turns import Figures, Outcome, order, turn

RANKS = 2
SIDES = ("local=", "alone")
LEAST = 0.9


@dataclass(frozen=True)
class Plan:
    local: Path
    run: Path
    mib: int
    """Bytes of a rank's state, in MiB."""
    reps: int


def job(rank: Rank, plan: Plan) -> Outcome:
    import holdfast

    out = Outcome()
    state = {
        f"rank{rank.index}.layer{n}": torch.full((8 * MIB // 4,), float(n)) for n in range(plan.mib // 8)
    }
    runs: dict[str, Any] = {
        "local=": holdfast.Checkpoints(plan.run / "run", local=plan.local / "tier", keep=1),
        "alone": holdfast.Checkpoints(plan.local / "alone", keep=1),
    }
    try:
        for rep in range(plan.reps + 1):
            for side in order(SIDES, rep):
                pending: list[holdfast.Pending] = []
                for tensor in state.values():
                    tensor.add_(1.0)
                run = runs[side]
                good = turn(
                    rank,
                    out,
                    ("save", side),
                    lambda: pending.append(run.save(rep, state)),  # noqa: B023
                    keep=rep > 0,
                )
                if good:
                    turn(rank, out, ("commit", side), lambda: pending[0].committed(), keep=rep > 0)  # noqa: B023
                    pending[0].durable()
    finally:
        for run in runs.values():
            run.close()
    return out


def run(bench: Bench) -> None:
    mib = 64 if bench.quick else 512
    with scratch("tmpfs") as local, scratch("disk") as remote:
        plan = Plan(local, remote, mib, bench.reps)
        figures = Figures(run_ranks(job, RANKS, (plan,), limit_s=600.0))
    for verb, what in (("save", "blocking time"), ("commit", "then, until it is committed")):
        for side in SIDES:
            if (fault := figures.fault((verb, side))) is not None:
                bench.error(f"{what}, {side}: {fault}")
        cpu = "; ".join(f"{side}: CPU {number(median(figures.cpu(verb, side)))} s" for side in SIDES)
        bench.compare(
            f"{what}, {RANKS} ranks of {mib} MiB, local= / the local folder alone",
            figures.wall(verb, "local="),
            figures.wall(verb, "alone"),
            "s",
            limit=LEAST if verb == "save" else None,
            first=figures.first_wall(verb, "local="),
            peer_first=figures.first_wall(verb, "alone"),
            note=cpu,
        )


if __name__ == "__main__":
    sys.exit(main("local_tier", run))
