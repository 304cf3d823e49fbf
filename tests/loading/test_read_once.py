"""Ranks of one host that need the same bytes read them from storage once: the kernel's page cache is the
memory that they share (docs/decisions/0029)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import holdfast
from tests.support.processes import ProcessWorld

RANKS, TENSORS, ROWS = 4, 24, 1 << 20


def _drop(path: str) -> None:
    """Take a checkpoint's files out of the page cache."""
    for file in (one for one in Path(path).rglob("*") if one.is_file()):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _read_from_storage() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def _load(rank: int, path: str, replicated: bool) -> tuple[int, int]:
    """Return the bytes that this rank needs, and those that it had read from storage."""
    rows = ROWS if replicated else ROWS // RANKS
    state = {f"w{number}": torch.zeros(rows) for number in range(TENSORS)}
    part = (
        state
        if replicated
        else {name: holdfast.Shard(one, (ROWS,), (rank * rows,)) for name, one in state.items()}
    )
    before = _read_from_storage()
    report = holdfast.load(part, path)
    assert all(bool((one == float(name[1:])).all()) for name, one in state.items())
    return report.bytes_needed, _read_from_storage() - before


@pytest.mark.parametrize("replicated", [True, False])
def test_cold_bytes_are_read_once_a_host(tmp_path: Path, replicated: bool) -> None:
    path = str(tmp_path / "step-1")
    job = holdfast.Job(no_dist=True)
    holdfast.save(
        {f"w{number}": torch.full((ROWS,), float(number)) for number in range(TENSORS)}, path, job=job
    )
    unique = TENSORS * ROWS * 4
    with ProcessWorld(RANKS) as world:
        world.run(_warm)
        _drop(path)
        found = world.run(_load, path, replicated)
    if not any(read for _, read in found):
        pytest.skip("these files lie in memory")
    assert sum(needed for needed, _ in found) == unique * (RANKS if replicated else 1)
    assert sum(read for _, read in found) <= 1.05 * unique


def _warm(rank: int) -> None:
    """Import what a load needs, which is read from storage, too."""
    assert holdfast.load
