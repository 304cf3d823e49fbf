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

from drill.ranks import Answer, ask, attempt, begin, shorten_timeouts, side_of
from drill.results import Check, Row
from tests.groups.lifecycle.jobs import misbehave
from tests.integrations.megatron.cpu import use_cpu

WORLD, STOPPED = 4, 3
STOCK_S, STALL_S, SLACK_S = 6.0, 3.0, 10.0


def first_use(rank: int, stopped: int | None, install: dict[str, Any] | None) -> Answer:
    """Make Megatron's groups, and use the one of the expert gradients as the first optimizer step does."""
    begin(rank, install)
    use_cpu()
    from megatron.core import parallel_state

    dist.barrier()  # nobody's start is measured
    if rank == stopped:
        misbehave(1, "stops")

    reached = ["making groups"]

    def train() -> None:
        parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
        reached.append("training")
        shorten_timeouts(STOCK_S)
        dist.all_reduce(torch.ones(1), group=parallel_state.get_expert_data_parallel_group())

    return replace(attempt(rank, train), value=reached[-1])


def run(stopped: int | None = STOPPED) -> list[Row]:
    waiting = [rank for rank in range(WORLD) if rank != stopped]
    stock = ask(WORLD, first_use, stopped, None, waited_for=waiting, patience=60.0)
    limits = {"timeout": 60.0, "stall_timeout": STALL_S}
    ours = ask(WORLD, first_use, stopped, limits, waited_for=waiting, patience=90.0)
    partners = [answer for answer in stock if stopped is not None and answer.rank % 2 == stopped % 2]
    checks = (
        Check(
            "stock: the partner of the stopped rank waits to its timeout, in the middle of training",
            bool(partners)
            and all(a.error and a.seconds >= 0.9 * STOCK_S and a.value == "training" for a in partners),
        ),
        Check("stock names nobody", bool(partners) and not any(answer.named for answer in stock)),
        Check(
            f"with install() every rank hears that it was rank {stopped}",
            all(answer.named == (stopped,) for answer in ours),
        ),
        Check(
            f"within the stall timeout and {SLACK_S:g} s",
            all(answer.seconds < STALL_S + SLACK_S for answer in ours),
        ),
        Check(
            "while groups are made, before training",
            all(answer.value == "making groups" for answer in ours),
        ),
    )
    done = "trained"
    scenario = "a group is first used while one of its ranks is stopped (gloo)"
    return [Row("ms-swift 9486", scenario, side_of(partners or stock, done), side_of(ours, done), checks)]
