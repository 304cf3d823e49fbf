"""Megatron-LM 4910: under Megatron-FSDP ranks hold different tensors, and Megatron-Bridge's own save prepares
them with collectives, one a tensor; with the optimizer of the report, `optimizer_cpu_offload`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from drill.ranks import Answer, ask, attempt, begin, shorten_timeouts, side_of
from drill.results import Check, Row
from tests.frameworks.megatron.models import Layout
from tests.frameworks.megatron_fsdp import bridge

WORLD, LAYOUT = 4, Layout(ep=2)
LIMIT_S = 6.0


def save_and_load(rank: int, folder: str, offloads: float, install: dict[str, Any] | None) -> Answer:
    """Train a step, save, train another, load: the values are those that were saved."""
    begin(rank, install)
    run = bridge.prepare(rank, LAYOUT, 1, offloads)
    run.step()
    manager = bridge.Bridge(run, folder, folder)
    shorten_timeouts(LIMIT_S)

    def through() -> bool:
        manager.save()
        before = bridge.values_of(run)
        run.step()
        manager.load()
        after = bridge.values_of(run)
        return all(torch.equal(after[name], value) for name, value in before.items())

    return attempt(rank, through)


def run() -> list[Row]:
    """With what megatron-core offloads by default, and all of it, as the report has it."""
    return [_row(offloads) for offloads in (0.0, 1.0)]


def _row(offloads: float) -> Row:
    def side(folder: str, install: dict[str, Any] | None) -> list[Answer]:
        return ask(WORLD, save_and_load, folder, offloads, install, waited_for=range(WORLD), patience=120.0)

    with TemporaryDirectory(prefix="holdfast-drill-") as top:
        stock, ours = side(str(Path(top, "stock")), None), side(str(Path(top, "ours")), {})
    checks = (
        Check("stock hangs or fails on every rank", all(answer.error for answer in stock)),
        Check(
            "with install() every rank saves, and loads what it saved, bit for bit",
            all(answer.value is True for answer in ours),
        ),
    )
    scenario = f"Megatron-FSDP, optimizer_cpu_offload=True, optimizer_offload_fraction={offloads:g}; Bridge's own save, load"
    return Row(
        "Megatron-LM 4910", scenario, side_of(stock, "saved"), side_of(ours, "saved and loaded"), checks
    )
