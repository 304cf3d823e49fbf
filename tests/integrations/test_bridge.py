"""Megatron-Bridge where ranks take no part (NeMo RL issue 2226), and under Megatron-FSDP (Megatron-LM issue
4910): stock's symptom, and its absence after `install()`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations import bridge_jobs
from tests.integrations.fsdp import bridge as fsdp
from tests.integrations.megatron.models import Layout
from tests.support.processes import ProcessWorld

TRACKER = "latest_checkpointed_iteration.txt"


def test_stock_waits_for_ranks_that_do_not_train(tmp_path: Path) -> None:
    with ProcessWorld(6) as world:
        found = world.run(bridge_jobs.save_of_some, str(tmp_path), 4, None, None, 4.0, timeout=100)
    for said, took in found[:4]:
        assert said != "saved"
        assert took >= 3.5
        assert "rank 4" not in said
    assert not (tmp_path / TRACKER).exists()


@pytest.mark.parametrize("options", [{}, {"participants": range(4)}], ids=["found out", "given"])
def test_only_the_ranks_that_train_are_waited_for(options: dict[str, range], tmp_path: Path) -> None:
    with ProcessWorld(6) as world:
        found = world.run(bridge_jobs.save_of_some, str(tmp_path), 4, None, options, 4.0, timeout=100)
    assert [said for said, _ in found] == ["saved"] * 4 + ["takes no part"] * 2
    assert (tmp_path / TRACKER).read_text() == "0"
    assert (tmp_path / "iter_0000000" / "index.safetensors").exists()


def test_one_that_trains_and_does_not_come_is_named(tmp_path: Path) -> None:
    with ProcessWorld(6) as world:
        found = world.run(bridge_jobs.save_of_some, str(tmp_path), 4, 2, {}, 2.0, timeout=100)
    for rank in (0, 1, 3):
        said, took = found[rank]
        assert "rank 2" in said
        assert "rank 4" not in said
        assert took < 10


def test_stock_preparation_under_megatron_fsdp_never_saves(tmp_path: Path) -> None:
    with ProcessWorld(4) as world:
        world.start(fsdp.save, str(tmp_path), Layout(ep=2), False)
        try:
            said = {result.value for result in world.collect(20)}
        except TimeoutError:
            said = {"hangs"}
    assert "saved" not in said


def test_megatron_fsdp_saves_and_loads_through_bridges_own_functions(tmp_path: Path) -> None:
    with ProcessWorld(4) as world:
        found = world.run(fsdp.save_load_compare, str(tmp_path), Layout(ep=2), timeout=150)
    assert all(changed > 10 and held > 20 for changed, held in found)
    assert (tmp_path / TRACKER).read_text() == "1"
    assert (tmp_path / "iter_0000001" / "index.safetensors").exists()
