"""The format on disk does not change: what earlier code wrote loads. `written_by_dc3f242` was written by that
commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast._tools.checkpoints.verify import Verified, verify

FOLDER = Path(__file__).with_name("written_by_dc3f242")


def test_a_checkpoint_of_earlier_code_loads() -> None:
    state: dict[str, Any] = {
        "w": torch.zeros(3, 4),
        "half": torch.zeros(5, dtype=torch.bfloat16),
        "n": 0,
        "text": "",
        "list": [],
        "deep": {"a": torch.tensor(False), "rng": torch.zeros(6, dtype=torch.uint8)},
        "rank": holdfast.PerRank({"seed": 0}),
    }
    report = holdfast.load(state, FOLDER, job=holdfast.Job(no_dist=True))
    assert (report.step, report.missing) == (3, ())
    assert torch.equal(state["w"], torch.arange(12.0).reshape(3, 4))
    assert torch.equal(state["half"], torch.ones(5, dtype=torch.bfloat16) / 3)
    assert (state["n"], state["text"], state["list"]) == (7, "ü", [1, 2.5, None])
    assert state["deep"]["a"].item()
    assert torch.equal(state["deep"]["rng"], torch.arange(6, dtype=torch.uint8))
    assert state["rank"].value == {"seed": 3}


def test_it_is_whole() -> None:
    found = verify(FOLDER)
    assert isinstance(found, Verified)
    assert found.whole, found.damage
