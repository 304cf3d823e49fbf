"""What the ranks of the tests of unchanged bytes do; importable by spawned processes."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast

ROWS, COLUMNS = 64, 4096
"""Of each tensor: 1 MiB."""
JOB = holdfast.Job(timeout=40, options=holdfast.Options(link_unchanged=True))


def tensor(name: str, version: int) -> torch.Tensor:
    """A pure function of the name and the version."""
    seed = sum((at + 1) * byte for at, byte in enumerate(name.encode())) * 1000 + version
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def state_of(rank: int, world: int, versions: list[int]) -> dict[str, Any]:
    """Tensors cut over the ranks, one that all ranks hold, and objects; of a version each."""
    mine = ROWS // world
    state: dict[str, Any] = {}
    for number, version in enumerate(versions):
        part = tensor(f"w{number}", version)[rank * mine : (rank + 1) * mine].clone()
        state[f"w{number}"] = holdfast.Shard(part, (ROWS, COLUMNS), (rank * mine, 0))
    state["dense"] = tensor("dense", versions[-1])
    state["versions"] = list(versions)
    return state


def save(rank: int, folder: str, step: int, versions: list[int], background: bool, world: int = 4) -> int:
    """Save a step; returns the bytes that this rank has written."""
    state = state_of(rank, world, versions)
    if background:
        return (
            holdfast.async_save(state, f"{folder}/step-{step:08d}", step=step, job=JOB)
            .committed(40)
            .bytes_written
        )
    return holdfast.save(state, f"{folder}/step-{step:08d}", step=step, job=JOB).bytes_written


def load(rank: int, folder: str, versions: list[int], world: int, ranks: list[int]) -> None:
    """Load into other values, and compare every byte."""
    state = state_of(rank, world, [-1] * len(versions))
    holdfast.load(state, folder, job=replace(JOB, participants=ranks))
    want = state_of(rank, world, versions)
    for name, value in want.items():
        have = state[name]
        if isinstance(value, holdfast.Shard):
            value, have = value.tensor, have.tensor
        assert torch.equal(have, value) if isinstance(value, torch.Tensor) else have == value, name


def save_and_die(rank: int, folder: str, step: int, versions: list[int], victim: int) -> None:
    """One rank is killed once it has linked what is unchanged."""
    real = os.fsync

    def killing(fd: int) -> None:
        if rank == victim and any(
            f"-r{victim:05d}-" in name for name in os.listdir(f"{folder}/step-{step:08d}/data")
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        real(fd)

    os.fsync = killing
    try:
        save(rank, folder, step, versions, background=False)
    finally:
        os.fsync = real


def save_uneven(rank: int, folder: str, step: int, change: int) -> int:
    """Save DTensors of which the ranks have parts of unequal length, so that the commit checks where these begin."""
    mesh = init_device_mesh("cpu", (4,))
    state = {
        name: distribute_tensor(torch.arange(90_000.0 * 10).reshape(10, -1) + add, mesh, [Shard(0)])
        for name, add in (("base", 0), ("more", 1), ("adapter", change))
    }
    return holdfast.save(state, f"{folder}/step-{step:08d}", step=step, job=JOB).bytes_written
