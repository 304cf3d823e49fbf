"""NeMo RL 2226: Megatron-Bridge's `save_megatron_model` on a world of which two ranks take no part, as the
ranks of an inference engine do. As reported, these are members of the data-parallel groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import holdfast
from drill.ranks import Answer, ask, attempt, begin, shorten_timeouts, side_of
from drill.results import Check, Row
from holdfast._tools.checkpoints.verify import verify
from tests.frameworks.megatron.models import Layout
from tests.frameworks.megatron_bridge.jobs import model_of, prepare

WORLD, TRAIN, LAYOUT = 6, 4, Layout(tp=2, ep=2)
IDLE = tuple(range(TRAIN, WORLD))
LIMIT_S, SLACK_S = 6.0, 10.0
REPORT_S = holdfast.Job().report_after
TRACKER = "latest_checkpointed_iteration.txt"


def save(rank: int, folder: str, install: dict[str, Any] | None) -> Answer:
    begin(rank, install)
    prepare(rank, WORLD, LAYOUT)  # the groups span all ranks
    shorten_timeouts(LIMIT_S)
    if rank in IDLE:
        return Answer(rank, 0.0)
    from megatron.bridge.training import model_load_save

    model = model_of(LAYOUT, 3)
    return replace(attempt(rank, lambda: model_load_save.save_megatron_model(model, folder)), value="called")


def run() -> list[Row]:
    with TemporaryDirectory(prefix="holdfast-drill-") as top:
        folders = {how: Path(top, how) for how in ("stock", "bare", "given")}
        installs = {
            "stock": None,
            "bare": {},
            "given": {"job": holdfast.Job(timeout=LIMIT_S, participants=range(TRAIN))},
        }
        stock, bare, given = (
            ask(WORLD, save, str(folders[how]), install, waited_for=range(TRAIN), patience=120.0)
            for how, install in installs.items()
        )
        of_stock = (
            Check("stock waits to its timeout", all(a.error and a.seconds >= 0.8 * LIMIT_S for a in stock)),
            Check(
                "stock does not say for whom it waited",
                not any(set(IDLE) & set(answer.named) for answer in stock),
            ),
            Check(
                "stock leaves no checkpoint that its tracker names", not (folders["stock"] / TRACKER).exists()
            ),
        )
        saves = {how: _saves(answers, folders[how]) for how, answers in (("bare", bare), ("given", given))}
    waits = Check(
        f"after `report_after` ({REPORT_S:g} s), in which the others may come",
        all(REPORT_S <= answer.seconds < REPORT_S + SLACK_S for answer in bare),
    )
    scenario = f"save_megatron_model, {len(IDLE)} of {WORLD} ranks are in its groups, and take no part"
    return [
        Row(
            "NeMo RL 2226",
            f"{scenario}; install()",
            side_of(stock, "saved"),
            side_of(bare, "saved"),
            (*of_stock, *saves["bare"], waits),
        ),
        Row(
            "NeMo RL 2226",
            f"the same; install(job=Job(participants=range({TRAIN})))",
            side_of(stock, "saved"),
            side_of(given, "saved"),
            of_stock + saves["given"],
        ),
    ]


def _saves(answers: list[Answer], folder: Path) -> tuple[Check, ...]:
    checkpoint = folder / "iter_0000000"
    return (
        Check("with install() every rank that trains saves", not any(a.error for a in answers)),
        Check(
            "and the checkpoint is there and whole, with the framework's own tracker file",
            (folder / TRACKER).exists() and verify(checkpoint).whole,
        ),
    )
