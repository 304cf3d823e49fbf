"""Saves in waves: what a wave takes of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast._core.background.arena import ALIGN, Arena

KiB = 1 << 10


@pytest.mark.parametrize("budget", [16 * KiB, 64 * KiB])
def test_waves_of_tiny_tensors_keep_to_the_budget(
    budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes 64 bytes of the arena, whatever it holds."""
    reserved: list[int] = []
    really_reserve = Arena.reserve

    def noted(self: Arena, size: int) -> None:
        reserved.append(size)
        really_reserve(self, size)

    monkeypatch.setattr(Arena, "reserve", noted)
    state = {f"tiny{number}": torch.tensor([float(number)]) for number in range(1500)}
    state["large"] = torch.arange(3 * KiB, dtype=torch.float32)
    assert 1500 * ALIGN > budget > 1500 * 4
    pending = holdfast.async_save(
        state,
        tmp_path / "a",
        job=holdfast.Job(no_dist=True, options=holdfast.Options(host_memory_budget=budget)),
    )
    pending.committed()
    assert len(reserved) > 1
    assert max(reserved) <= budget
    back = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    holdfast.load(back, tmp_path / "a", job=holdfast.Job(no_dist=True))
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())
