"""Tensors on a GPU: what another stream than the default one is still at work on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast

CYCLES = 1 << 28


@pytest.mark.gpu
@pytest.mark.parametrize("wide", [True, False])
def test_a_save_waits_for_the_stream_that_it_was_called_on(tmp_path: Path, wide: bool) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        weight = torch.zeros(1 << 20, device="cuda")
        state = {"w": weight if wide else weight.view(1024, 1024).t()}
        torch.cuda._sleep(CYCLES)
        weight.add_(1.0)
        holdfast.save(state, tmp_path / "a", job=holdfast.Job(no_dist=True))
    found = {"w": torch.zeros_like(state["w"], device="cpu")}
    holdfast.load(found, tmp_path / "a", job=holdfast.Job(no_dist=True))
    assert (found["w"] == 1.0).all()


@pytest.mark.gpu
def test_a_load_comes_after_what_its_caller_has_begun_and_before_what_it_begins(tmp_path: Path) -> None:
    holdfast.save({"w": torch.full((1 << 20,), 2.0)}, tmp_path / "a", job=holdfast.Job(no_dist=True))
    with torch.cuda.stream(torch.cuda.Stream()):
        weight = torch.ones(1 << 20, device="cuda")
        torch.cuda._sleep(CYCLES)
        before = weight.clone()
        holdfast.load({"w": weight}, tmp_path / "a", job=holdfast.Job(no_dist=True))
        after = weight.clone()
    torch.cuda.synchronize()
    assert (before == 1.0).all()
    assert (after == 2.0).all()
