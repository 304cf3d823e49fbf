"""torchtitan's own checkpoint manager, where it is installed: `pip install --no-deps torchtitan` and what its
checkpoints import (docs/recipes/torchtitan.md)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.frameworks.torchtitan import jobs
from tests.support.processes import ProcessWorld
from tests.support.waiting import SLACK

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torchtitan", "tyro", "spmd_types")),
    reason="torchtitan is not installed",
)


@pytest.mark.parametrize(("async_mode", "ours"), [("disabled", False), ("async", False), ("async", True)])
def test_its_manager_saves_and_another_number_of_ranks_loads(
    async_mode: str, ours: bool, tmp_path: Path
) -> None:
    with ProcessWorld(4) as world:
        found = world.run(jobs.save, str(tmp_path), async_mode, ours, timeout=100)
    assert any("Manager.save" in name for name in found[0][1])
    step = tmp_path / "checkpoint" / "step-2"
    assert (step / "index.safetensors").exists()
    assert (step / ".metadata").exists()
    with ProcessWorld(4) as world:
        again = world.run(jobs.load, str(tmp_path), timeout=100)
    assert again == [losses for losses, _ in found]
    with ProcessWorld(2) as world:
        assert len(world.run(jobs.load, str(tmp_path), timeout=100)) == 2


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    with ProcessWorld(4) as world:
        found = world.run(jobs.save_without, str(tmp_path), 2, timeout=100)
    for rank, (said, took) in enumerate(found):
        if rank != 2:
            assert said.startswith("RankFailed")
            assert "rank 2" in said
            assert took < 2 + SLACK
