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
from tests.frameworks.megatron.cpu import use_cpu
from tests.groups.lifecycle.jobs import misbehave

WORLD, STUCK = 4, 3
STOCK_S, STALL_S, SLACK_S = 6.0, 3.0, 10.0
REPORT = "ms-swift 9486"


def first_use(rank: int, stuck: int | None, how: str, install: dict[str, Any] | None) -> Answer:
    """Make Megatron's groups, and use the one of the expert gradients as the first optimizer step does. The
    rank `stuck` "stops" or "hangs" as it issues its first collective. Value: what was reached."""
    begin(rank, install)
    use_cpu()
    from megatron.core import parallel_state

    dist.barrier()  # nobody's start is measured
    if rank == stuck:
        misbehave(1, how)
    if install is not None:
        shorten_timeouts(STOCK_S)  # Holdfast waits at least as long as these

    reached = ["making groups"]

    def train() -> None:
        parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
        reached.append("training")
        shorten_timeouts(STOCK_S)
        dist.all_reduce(torch.ones(1), group=parallel_state.get_expert_data_parallel_group())

    return replace(attempt(rank, train), value=reached[-1])


def run(stuck: int | None = STUCK) -> list[Row]:
    waiting = [rank for rank in range(WORLD) if rank != stuck]

    def side(how: str, install: dict[str, Any] | None) -> list[Answer]:
        return ask(WORLD, first_use, stuck, how, install, waited_for=waiting, patience=90.0)

    gives_up, waits = {"job": holdfast.Job(stall_timeout=STALL_S)}, {"job": holdfast.Job(timeout=STOCK_S)}
    stock = {how: side(how, None) for how in ("stops", "hangs")}
    given_up, waited, living = side("stops", gives_up), side("stops", waits), side("hangs", gives_up)
    states = (Check("and that it is stopped", all("(state T)" in answer.error for answer in waited)),)
    text = f"issued the collective, rank {stuck} did not"
    issued = (
        Check("and that it has not issued what the others wait in", all(text in a.error for a in living)),
    )
    scenario = "a group is first used while one of its ranks is stopped (gloo)"
    rows = []
    for what, given, how, ours, seconds, more in (
        (scenario, f"stall_timeout={STALL_S:g}", "stops", given_up, STALL_S, ()),
        ("the same", f"timeout={STOCK_S:g}", "stops", waited, STOCK_S, states),
        (
            "the same, but that rank lives, and hangs",
            f"stall_timeout={STALL_S:g}",
            "hangs",
            living,
            STALL_S,
            issued,
        ),
    ):
        partners = [answer for answer in stock[how] if stuck is not None and answer.rank % 2 == stuck % 2]
        of_stock = (
            Check(
                "stock: the partner of the stopped rank waits to its timeout, in the middle of training",
                bool(partners)
                and all(a.error and a.seconds >= 0.9 * STOCK_S and a.value == "training" for a in partners),
            ),
            Check("stock names nobody", bool(partners) and not any(answer.named for answer in stock[how])),
        )
        rows.append(
            Row(
                REPORT,
                f"{what}; install(job=Job({given}))",
                side_of(partners or stock[how], "trained"),
                side_of(ours, "trained"),
                of_stock + _named(ours, stuck, seconds) + more,
            )
        )
    return rows


def _named(ours: list[Answer], stuck: int | None, seconds: float) -> tuple[Check, ...]:
    return (
        Check(
            f"with install() every rank hears that it was rank {stuck}",
            all(answer.named == (stuck,) for answer in ours),
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
