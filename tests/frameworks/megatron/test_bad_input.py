"""What the adapter says when it can't do what it is asked; one rank, no process group."""

from __future__ import annotations

import functools
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
import tests.frameworks.megatron.preload  # noqa: F401 (imports megatron-core without its warnings)
from holdfast import megatron
from holdfast._core.roster.memory import MemoryRoster
from holdfast._frameworks.megatron import mcore
from holdfast._frameworks.torch_dcp.torch_dist import export_torch_dist
from holdfast.errors import (
    BadInput,
    CoverageError,
    HoldfastError,
    MissingTensors,
    NotCommitted,
    ShapeMismatch,
)
from tests.support.waiting import SLACK

save = functools.partial(megatron.save, job=holdfast.Job(roster=MemoryRoster()))
load = functools.partial(megatron.load, job=holdfast.Job(roster=MemoryRoster()))


def shard(key: str, *shape: int, value: float = 0.0) -> Any:
    return mcore.ShardedTensor.from_rank_offsets(key, torch.full(shape, value))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    layers = {f"l{n}": shard(f"decoder.layers.{n}.weight", 4, 3, value=float(n)) for n in range(12)}
    save({"model": layers, "iteration": 5}, tmp_path / "iter_0000005")
    return tmp_path / "iter_0000005"


def test_a_wrong_folder(folder: Path) -> None:
    with pytest.raises(NotCommitted, match=r"elsewhere holds no committed checkpoint"):
        load({"model": {"a": shard("decoder.layers.0.weight", 4, 3)}}, folder.parent / "elsewhere")
    with pytest.raises(NotCommitted, match="holds no committed checkpoint"):
        megatron.load_common_state_dict(folder.parent)
    assert not megatron.check_is_distributed_checkpoint(folder.parent)
    assert megatron.check_is_distributed_checkpoint(folder)


def test_missing_keys_name_the_nearest(folder: Path) -> None:
    wanted = {f"l{n}": shard(f"decoder.layer.{n}.weight", 4, 3) for n in range(12)}
    with pytest.raises(MissingTensors) as caught:
        load({"model": wanted}, folder)
    assert "does not hold 12 of the names" in str(caught.value)
    assert "'decoder.layer.0.weight' (nearest: 'decoder.layers.0.weight')" in str(caught.value)
    assert "; and more" in str(caught.value)


def test_shapes_are_named(folder: Path) -> None:
    with pytest.raises(ShapeMismatch, match=r"holds float32\[4, 3\], the state wants float32\[8, 3\]"):
        load({"model": {"a": shard("decoder.layers.0.weight", 8, 3)}}, folder)


def test_a_part_that_nobody_has(tmp_path: Path) -> None:
    data = torch.zeros(2, 3)
    half = mcore.ShardedTensor.from_rank_offsets("w", data, (0, 1, 2))
    with pytest.raises(CoverageError, match=r"'w' of shape \[4, 3\] is not covered: from index \[0, 0\]"):
        save({"w": half}, tmp_path / "a")
    assert not (tmp_path / "a" / "metadata.json").exists()
    assert not megatron.check_is_distributed_checkpoint(tmp_path / "a")


def test_common_state_that_would_execute_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"common_state\['lock'\]"):
        save({"w": shard("w", 2), "lock": threading.Lock(), "iteration": 1}, tmp_path / "a")


def test_megatrons_own_enumerations_are_common_state(tmp_path: Path) -> None:
    from megatron.core.transformer.enums import AttnBackend

    save({"w": shard("w", 2), "args": {"attention_backend": AttnBackend.flash}}, tmp_path / "a")
    found = load({"w": shard("w", 2)}, tmp_path / "a")
    assert found["args"] == {"attention_backend": AttnBackend.flash}


def test_nonpersistent_objects_stay_here(tmp_path: Path) -> None:
    local = mcore.LocalNonpersistentObject
    save({"w": shard("w", 2), "here": local({"a": 1})}, tmp_path / "a")
    found = load({"w": shard("w", 2), "here": local({"a": 2})}, tmp_path / "a")
    assert found["here"] == {"a": 2}


def test_a_strategy_of_somebody_else_is_noted_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Mine:
        pass

    for name in ("a", "b"):
        save({"w": shard("w", 2)}, tmp_path / name, sharded_strategy=Mine())
    assert sum("has no effect" in record.message for record in caplog.records) == 1


def test_a_strategy_that_would_part_files_by_key_is_noted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    asking = TorchDistSaveShardedStrategy("torch_dist", 1, separation_hint="optimizer")
    silent = TorchDistSaveShardedStrategy("torch_dist", 1)
    for number, strategy in enumerate((silent, asking, FullyParallelSaveStrategyWrapper(asking), asking)):
        save({"w": shard("w", 2)}, tmp_path / str(number), sharded_strategy=strategy)
        said = [record.message for record in caplog.records if "separation_hint" in record.message]
        assert len(said) == min(number, 1)
    assert said == [
        "separation_hint='optimizer' has no effect: each rank writes one file, whatever the keys in it."
    ]


def test_an_asynchronous_save_is_finalized_once_it_is_committed(tmp_path: Path) -> None:
    """By the stock queue, too, which calls the finalize functions: the first of them waits."""
    request = save({"w": shard("w", 2)}, tmp_path / "a", async_sharded_save=True)
    assert request.async_fn is None
    request.finalize_fns[0]()
    assert (tmp_path / "a" / "index.safetensors").exists()
    assert megatron.check_is_distributed_checkpoint(tmp_path / "a")


def test_empty_containers_are_common_state(tmp_path: Path) -> None:
    common = {"scheduler": {}, "opt": {"state": {}, "groups": [], "x": 1}}
    save({"w": shard("w", 2), **common}, tmp_path / "a")
    loaded = load({"w": shard("w", 2)}, tmp_path / "a")
    assert {key: loaded[key] for key in common} == common


def test_what_a_crashed_stock_save_left_behind_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    torch.save({"old": 1}, tmp_path / "a" / "common.pt")
    (tmp_path / "a" / "metadata.json").symlink_to(tmp_path / "victim")
    (tmp_path / "victim").write_text("mine")
    state = [{"seed": 7}]
    save({"w": shard("w", 2), "rng": mcore.ShardedObject("rng", state, (1,), (0,))}, tmp_path / "a")
    loaded = load({"w": shard("w", 2), "rng": mcore.ShardedObject("rng", None, (1,), (0,))}, tmp_path / "a")
    assert loaded["rng"] == state
    assert "old" not in loaded
    assert (tmp_path / "victim").read_text() == "mine"


def test_what_the_process_allows_stays_allowed(tmp_path: Path) -> None:
    from argparse import Namespace

    from megatron.core.transformer.enums import AttnBackend

    with torch.serialization.safe_globals([Namespace, AttnBackend]):
        save({"w": shard("w", 2), "args": Namespace(backend=AttnBackend.flash)}, tmp_path / "a")
        assert load({"w": shard("w", 2)}, tmp_path / "a")["args"].backend is AttnBackend.flash
        assert {Namespace, AttnBackend} <= set(torch.serialization.get_safe_globals())


def test_generators_of_another_layout_are_taken_from_the_nearest_rank(tmp_path: Path) -> None:
    """Of our checkpoints, and of megatron-core's."""

    def state(data: Any, ranks: int, rank: int) -> dict[str, Any]:
        return {"w": shard("w", 2), "rng": mcore.ShardedObject("rng_state", data, (ranks,), (rank,))}

    save(state({"seed": 7}, 1, 0), tmp_path / "ours")
    export_torch_dist(tmp_path / "ours", tmp_path / "stock")
    for name in ("ours", "stock"):
        with pytest.raises(MissingTensors, match="nearest_rng=True"):
            load(state(None, 2, 1), tmp_path / name)
        job = holdfast.Job(roster=MemoryRoster(), options=holdfast.Options(nearest_rng=True))
        assert load(state(None, 2, 1), tmp_path / name, job=job)["rng"] == {"seed": 7}


def test_a_checkpoint_changes_no_enumeration(tmp_path: Path) -> None:
    from megatron.core.transformer.enums import AttnBackend

    class Hostile:
        def __reduce__(self) -> Any:
            return AttnBackend, (AttnBackend.flash.value,), {"_value_": 99, "_name_": "hacked"}

    before = AttnBackend.flash.value
    torch.save({"x": Hostile()}, tmp_path / "common.pt")
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(HoldfastError):
        megatron.load_common_state_dict(tmp_path)
    assert AttnBackend.flash.value == before


def test_a_storage_that_never_answers(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metadata.json")
    begun = time.monotonic()
    with pytest.raises(HoldfastError):
        megatron.load({"w": shard("w", 2)}, tmp_path, job=holdfast.Job(roster=MemoryRoster(), timeout=2))
    assert time.monotonic() - begun < 2 + SLACK


def test_factories_that_copy_are_refused(tmp_path: Path) -> None:
    from holdfast._frameworks.megatron.optimizer import _parts

    def build(key: str, data: torch.Tensor, replica: Any, flat: Any) -> dict[str, Any]:
        return {"t": mcore.ShardedTensor.from_rank_offsets(key, data.t().contiguous())}

    factory = mcore.ShardedTensorFactory(
        "experts.weight1", torch.zeros(2, 3), build, lambda parts: parts["t"].t()
    )
    with pytest.raises(BadInput, match=r"'experts\.weight1' is stored in another order"):
        _parts(factory)


def test_an_empty_list_is_no_common_state(tmp_path: Path) -> None:
    """megatron-core 0.19 keeps its common state as an object in a list of one."""
    holdfast.save({"common_state/shard_0_1": []}, tmp_path / "a", job=holdfast.Job(no_dist=True))
    with pytest.raises(HoldfastError, match="is not a list of one"):
        megatron.load_common_state_dict(tmp_path / "a")


def test_a_checkpoint_that_is_replaced_during_a_load_is_loaded_anew(tmp_path: Path) -> None:
    """By another job, once this one has chosen a version."""
    save({"w": shard("w", 2), "count": 1}, tmp_path / "a")
    times = iter([True])

    def overwrite(event: holdfast.events.Event) -> None:
        if event.name == "load.reading" and next(times, False):
            save({"w": shard("w", 2), "count": 2}, tmp_path / "a")

    stop = holdfast.events.subscribe(overwrite)
    try:
        assert load({"w": shard("w", 2), "count": None}, tmp_path / "a")["count"] == 2
    finally:
        stop()
    assert next(times, None) is None, "the checkpoint was replaced"
