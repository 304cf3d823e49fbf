"""Warming up all groups of a layout, beside the same collectives issued by hand; and what a large world's rounds cost to plan.

Sixteen ranks, TP2 PP2 EP2 over gloo, which connects when a group is made: what is measured is order, and agreement of ranks.
Group by group means: one group of the layout after another, the others wait at a barrier, so that no order can lock up. By hand: every
rank goes through its own groups in the order of their making, which is safe where all ranks made them in one order.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from bench.harness import Bench, Rank, main, run_ranks

RANKS = 16
LAYOUT: dict[str, Any] = {"tp": 2, "pp": 2, "ep": 2}
LARGEST = 16384


def sides(rank: Rank, reps: int) -> dict[str, list[float]]:
    """Seconds of each on this rank: the first time with new groups, and again."""
    import torch
    import torch.distributed as dist

    import holdfast
    from holdfast._groups.lifecycle.plan import plan_groups

    found: dict[str, list[float]] = {}

    def note(what: str, seconds: float) -> None:
        found.setdefault(what, []).append(seconds)

    def group_by_group(groups: Any) -> None:
        mine = {frozenset(dist.get_process_group_ranks(group)): group for group in groups.distinct()}
        for kind in plan_groups(groups.grid):
            for ranks in kind.table.tolist():
                if rank.index in ranks:
                    dist.all_reduce(torch.zeros(1), group=mine[frozenset(ranks)])
                dist.barrier()

    def by_hand(groups: Any) -> None:
        for group in groups.distinct():
            dist.all_reduce(torch.zeros(1), group=group)
        dist.barrier()  # it is over when it is over on all ranks, as warm_up is

    for rep in range(reps + 1):
        ours = partial(holdfast.warm_up, operations=("all_reduce",))
        ways = {"ours": ours, "group by group": group_by_group, "by hand": by_hand}
        for what, warm in ways.items():
            begun = time.perf_counter()
            groups = holdfast.open_groups(holdfast.Grid(RANKS, **LAYOUT), job=holdfast.Job(timeout=60))
            opened = time.perf_counter() - begun
            rank.barrier()
            begun = time.perf_counter()
            warm(groups)
            seconds = time.perf_counter() - begun
            if rep:
                note("open", opened)
                note(what, seconds)
            rank.barrier()
            groups.close(timeout=60)
    return found


def slowest(results: list[dict[str, list[float]]], what: str) -> list[float]:
    return [max(values) for values in zip(*(result[what] for result in results), strict=True)]


def planned(world: int) -> tuple[float, int, int, int]:
    """Seconds to plan, groups, rounds, and the most groups that any rank has."""
    import numpy as np

    from holdfast._core.layout.grid import Grid
    from holdfast._groups.lifecycle.plan import plan_groups, rounds

    begun = time.perf_counter()
    plan = plan_groups(Grid(world, tp=8, pp=min(16, world // 64), ep=8, cp=2))
    groups = [row for kind in plan for row in kind.table]
    chosen = rounds(groups)
    seconds = time.perf_counter() - begun
    most = int(np.bincount(np.concatenate(groups)).max())
    return seconds, len(groups), max(chosen) + 1, most


def run(bench: Bench) -> None:
    found = run_ranks(sides, RANKS, (bench.reps,), limit_s=300)
    bench.compare(
        f"warm-up of all groups of {RANKS} ranks / the same collectives group by group",
        slowest(found, "ours"),
        slowest(found, "group by group"),
        "s",
        limit=1.0,
    )
    bench.compare(
        f"warm-up of all groups of {RANKS} ranks / the same collectives by hand",
        slowest(found, "ours"),
        slowest(found, "by hand"),
        "s",
        note="ours asks first who is here and what it has, and says how it ended: three rounds of messages",
    )
    bench.target("opening of all groups, ranks compared before", slowest(found, "open"), 5.0, "s")
    for world in (512, 4096, LARGEST):
        seconds, groups, number, most = planned(world)
        bench.target(
            f"planning the rounds of {world:,} ranks",
            [seconds],
            5.0,
            "s",
            note=f"{groups:,} groups in {number} rounds; a rank has {most} at most, so no order has fewer",
        )


if __name__ == "__main__":
    raise SystemExit(main("groups", run))
