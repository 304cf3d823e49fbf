"""Cases that once went wrong, each with real processes; named after what a user would see."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.errors import CorruptCheckpoint, NotCommitted, RankFailed, Replaced
from tests.support.processes import ProcessWorld

FAST = holdfast.Job(timeout=20.0, stall_timeout=3.0)


def test_a_part_of_a_mesh_saves(world: ProcessWorld, tmp_path: Path) -> None:
    """One data-parallel replica saves, which is ordinary: ranks that do not take part write nothing."""
    assert world.run(mesh_job, str(tmp_path / "step")) == [True] * 8


def mesh_job(rank: int, path: str) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "ep"))
    whole = torch.arange(44.0).view(11, 4)
    state = {
        "both": distribute_tensor(whole, mesh, [Replicate(), Shard(0)]),
        "sub": distribute_tensor(whole + 1, mesh["ep"], [Shard(0)]),
        "mine": holdfast.PerRank(distribute_tensor(whole, mesh, [Replicate(), Replicate()])),
    }
    want = {name: state[name].full_tensor() for name in ("both", "sub")}
    for ranks in ([0, 1, 2, 3], [4, 5, 6, 7], list(range(8))):
        place = f"{path}-{ranks[0]}-{len(ranks)}"
        if rank in ranks:
            holdfast.save(state, place, job=replace(FAST, participants=ranks))
            for name in want:
                state[name].to_local().zero_()
            holdfast.load(state, place, job=replace(FAST, participants=ranks))
        torch.distributed.barrier()
        for name in want:
            assert torch.equal(state[name].full_tensor(), want[name]), (name, ranks)
    return True


def test_one_missed_restore_breaks_no_later_one(world: ProcessWorld, tmp_path: Path) -> None:
    found = world.run(restore_job, str(tmp_path), timeout=60)
    assert found[3] == [None, 1, 2, 3]
    assert all(steps == ["RankFailed 3", 1, 2, 3] for rank, steps in enumerate(found) if rank != 3)


def restore_job(rank: int, run: str) -> list[Any]:
    ckpt = holdfast.Checkpoints(run, asynchronous=False, job=holdfast.Job(timeout=20.0, stall_timeout=1.5))
    ckpt.save(0, {"w": torch.zeros(3)})
    found: list[Any] = []
    try:
        found.append(None if rank == 3 else ckpt.restore({"w": torch.ones(3)}))
    except RankFailed as error:
        found.append(f"RankFailed {error.rank}")
    torch.distributed.barrier()
    for step in (1, 2, 3):
        state = {"w": torch.full((3,), float(step))}
        ckpt.save(step, state)
        found.append(ckpt.restore(state))
    return found


def test_a_missing_data_file_is_damage(world: ProcessWorld, tmp_path: Path) -> None:
    world.run(steps_job, str(tmp_path), 2)
    os.unlink(next((tmp_path / "step-00000002" / "data").glob("*-r00003*")))
    assert world.run(newest_job, str(tmp_path)) == [1] * 8


def steps_job(rank: int, run: str, count: int) -> None:
    ckpt = holdfast.Checkpoints(run, asynchronous=False, job=FAST)
    for step in range(1, count + 1):
        ckpt.save(step, {f"w{rank}": torch.full((300,), float(step))})


def newest_job(rank: int, run: str) -> int | None:
    state = {f"w{rank}": torch.zeros(300)}
    found = holdfast.Checkpoints(run, asynchronous=False, job=FAST).restore(state)
    assert state[f"w{rank}"].tolist() == [float(found or 0)] * 300
    return found


def test_retention_with_a_group_that_lacks_rank_0(world: ProcessWorld, tmp_path: Path) -> None:
    world.run(group_job, str(tmp_path))
    assert holdfast.Checkpoints(tmp_path).steps() == [3, 4]


def group_job(rank: int, run: str) -> None:
    group = torch.distributed.new_group([2, 3, 5])
    if rank in (2, 3, 5):
        ckpt = holdfast.Checkpoints(run, asynchronous=False, keep=2, job=replace(FAST, participants=group))
        for step in range(5):
            ckpt.save(step, {"w": torch.full((3,), float(step))})


def test_a_load_goes_on_while_the_checkpoint_is_replaced(tmp_path: Path) -> None:
    place, stop, wrong = tmp_path / "step", threading.Event(), []
    options = holdfast.Options(max_file_bytes=4096)

    def state(step: int) -> dict[str, Any]:
        return {f"w{at}": torch.full((1000,), float(step)) for at in range(30)} | {"step": step}

    holdfast.save(state(0), place, job=holdfast.Job(options=options))

    def overwrite() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            holdfast.save(state(step), place, job=holdfast.Job(options=options))

    writer = threading.Thread(target=overwrite)
    writer.start()
    try:
        for _ in range(60):
            back = state(-1)
            holdfast.load(back, place)
            values = {v for name, value in back.items() if name != "step" for v in value.unique().tolist()}
            if values != {float(back["step"])}:
                wrong.append(values)
    finally:
        stop.set()
        writer.join(30)
    assert not wrong


def test_restores_go_on_while_steps_are_retired(tmp_path: Path) -> None:
    stop = threading.Event()
    ckpt = holdfast.Checkpoints(tmp_path, asynchronous=False, keep=1)
    ckpt.save(0, {"w": torch.zeros(1000)})

    def train() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            ckpt.save(step, {"w": torch.full((1000,), float(step))})

    writer = threading.Thread(target=train)
    writer.start()
    try:
        for _ in range(60):
            state = {"w": torch.zeros(1000)}
            found = holdfast.Checkpoints(tmp_path).restore(state)
            assert found is not None
            assert state["w"].unique().tolist() == [float(found)]
    finally:
        stop.set()
        writer.join(30)


def test_an_optimizer_without_state_is_not_passed_over(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    holdfast.save({"o": optimizer}, tmp_path / "s")
    for strict in (True, False):
        fresh = torch.optim.AdamW(model.parameters())
        holdfast.load({"o": fresh}, tmp_path / "s", strict=strict)
        for parameter in model.parameters():
            assert torch.equal(fresh.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])
            assert fresh.state[parameter]["step"] == 1


def test_equal_namespaces_are_equal(world: ProcessWorld, tmp_path: Path) -> None:
    world.run(namespace_job, str(tmp_path / "s"))


def namespace_job(rank: int, path: str) -> None:
    import argparse

    text = "a" * 20
    other = "".join(["a"] * 20) if rank == 3 else text  # equal, and another object: pickles tell them apart
    holdfast.save({"args": argparse.Namespace(x=text, y=other)}, path, job=FAST)


def test_kinds_of_loss_are_told_apart() -> None:
    assert not issubclass(Replaced, CorruptCheckpoint)
    assert not issubclass(NotCommitted, CorruptCheckpoint)
