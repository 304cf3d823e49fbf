"""ms-swift 9486: a group of Megatron's is used for the first time in the first optimizer step, and one of its
ranks does not take part.

With NCCL the communicator is made at that moment. gloo has connected its ranks when the group was made, so what
is shown is the wait in the first collective of the group, which is the same with both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from drill.ranks import Answer, ask, attempt, begin, shorten_timeouts, side_of
from drill.results import Check, Row
from tests.groups.lifecycle.jobs import misbehave
from tests.integrations.megatron.cpu import use_cpu

WORLD, STOPPED = 4, 3
STOCK_S, STALL_S, SLACK_S = 6.0, 3.0, 10.0
REPORT = "ms-swift 9486"


def first_use(rank: int, stopped: int | None, install: dict[str, Any] | None) -> Answer:
    """Make Megatron's groups, and use the one of the expert gradients as the first optimizer step does. Value:
    what was reached."""
    begin(rank, install)
    use_cpu()
    from megatron.core import parallel_state

    dist.barrier()  # nobody's start is measured
    if rank == stopped:
        misbehave(1, "stops")
    if install is not None:
        shorten_timeouts(STOCK_S)  # Holdfast waits at least as long as these

    reached = ["making groups"]

    def train() -> None:
        parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
        reached.append("training")
        shorten_timeouts(STOCK_S)
        dist.all_reduce(torch.ones(1), group=parallel_state.get_expert_data_parallel_group())

    return replace(attempt(rank, train), value=reached[-1])


def run(stopped: int | None = STOPPED) -> list[Row]:
    waiting = [rank for rank in range(WORLD) if rank != stopped]

    def side(install: dict[str, Any] | None) -> list[Answer]:
        return ask(WORLD, first_use, stopped, install, waited_for=waiting, patience=90.0)

    stock = side(None)
    partners = [answer for answer in stock if stopped is not None and answer.rank % 2 == stopped % 2]
    given_up, waited = (
        side({"job": holdfast.Job(stall_timeout=STALL_S)}),
        side({"job": holdfast.Job(timeout=STOCK_S)}),
    )
    of_stock = (
        Check(
            "stock: the partner of the stopped rank waits to its timeout, in the middle of training",
            bool(partners)
            and all(a.error and a.seconds >= 0.9 * STOCK_S and a.value == "training" for a in partners),
        ),
        Check("stock names nobody", bool(partners) and not any(answer.named for answer in stock)),
    )
    states = (Check("and that it is stopped", all("(state T)" in answer.error for answer in waited)),)
    scenario = "a group is first used while one of its ranks is stopped (gloo)"
    return [
        Row(
            REPORT,
            f"{what}; install(job=Job({', '.join(given)}))",
            side_of(partners or stock, "trained"),
            side_of(ours, "trained"),
            of_stock + _named(ours, stopped, seconds) + more,
        )
        for what, given, ours, seconds, more in (
            (scenario, (f"stall_timeout={STALL_S:g}",), given_up, STALL_S, ()),
            ("the same", (f"timeout={STOCK_S:g}",), waited, STOCK_S, states),
        )
    ]


def _named(ours: list[Answer], stopped: int | None, seconds: float) -> tuple[Check, ...]:
    return (
        Check(
            f"with install() every rank hears that it was rank {stopped}",
            all(answer.named == (stopped,) for answer in ours),
        ),
        Check(
            f"within {seconds:g} s, and {SLACK_S:g} s",
            all(answer.seconds < seconds + SLACK_S for answer in ours),
        ),
        Check(
            "while groups are made, before training",
            all(answer.value == "making groups" for answer in ours),
        ),
    )
