"""Input that can't be honoured gets one sentence; input that means something clear is taken."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.errors import BadInput

STATE = {"w": torch.ones(3)}


@pytest.mark.parametrize("notes", [torch.ones(2), {"a": {1, 2}}, {"deep": {("a", "b"): 1}}])
def test_notes_that_are_no_json(tmp_path: Path, notes: Any) -> None:
    with pytest.raises(BadInput, match=re.escape("notes= must be a JSON value")):
        holdfast.save(STATE, tmp_path / "a", no_dist=True, notes=notes)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("step", [np.int64(7), np.uint8(7), torch.tensor(7)])
def test_an_integer_of_any_library_is_a_step(tmp_path: Path, step: Any) -> None:
    holdfast.save(STATE, tmp_path / "a", no_dist=True, step=step)
    assert holdfast.load({"w": torch.zeros(3)}, tmp_path / "a", no_dist=True).step == 7
    with holdfast.Checkpoints(tmp_path / "run", asynchronous=False) as checkpoints:
        checkpoints.save(step, STATE)
        assert checkpoints.steps() == [7]
        assert checkpoints.restore({"w": torch.zeros(3)}, step) == 7


@pytest.mark.parametrize("step", [1.5, np.float64(1.0), "7", True, np.bool_(True), -1, torch.ones(2)])
def test_what_is_no_step(tmp_path: Path, step: Any) -> None:
    with pytest.raises(BadInput, match="step must be a whole number from 0 on"):
        holdfast.save(STATE, tmp_path / "a", no_dist=True, step=step)
