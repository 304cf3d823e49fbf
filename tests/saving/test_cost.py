"""What a tensor costs in a save and a load, counted in calls: their number is the same on a busy machine.

The limits stand just above what was counted. Lower them when the code makes fewer; never raise them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import holdfast

FEW, MANY = 100, 1100


@pytest.mark.parametrize(("verb", "most"), [("save", 13), ("async_save", 10), ("load", 21)])
def test_a_tensor_costs_few_calls(tmp_path: Path, verb: str, most: int) -> None:
    """Calls of functions in Python and in C, on all threads of this process; of a background save until it
    has copied the state."""
    whole = torch.zeros(MANY, 64)
    state = {f"layers.{number}.weight": whole[number].clone() for number in range(MANY)}
    some = dict(list(state.items())[:FEW])
    job = holdfast.Job(no_dist=True)

    def calls(part: dict[str, torch.Tensor], name: str) -> int:
        if verb == "save":
            return counted(lambda: holdfast.save(part, tmp_path / name, job=job), everywhere=True)
        if verb == "load":
            holdfast.save(part, tmp_path / name, job=job)
            return counted(lambda: holdfast.load(part, tmp_path / name, job=job), everywhere=True)
        pending: list[holdfast.Pending] = []
        made = counted(lambda: pending.append(holdfast.async_save(part, tmp_path / name, job=job)))
        pending[0].committed(60)
        return made

    calls(some, "warm")
    assert (calls(state, "many") - calls(some, "few")) / (MANY - FEW) < most


def counted(call: Callable[[], object], everywhere: bool = False) -> int:
    """Run `call`, and return the number of calls that it makes: on this thread, or on those, too, that it
    starts."""
    made = [0]

    def look(frame: FrameType, event: str, _: Any) -> None:
        made[0] += event in ("call", "c_call")

    if everywhere:
        threading.setprofile(look)
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return made[0]
