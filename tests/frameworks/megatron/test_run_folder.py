"""A run folder of Megatron-LM's is gone on from, by `holdfast.Checkpoints` and by the adapter's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
import tests.frameworks.megatron.preload  # noqa: F401 (imports megatron-core without its warnings)
from holdfast import megatron
from holdfast._core.roster.memory import MemoryRoster
from holdfast._frameworks.megatron import iterations
from holdfast.errors import BadInput, StorageError
from tests.frameworks.megatron.cpu import use_cpu
from tests.frameworks.megatron.jobs import children_allowed
from tests.support.processes import ProcessWorld


def test_what_stock_megatron_core_saved_is_gone_on_from(tmp_path: Path) -> None:
    with ProcessWorld(1) as world:
        world.run(save_by_stock_and_go_on, str(tmp_path), timeout=120)
    state = {"w": torch.zeros(3)}
    assert holdfast.Checkpoints(tmp_path).restore(state) == 12
    assert state["w"].tolist() == [10.0] * 3


def save_by_stock_and_go_on(rank: int, run: str) -> None:
    use_cpu()
    from megatron.core import dist_checkpointing as stock

    def part(value: float) -> object:
        return stock.ShardedTensor.from_rank_offsets("w", torch.full((3,), value))

    folder = Path(run, "iter_0000010")
    folder.mkdir()
    with children_allowed():
        stock.save({"w": part(10.0), "n": 10}, str(folder))
    Path(run, "latest_checkpointed_iteration.txt").write_text("10")
    assert holdfast.latest(run) == str(folder)
    state = {"w": torch.zeros(3)}
    assert holdfast.Checkpoints(run).restore(state) == 10
    assert state["w"].tolist() == [10.0] * 3
    checkpoints = megatron.Checkpoints(run, keep=1, asynchronous=False)
    loaded = checkpoints.load({"w": part(0.0)})
    assert (loaded["n"], loaded["w"].tolist()) == (10, [10.0] * 3)
    for iteration in (11, 12):
        checkpoints.save(iteration, {"w": part(10.0), "n": iteration})
    assert checkpoints.steps() == [10, 12]  # what others made is never removed


def test_a_run_of_a_format_that_does_not_load_is_not_begun_anew(tmp_path: Path) -> None:
    """Legacy checkpoints of Megatron-LM: a file a rank, and the tracker."""
    (tmp_path / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"x")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    for kind in (holdfast.Checkpoints, megatron.Checkpoints):
        with pytest.raises(BadInput, match="a run of Megatron-LM"):
            kind(tmp_path, job=holdfast.Job(roster=MemoryRoster())).latest()
    with pytest.raises(BadInput, match="a run of Megatron-LM"):
        megatron.Checkpoints(tmp_path, job=holdfast.Job(roster=MemoryRoster())).load({})


def test_a_tracker_that_could_not_be_written_is_told(tmp_path: Path) -> None:
    with ProcessWorld(1) as world:
        [said] = world.run(save_where_nothing_is_listed, str(tmp_path), timeout=120)
    assert said == [f"latest_checkpointed_iteration.txt was not written in {tmp_path}: Listing failed."]
    assert holdfast.latest(tmp_path) == str(tmp_path / "iter_0000010")


def save_where_nothing_is_listed(rank: int, run: str) -> list[str]:
    use_cpu()
    from megatron.core import dist_checkpointing as stock

    checkpoints = megatron.Checkpoints(run, asynchronous=False)
    part = stock.ShardedTensor.from_rank_offsets("w", torch.ones(3))
    said = list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iterations, "newest_steps", refused)
        patch.setattr(iterations.log, "warning", lambda text, *about: said.append(text % about))
        checkpoints.save(10, {"w": part})
    return said


def refused(*_: object) -> None:
    raise StorageError("Listing failed.")


def test_iterations_stay_by_the_same_rules(tmp_path: Path) -> None:
    with ProcessWorld(1) as world:
        world.run(save_measured, str(tmp_path), timeout=120)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "15"


def save_measured(rank: int, run: str) -> None:
    use_cpu()
    from megatron.core import dist_checkpointing as stock

    checkpoints = megatron.Checkpoints(
        run, keep=1, best="loss", best_mode="min", save_every=2, asynchronous=False
    )
    for iteration, loss in enumerate([3.0, 1.0, 2.0, 0.5, 4.0], 10):
        part = stock.ShardedTensor.from_rank_offsets("w", torch.full((3,), loss))
        saved = checkpoints.save(iteration, {"w": part}, metrics={"loss": loss})
        assert (saved is None) == bool(iteration % 2)
    assert checkpoints.steps() == [12, 14]
    checkpoints.save(15, {"w": part}, force=True, timeout=60)
    assert checkpoints.steps() == [12, 15]
    assert checkpoints.best_step() == 12
