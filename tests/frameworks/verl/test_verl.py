"""verl as its users run it: its own manager, and `holdfast.install()` before anything else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast._core.base.options import Options
from holdfast._tools.checkpoints.diff import compare
from tests.frameworks.megatron.models import Layout
from tests.frameworks.verl.jobs import save_and_load, save_without
from tests.support.processes import ProcessWorld
from tests.support.third_parties import needs
from tests.support.waiting import SLACK

pytestmark = needs("verl", "transformers")
RANKS, ABSENT = 4, 3
HOME, OTHER = Layout(tp=2, ep=2), Layout(pp=2, ep=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("verl") / "global_step_1" / "actor"
    with ProcessWorld(RANKS, preload="verl") as world:
        losses = world.run(save_and_load, HOME, str(folder), None, Options(), timeout=200)
    return folder, losses[0]


def test_the_folder_is_verls_own(saved: tuple[Path, list[float]]) -> None:
    folder, _ = saved
    contents = json.loads((folder / "ckpt_contents.json").read_text())
    assert contents["global_step"] == 1
    for part in ("model", "optimizer", "extra"):
        assert (folder / part / "dist_ckpt" / "index.safetensors").exists()


def test_it_loads_and_training_goes_on_as_before(saved: tuple[Path, list[float]], tmp_path: Path) -> None:
    folder, losses = saved
    with ProcessWorld(RANKS, preload="verl") as world:
        found = world.run(save_and_load, HOME, str(tmp_path / "a"), str(folder), Options(), timeout=200)
    assert found[0] == losses
    for part in ("model", "optimizer"):
        report = compare(folder / part / "dist_ckpt", tmp_path / "a" / part / "dist_ckpt")
        assert [item.name for item in (*report.content, *report.changed) if item.name != "common_state"] == []
        assert report.equal > 10


def test_another_layout_takes_the_generators_of_the_nearest_rank(
    saved: tuple[Path, list[float]], tmp_path: Path
) -> None:
    folder, losses = saved
    with ProcessWorld(RANKS, preload="verl") as world, pytest.raises(Exception, match="nearest_rng"):
        world.run(save_and_load, OTHER, str(tmp_path / "a"), str(folder), Options(), timeout=200)
    with ProcessWorld(RANKS, preload="verl") as world:
        found = world.run(
            save_and_load, OTHER, str(tmp_path / "b"), str(folder), Options(nearest_rng=True), timeout=200
        )
    assert found[0] == pytest.approx(losses, rel=1e-4)


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    """And the next step is saved by all, that rank among them."""
    with ProcessWorld(RANKS, preload="verl") as world:
        found = world.run(save_without, str(tmp_path), ABSENT, timeout=200)
    for rank, (said, took, after) in enumerate(found):
        if rank != ABSENT:
            assert said.startswith("RankFailed")
            assert f"rank {ABSENT}" in said
            assert "MegatronCheckpointManager.save_checkpoint" in said
            assert took < 2 + SLACK
        assert after == "saved"
    assert (tmp_path / "global_step_2" / "ckpt_contents.json").exists()
    assert not (tmp_path / "global_step_1" / "ckpt_contents.json").exists()
