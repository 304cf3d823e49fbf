"""A save that failed leaves no folder behind that it has made, and takes none that was there."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast._core.roster.memory import MemoryRoster
from holdfast.errors import HoldfastError, ReplicaMismatch, StorageError
from tests.protocol.test_protocol import ranks
from tests.store.faults import FOREVER, Faults

Full = Callable[[], None]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Full:
    """Calling it fills the disk below the test's folder."""
    faults = Faults(monkeypatch, tmp_path)
    return lambda: faults.arm(errno.ENOSPC, 1, FOREVER, only=("pwritev",))


def let_sweeps_end() -> None:
    for thread in threading.enumerate():
        if thread.name == "holdfast-sweep":
            thread.join(60)


def save(place: Path, rank: int = 0, roster: MemoryRoster | None = None, **how: Any) -> object:
    state = {f"own{rank}": torch.full((3,), float(rank)), "step": 1}
    return holdfast.save(state, place, job=holdfast.Job(roster=roster or MemoryRoster(), timeout=30), **how)


def test_saves_that_fail_leave_no_empty_folders(tmp_path: Path, full: Full) -> None:
    full()
    with holdfast.Checkpoints(tmp_path / "run", asynchronous=False, job=holdfast.Job(no_dist=True)) as run:
        for step in range(100):
            with pytest.raises(StorageError, match="No space left"):
                run.save(step, {"w": torch.zeros(3)})
    assert os.listdir(tmp_path / "run") == []


def test_an_asynchronous_save_that_fails_leaves_no_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are made by another process, so the index is what can't be written here."""
    faults = Faults(monkeypatch, tmp_path)
    faults.arm(errno.ENOSPC, 1, FOREVER, only=("write",))
    with pytest.raises(StorageError, match="No space left"):
        holdfast.async_save(
            {"w": torch.zeros(3)}, tmp_path / "run" / "step", job=holdfast.Job(no_dist=True)
        ).committed(60)
    let_sweeps_end()
    assert os.listdir(tmp_path / "run") == []


def test_several_ranks_leave_no_empty_folder(tmp_path: Path, full: Full) -> None:
    full()
    for end in ranks(4, lambda roster: save(tmp_path / "run" / "step", roster.rank, roster)):
        assert isinstance(end, StorageError)
    let_sweeps_end()
    assert os.listdir(tmp_path / "run") == []


def test_ranks_that_had_written_leave_no_empty_folder(tmp_path: Path) -> None:
    """The commit fails, when all data files are there; each rank deletes its own."""

    def job(roster: MemoryRoster) -> object:
        state = {f"own{roster.rank}": torch.zeros(3), "w": torch.full((3,), float(roster.rank))}
        return holdfast.save(state, tmp_path / "run" / "step", job=holdfast.Job(roster=roster, timeout=30))

    for end in ranks(4, job):
        assert isinstance(end, ReplicaMismatch)
    let_sweeps_end()
    assert os.listdir(tmp_path / "run") == []


def test_a_folder_that_was_there_stays(tmp_path: Path, full: Full) -> None:
    mine, notes = tmp_path / "mine", tmp_path / "with-notes"
    mine.mkdir()
    notes.mkdir()
    (notes / "notes.txt").write_text("mine")
    full()
    for place in (mine, notes):
        with pytest.raises(StorageError):
            save(place)
    let_sweeps_end()
    assert os.listdir(mine) == []
    assert os.listdir(notes) == ["notes.txt"]


def test_what_is_to_be_kept_for_a_post_mortem_stays(tmp_path: Path) -> None:
    def job(roster: MemoryRoster) -> object:
        state = {"w": torch.full((3,), float(roster.rank))}
        options = holdfast.Options(keep_failed=True)
        return holdfast.save(
            state, tmp_path / "step", job=holdfast.Job(roster=roster, timeout=30, options=options)
        )

    assert all(isinstance(end, HoldfastError) for end in ranks(2, job))
    let_sweeps_end()
    assert len(os.listdir(tmp_path / "step" / "data")) == 2


def test_a_part_that_can_not_be_begun_takes_the_parts_before_it_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's second file can't be created: its first is of no use to anybody."""
    real = os.open

    def no_more(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_CREAT and "-001." in os.fspath(path):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", no_more)
    state = {f"w{at}": torch.zeros(1000) for at in range(4)}
    with pytest.raises(StorageError, match="Too many open files"):
        holdfast.save(
            state,
            tmp_path / "step",
            job=holdfast.Job(no_dist=True, options=holdfast.Options(max_file_bytes=4096)),
        )
    let_sweeps_end()
    assert not (tmp_path / "step").exists()
