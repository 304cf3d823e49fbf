"""States that do not fit together, storage that refuses, and what stays on disk."""

from __future__ import annotations

import errno
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast._core.protocol.job import Job
from holdfast.errors import (
    Conflict,
    CoverageError,
    HoldfastError,
    ReplicaMismatch,
    SaveFailed,
    StorageError,
    Vanished,
)
from tests.support.collectives import counted
from tests.support.mounts import tmpfs
from tests.support.processes import ProcessWorld
from tests.support.waiting import wait_until
from tests.system.checks import (
    PATIENT,
    at_once,
    errors_of,
    in_time,
    no_checkpoint,
    no_data,
    same_everywhere,
)
from tests.system.jobs import load_job, save_job

FAST = Job(timeout=30.0, stall_timeout=5.0)
SOLE, REPLICA = "layers.0.experts.w1", "layers.1.attn.weight"

State = dict[str, Any]


def fails(world: ProcessWorld, path: str, how: dict[str, Any], step: int = 1) -> HoldfastError:
    """All eight raise the same error, soon, and nothing is left."""
    world.start(save_job, path, step, {"job": PATIENT, **how})
    errors = errors_of(world.collect(40))
    error = same_everywhere(errors, 8)
    at_once(errors)
    no_checkpoint(path)
    no_data(path)
    return error


def drop_replica(state: State) -> None:
    del state["model"][REPLICA]


def drop_shard(state: State) -> None:
    del state["model"][SOLE]


def add_own(state: State) -> None:
    state["model"]["extra.weight"] = torch.full((3,), 7.0)


def other_shape(state: State) -> None:
    state["model"][REPLICA] = torch.zeros(64, 65)


def other_dtype(state: State) -> None:
    state["model"][REPLICA] = state["model"][REPLICA].half()


def other_bytes(state: State) -> None:
    state["model"][REPLICA] = state["model"][REPLICA] + 1


def other_object(state: State) -> None:
    state["lr"] = 0.5


def other_shard_shape(state: State) -> None:
    old = state["model"][SOLE]
    state["model"][SOLE] = holdfast.Shard(old.tensor, (9, *old.global_shape[1:]), old.offset, old.replica)


def local_experts(state: State) -> None:
    """A user's expert weights under one local name, different on every rank."""
    state["model"] = {"experts.weight": torch.full((4, 4), float(torch.distributed.get_rank()))}


def with_sole(state: State) -> None:
    """An expert that only this rank holds, as a plain tensor under a global name."""
    state["model"][f"experts.{torch.distributed.get_rank()}.w"] = torch.full(
        (5,), float(torch.distributed.get_rank())
    )


def test_replica_missing_on_one_rank_is_no_loss(world: ProcessWorld, tmp_path: Path) -> None:
    path = str(tmp_path / "step-1")
    world.run(save_job, path, 1, {"job": FAST, "change": {3: drop_replica}})
    world.run(load_job, path, 1, {})


def test_sole_owners_shard_missing_is_a_gap(world: ProcessWorld, tmp_path: Path) -> None:
    # Ranks 2 and 6 hold the same experts; without both of them those experts are nowhere.
    error = fails(world, str(tmp_path / "step-1"), {"change": {2: drop_shard, 6: drop_shard}})
    assert isinstance(error, CoverageError)
    assert f"'model.{SOLE}'" in str(error)
    assert "[4, 0, 0]" in str(error)
    assert error.details["place"] == [4, 0, 0]


def test_one_replicas_shard_missing_is_a_gap(world: ProcessWorld, tmp_path: Path) -> None:
    # A declared replica is a promise: rank 6 promised to write half of what rank 2 holds too.
    how = {"change": {6: drop_shard}, "job": replace(PATIENT, options=holdfast.Options(split_bytes=4096))}
    error = fails(world, str(tmp_path / "step-1"), how)
    assert isinstance(error, CoverageError)
    assert f"'model.{SOLE}'" in str(error)


def test_vanished_sole_tensor_is_named(world: ProcessWorld, tmp_path: Path) -> None:
    run = tmp_path / "run"
    change = dict.fromkeys(range(8), with_sole)
    world.run(steps_job, str(run), 1, change)
    change.pop(5)
    world.start(steps_job, str(run), 2, change)
    error = same_everywhere(errors_of(world.collect(30)), 8)
    assert isinstance(error, Vanished)
    assert "'model.experts.5.w'" in str(error)
    assert "rank 5" in str(error)
    assert error.rank == 5
    no_checkpoint(str(run / "step-00000002"))
    assert holdfast.latest(run) == str(run / "step-00000001")
    # The same by name, with nothing to compare with.
    names = [f"model.experts.{rank}.w" for rank in range(8)]
    error = fails(world, str(tmp_path / "first"), {"change": change, "expected": names})
    assert isinstance(error, Vanished)
    assert "expected= has is not in this save: 'model.experts.5.w'" in str(error)


def steps_job(rank: int, run: str, step: int, change: dict[int, Any]) -> None:
    from tests.system.jobs import moe_state

    state = moe_state(rank, step)
    change.get(rank, lambda state: None)(state)
    try:
        holdfast.Checkpoints(run, asynchronous=False, job=holdfast.Job(timeout=30, stall_timeout=5)).save(
            step, state
        )
    except HoldfastError as error:
        error.details["returned_after"] = 0.0
        raise


def test_one_tensor_more_is_saved(world: ProcessWorld, tmp_path: Path) -> None:
    path = str(tmp_path / "step-1")
    world.run(save_job, path, 1, {"job": FAST, "change": {3: add_own}})
    world.run(load_job, path, 1, {})
    (extra,) = world.run(read_extra, path, ranks=[6])
    assert extra == [7.0] * 3


def read_extra(rank: int, path: str) -> list[float]:
    state = {"model": {"extra.weight": torch.zeros(3)}}
    holdfast.load(state, path, job=holdfast.Job(participants=[rank]))
    return state["model"]["extra.weight"].tolist()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_shape, ["float32[64, 64]", "float32[64, 65]"]),
        (other_dtype, ["float32[64, 64]", "float16[64, 64]"]),
        (other_bytes, ["different bytes", "holdfast.Shard", "holdfast.PerRank"]),
        (other_object, ["0.001", "0.5", "holdfast.PerRank"]),
    ],
)
def test_replicas_that_differ_are_named(
    world: ProcessWorld, tmp_path: Path, change: Any, words: list[str]
) -> None:
    error = fails(world, str(tmp_path / "step-1"), {"change": {3: change}})
    assert isinstance(error, ReplicaMismatch)
    assert error.rank == 3
    name = "lr" if change is other_object else f"model.{REPLICA}"
    for word in [repr(name), "rank 3", *words]:
        assert word in str(error), str(error)


def test_declared_shape_that_differs_is_named(world: ProcessWorld, tmp_path: Path) -> None:
    error = fails(world, str(tmp_path / "step-1"), {"change": {3: other_shard_shape}})
    assert isinstance(error, ReplicaMismatch | CoverageError)
    assert f"'model.{SOLE}'" in str(error)
    assert "rank 3" in str(error)


def test_local_expert_names_are_refused(world: ProcessWorld, tmp_path: Path) -> None:
    error = fails(world, str(tmp_path / "step-1"), {"change": dict.fromkeys(range(8), local_experts)})
    assert isinstance(error, ReplicaMismatch)
    assert "'model.experts.weight'" in str(error)
    assert "a global expert number" in str(error)


def test_declared_replicas_that_differ_are_found_by_sample(world: ProcessWorld, tmp_path: Path) -> None:
    error = fails(world, str(tmp_path / "step-1"), {"change": {5: other_expert_bytes}})
    assert isinstance(error, ReplicaMismatch)
    assert f"'model.{SOLE}'" in str(error)
    assert set(error.details["ranks"]) == {1, 5}


def other_expert_bytes(state: State) -> None:
    state["model"][SOLE].tensor.add_(1)


def test_different_step_is_named(world: ProcessWorld, tmp_path: Path) -> None:
    """Ranks 0 and 3 wait for each other. The one that sees it first ends both saves."""
    path = str(tmp_path / "x")
    world.start(save_job, path, 1, {"job": Job(timeout=60.0), "steps": {3: 2}})
    errors = errors_of(world.collect(30))
    in_time(errors, 8.0)
    lone = errors.pop(3)
    error = same_everywhere(errors, 7)
    assert "a circle" in str(error)
    assert {error.rank, lone.rank} <= {0, 3}
    assert {"(step 1)", "(step 2)"} <= set(re.findall(r"\(step .\)", str(error)))
    no_checkpoint(path)
    no_data(path)


@pytest.mark.parametrize(
    ("mishap", "number", "words"),
    [
        ("write", errno.ENOSPC, "No space left on device"),
        ("write", errno.EIO, "Input/output error"),
        ("sync", errno.EIO, "Syncing"),
    ],
)
def test_storage_that_fails_on_one_rank(
    world: ProcessWorld, tmp_path: Path, mishap: str, number: int, words: str
) -> None:
    path = str(tmp_path / "step-1")
    os.makedirs(os.path.join(path, "data"))  # or the rank that comes first makes and syncs the folder
    error = fails(world, path, {"mishap": {5: (mishap, number)}})
    assert isinstance(error, StorageError)
    assert error.rank == 5
    assert words in str(error)
    assert f"rank 5 (host {os.uname().nodename}, pid {world.pid(5)})" in str(error)
    world.run(save_job, path, 1, {"job": FAST})
    world.run(load_job, path, 1, {})


def test_sync_that_fails_on_the_committer_leaves_nothing_unsaid(world: ProcessWorld, tmp_path: Path) -> None:
    error = fails(world, str(tmp_path / "step-1"), {"mishap": {0: ("sync", errno.EIO)}})
    assert isinstance(error, StorageError)
    assert error.rank == 0


def test_read_only_folder(world: ProcessWorld, tmp_path: Path) -> None:
    with tmpfs(tmp_path, "ro"):
        error = fails(world, str(tmp_path / "step-1"), {})
    assert isinstance(error, StorageError)
    assert str(tmp_path / "step-1") in str(error)
    assert "Read-only" in str(error)


def test_folder_of_the_kernel(world: ProcessWorld) -> None:
    error = fails(world, "/sys/kernel/step-1", {})
    assert isinstance(error, StorageError)
    assert "/sys/kernel/step-1" in str(error)
    assert "not permitted" in str(error) or "Read-only" in str(error)


def test_disk_that_is_full(world: ProcessWorld, tmp_path: Path) -> None:
    with tmpfs(tmp_path, "size=300k"):
        error = fails(world, str(tmp_path / "step-1"), {})
    assert isinstance(error, StorageError)
    assert "No space left on device" in str(error)
    assert "Free space" in str(error)


def test_two_jobs_saving_into_one_folder(tmp_path: Path) -> None:
    path, flag = str(tmp_path / "step-1"), tmp_path / "paused"
    with ProcessWorld(8) as one, ProcessWorld(8) as two:
        one.start(
            save_job,
            path,
            1,
            {"job": replace(FAST, stall_timeout=20.0), "mishap": {0: ("pause", "save.written", str(flag))}},
        )
        wait_until(flag.exists)
        two.run(save_job, path, 2, {"job": FAST})
        one.signal(0, signal.SIGCONT)
        error = same_everywhere(errors_of(one.collect(30)), 8)
        assert isinstance(error, Conflict)
        assert path in str(error)
        assert "its own folder" in str(error)
        two.run(load_job, path, 2, {})


def test_hundred_thousand_tensors(world: ProcessWorld, tmp_path: Path) -> None:
    reports = world.run(many_job, str(tmp_path / "step-1"), timeout=120)
    assert sum(tensors for tensors, _ in reports) == 100_000 + 8
    assert max(seconds for _, seconds in reports) < 60


def many_job(rank: int, path: str) -> tuple[int, float]:
    count = 12_500
    state: State = {f"layer.{rank}.{at}": torch.full((3,), float(at)) for at in range(count)}
    report = holdfast.save({**state, "who": holdfast.PerRank(rank)}, path)
    blank = {name: torch.zeros(3) for name in state}
    holdfast.load(blank, path)
    assert all(torch.equal(blank[name], state[name]) for name in state)
    return report.tensors, report.seconds


def test_save_and_load_issue_no_collective(world: ProcessWorld, tmp_path: Path) -> None:
    counts = world.run(counting_job, str(tmp_path / "step-1"))
    assert all(count == [] for count in counts), counts
    assert world.run(counting_control) == [["all_reduce"]] * 8  # the counter does count


def counting_job(rank: int, path: str) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from tests.system.jobs import moe_state

    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "ep"))
    state = moe_state(rank, 1)
    state["d"] = distribute_tensor(torch.arange(40.0).view(10, 4), mesh, [Replicate(), Shard(0)])
    state["sub"] = distribute_tensor(torch.arange(12.0), mesh["ep"], [Shard(0)])
    ckpt = holdfast.Checkpoints(path, asynchronous=False, keep=1)

    def both() -> None:
        ckpt.save(1, state)
        assert ckpt.restore(state) == 1

    return counted(both)


def counting_control(rank: int) -> list[str]:
    return counted(lambda: torch.distributed.all_reduce(torch.ones(1)))


def test_partial_saves_and_loads_by_pattern(world: ProcessWorld, tmp_path: Path) -> None:
    assert world.run(partial_job, str(tmp_path / "step-1")) == [None] * 8


def partial_job(rank: int, path: str) -> None:
    from holdfast.errors import MissingTensors
    from tests.system.jobs import blank, check_state, moe_state

    holdfast.save(moe_state(rank, 1), path, include=["model"])
    state = blank(rank)
    with pytest.raises(
        MissingTensors, match=r"does not hold 3 of the names in the state: 'step'.*'lr'.*'rng@"
    ):
        holdfast.load(state, path)
    report = holdfast.load(state, path, strict=False)
    assert report.missing == ("step", "lr", f"rng@{rank}")
    state = blank(rank)
    holdfast.load(state, path, include=["model.*"])
    state["step"], state["rng"].value = 1, torch.full((4,), rank)
    check_state(state, rank, 1)
    holdfast.save(moe_state(rank, 2), path + "b", exclude=["model"])
    rest = {"step": 0, "lr": 0.0, "rng": holdfast.PerRank(torch.zeros(4, dtype=torch.int64))}
    holdfast.load(rest, path + "b")
    assert rest["step"] == 2
    with pytest.raises(SaveFailed, match="are not in this save"):  # what was there would be gone
        holdfast.save({"step": 3}, path + "b")


def test_check_needs_the_same_names(world: ProcessWorld, tmp_path: Path) -> None:
    """An error in one rank's own state (raised before anything starts) reaches the others."""
    error = fails(world, str(tmp_path / "x"), {"change": {4: unpicklable}})
    assert error.rank == 4
    assert "'model.hook'" in str(error)


def unpicklable(state: State) -> None:
    state["model"]["hook"] = lambda: None
