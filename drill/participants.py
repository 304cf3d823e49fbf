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
from tests.integrations.bridge_jobs import model_of, prepare
from tests.integrations.megatron.models import Layout

WORLD, TRAIN, LAYOUT = 6, 4, Layout(tp=2, ep=2)
IDLE = tuple(range(TRAIN, WORLD))
LIMIT_S, SLACK_S = 6.0, 10.0
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
        folders = {how: Path(top, how) for how in ("stock", "given", "not given")}
        job = holdfast.Job(timeout=LIMIT_S)
        installs = {
            "stock": None,
            "given": {"job": replace(job, participants=range(TRAIN))},
            "not given": {"job": job},
        }
        stock, given, not_given = (
            ask(WORLD, save, str(folders[how]), install, waited_for=range(TRAIN), patience=90.0)
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
        saves = (
            Check("with install() every rank that trains saves", not any(a.error for a in given)),
            Check(
                "and the checkpoint is there, with the framework's own tracker file",
                (folders["given"] / TRACKER).exists()
                and (folders["given"] / "iter_0000000" / "index.safetensors").exists(),
            ),
        )
        fails = (
            Check(
                f"with install() every rank that trains hears that it was rank {', '.join(map(str, IDLE))}",
                all(answer.named == IDLE for answer in not_given),
            ),
            Check(
                f"at the timeout, and {SLACK_S:g} s",
                all(answer.seconds < LIMIT_S + SLACK_S for answer in not_given),
            ),
            Check("and there is no checkpoint", not (folders["not given"] / TRACKER).exists()),
        )
    scenario = f"save_megatron_model, {len(IDLE)} of {WORLD} ranks are in its groups, and take no part"
    return [
        Row(
            "NeMo RL 2226",
            f"{scenario}; install(job=Job(participants=range({TRAIN})))",
            side_of(stock, "saved"),
            side_of(given, "saved"),
            of_stock + saves,
        ),
        Row(
            "NeMo RL 2226",
            f"the same without participants; install(job=Job(timeout={LIMIT_S:g}))",
            side_of(stock, "saved"),
            side_of(not_given, "saved"),
            of_stock + fails,
        ),
    ]
