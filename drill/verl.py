"""verl 2238: saves of large mixtures of experts that take minutes, while ranks wait in a collective until the
watchdog ends them.

Two things: what the save plans, by the number of experts, and what verl's own manager does when a rank is late or
never comes.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

import holdfast
from bench import megatron as planned
from drill.ranks import Answer, ask, attempt, begin, shorten_timeouts, side_of
from drill.results import Check, Row
from tests.frameworks.megatron.cpu import use_cpu
from tests.frameworks.megatron.jobs import training
from tests.frameworks.megatron.models import Layout
from tests.frameworks.verl.jobs import CONTENTS, SMALL, import_verl, manager_of

REPORT = "verl 2238"
LAYERS = (1, 4, 12)
"""Each of 128 experts, a quarter of them on each rank."""
FASTER = 10.0
"""How much faster the largest plan is to be made."""
WORLD, LAYOUT, WHO = 4, Layout(tp=2, ep=2), 3
LATE_S = 5.0
STOCK_S, STALL_S, SLACK_S = 12.0, 3.0, 10.0


def save_experts(rank: int, layers: int, folder: str, install: dict[str, Any] | None) -> Answer:
    """Save with megatron-core's function, as verl calls it; weights, main parameters and moments of a few bytes."""
    begin(rank, install)
    use_cpu()
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    parallel_state.initialize_model_parallel(expert_model_parallel_size=WORLD)
    state = planned.sharded(rank, layers, WORLD)
    Path(folder).mkdir(parents=True, exist_ok=True)
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy())
    dist.barrier()
    return attempt(rank, lambda: dist_checkpointing.save(state, folder, strategy))


def save_with_verl(rank: int, folder: str, late: float | None, install: dict[str, Any] | None) -> Answer:
    """verl's manager saves on all ranks; one comes `late` seconds after the others, or never (None)."""
    begin(rank, install)
    import_verl()
    with training(LAYOUT, SMALL, seed=3) as run:
        manager = manager_of(run, CONTENTS)
        run.step()
        dist.barrier()
        shorten_timeouts(STOCK_S)
        if rank == WHO and late is None:
            return Answer(rank, 0.0, "elsewhere")
        if rank == WHO and late is not None:
            time.sleep(late)
        return replace(attempt(rank, lambda: manager.save_checkpoint(folder, global_step=1)), value="called")


def planning() -> list[Row]:
    """The same saves at growing numbers of experts."""
    rows: list[Row] = []
    for layers in LAYERS:
        with TemporaryDirectory(prefix="holdfast-drill-", dir="/dev/shm") as top:

            def save(name: str, install: dict[str, Any] | None) -> list[Answer]:
                place = str(Path(top, name))
                everyone = range(WORLD)
                return ask(WORLD, save_experts, layers, place, install, waited_for=everyone, patience=240.0)  # noqa: B023

            stock, ours = save("stock", None), save("ours", {})
        slow, fast = side_of(stock, "saved"), side_of(ours, "saved")
        checks = [Check("both save", not any(answer.error for answer in (*stock, *ours)))]
        if layers == max(LAYERS):
            checks += [
                Check(
                    f"with install() at least {FASTER:g} times faster at the largest size",
                    slow.seconds >= FASTER * fast.seconds,
                ),
                Check("stock grows with the experts", slow.seconds > 2 * rows[0].stock.seconds),
            ]
        scenario = f"a save that is all planning: {layers} x {planned.EXPERTS} experts (layers x experts)"
        rows.append(Row(REPORT, scenario, slow, fast, tuple(checks)))
    return rows


def late() -> list[Row]:
    """One rank comes late: both wait for it, and save."""
    stock, ours = _with_verl(LATE_S, range(WORLD), {"job": holdfast.Job(report_after=1.0)})
    checks = (
        Check("stock waits, and saves", not any(answer.error for answer in stock)),
        Check("with install() it waits, and saves", not any(answer.error for answer in ours)),
        Check(
            f"not longer than the rank is late, and {SLACK_S:g} s",
            all(answer.seconds < LATE_S + SLACK_S for answer in ours),
        ),
    )
    scenario = f"verl's own manager, rank {WHO} is {LATE_S:g} s late; install(job=Job(report_after=1))"
    return [Row(REPORT, scenario, side_of(stock, "saved"), side_of(ours, "saved"), checks)]


def never() -> list[Row]:
    """One rank never comes: the others hear who."""
    waiting = [rank for rank in range(WORLD) if rank != WHO]
    stock, ours = _with_verl(None, waiting, {"job": holdfast.Job(stall_timeout=STALL_S)})
    checks = (
        Check("stock waits to its timeout", all(a.error and a.seconds >= 0.9 * STOCK_S for a in stock)),
        Check("stock names nobody", not any(answer.named for answer in stock)),
        Check(
            f"with install() every rank hears that it was rank {WHO}",
            all(answer.named == (WHO,) for answer in ours),
        ),
        Check(
            f"within the stall timeout and {SLACK_S:g} s",
            all(answer.seconds < STALL_S + SLACK_S for answer in ours),
        ),
    )
    scenario = f"verl's own manager, rank {WHO} never comes; install(job=Job(stall_timeout={STALL_S:g}))"
    return [Row(REPORT, scenario, side_of(stock, "saved"), side_of(ours, "saved"), checks)]


def _with_verl(
    late: float | None, waited_for: range | list[int], limits: dict[str, Any]
) -> tuple[list[Answer], list[Answer]]:
    with TemporaryDirectory(prefix="holdfast-drill-") as top:
        found = [
            ask(
                WORLD,
                save_with_verl,
                str(Path(top, name)),
                late,
                install,
                waited_for=waited_for,
                patience=150.0,
            )
            for name, install in (("stock", None), ("ours", limits))
        ]
    return found[0], found[1]
