"""What follows when the index could not be published for certain: nobody deletes what it may name."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast._core.base.deadline import Deadline
from holdfast._core.format.index import Index
from holdfast._core.protocol.call import begin_call
from holdfast._core.roster.memory import MemoryRoster
from holdfast._core.saving import commit
from holdfast._core.saving.commit import Commit
from holdfast._core.saving.job import SaveJob
from holdfast._core.saving.request import SaveRequest
from holdfast._core.state.flatten import flatten
from holdfast._core.store import filesystem
from holdfast._core.store.local import LocalStore
from holdfast.errors import (
    CommitUnconfirmed,
    Conflict,
    CorruptCheckpoint,
    DeadlineExceeded,
    HoldfastError,
    SaveFailed,
)
from holdfast.testing import ManualClock, MemoryStore
from tests.protocol.test_protocol import ranks
from tests.store.faults import FOREVER, Faults
from tests.system.jobs import interruptible

Publish = Callable[[LocalStore, str, bytes, bytes | None], None]
real_publish: Publish = LocalStore.publish


def state(rank: int, value: float) -> dict[str, Any]:
    return {f"own{rank}": torch.full((3,), value), "value": value}


def files(place: Path) -> set[str]:
    return {path.name for path in place.rglob("*.safetensors")}


def save_on_three(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    publish: Publish,
    mend: Callable[[], None] = lambda: None,
) -> tuple[list[Any], set[str], set[str]]:
    """Overwrite a checkpoint from three ranks with such a `publish`: what they raised, and files before and
    after."""
    monkeypatch.setattr(commit, "LOOK_AGAIN", 0.05)
    monkeypatch.setattr(filesystem, "PATIENCE", 0.05)

    def save(value: float) -> Callable[[MemoryRoster], Any]:
        return lambda roster: holdfast.save(
            state(roster.rank, value), place, job=holdfast.Job(roster=roster, timeout=30, stall_timeout=20)
        )

    first = ranks(3, save(1.0))
    assert not any(isinstance(end, BaseException) for end in first), first
    before = files(place)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "publish", publish)
        ends = ranks(3, save(2.0))
    mend()
    return ends, before, files(place)


def loaded(place: Path) -> float:
    back = state(1, 0.0)
    holdfast.load(back, place, job=holdfast.Job(no_dist=True))
    assert back["own1"].tolist() == [back["value"]] * 3
    return float(back["value"])


@pytest.mark.parametrize("raised", [MemoryError, ZeroDivisionError, KeyboardInterrupt, OSError])
def test_whatever_interrupts_a_publish_that_took_effect_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: type[BaseException]
) -> None:
    def publish(self: LocalStore, path: str, data: bytes, replacing: bytes | None) -> None:
        real_publish(self, path, data, replacing)
        raise raised("right after")

    ends, before, after = save_on_three(tmp_path / "step", monkeypatch, publish)
    assert len({str(end) for end in ends}) == 1
    for end in ends:
        assert isinstance(end, CommitUnconfirmed)
        assert "the index is in place, but storage could not confirm that it is durable" in str(end)
        assert f"{raised.__name__}: right after" in str(end)
    assert len(after) == 7  # an index, the old files and the new
    assert before < after
    assert loaded(tmp_path / "step") == 2.0


@pytest.mark.parametrize("raised", [MemoryError, ZeroDivisionError])
def test_whatever_comes_before_a_publish_is_an_ordinary_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: type[BaseException]
) -> None:
    def publish(self: LocalStore, path: str, data: bytes, replacing: bytes | None) -> None:
        raise raised("before")

    ends, before, after = save_on_three(tmp_path / "step", monkeypatch, publish)
    assert len({str(end) for end in ends}) == 1
    for end in ends:
        assert isinstance(end, HoldfastError)
        assert not isinstance(end, CommitUnconfirmed)
    assert after == before
    assert loaded(tmp_path / "step") == 1.0


def test_a_commit_that_nobody_can_look_at_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call on the folder fails from the moment on at which the index was renamed."""

    faults = Faults(monkeypatch, tmp_path)
    real = os.rename

    def rename(source: str, target: str) -> None:
        real(source, target)
        faults.arm(errno.EIO, 1, FOREVER)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "rename", rename)
    ends, before, after = save_on_three(tmp_path / "step", monkeypatch, real_publish, faults.disarm)
    assert len({str(end) for end in ends}) == 1
    for end in ends:
        assert isinstance(end, CommitUnconfirmed)
        assert "storage did not tell whether the index was put in place" in str(end)
        assert "Nothing was deleted" in str(end)
    assert before < after
    assert loaded(tmp_path / "step") == 2.0


def test_a_store_that_takes_its_own_index_for_anothers_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that gives no stable inodes, and loses an answer: the index itself says whose it is."""

    def publish(self: LocalStore, path: str, data: bytes, replacing: bytes | None) -> None:
        real_publish(self, path, data, replacing)
        raise Conflict("another was there first")

    ends, before, after = save_on_three(tmp_path / "step", monkeypatch, publish)
    assert all(isinstance(end, CommitUnconfirmed) for end in ends)
    assert before < after
    assert loaded(tmp_path / "step") == 2.0


class Delayed(MemoryStore):
    """Does not show data files before they are told to."""

    hidden = True

    def open(self, path: str) -> Any:
        if self.hidden and path.startswith("data/"):
            return super().open(path + " is not shown yet")
        return super().open(path)


def waiting_commit(
    store: MemoryStore, tick: Callable[[Commit], None], monkeypatch: pytest.MonkeyPatch
) -> Commit:
    """A commit of a real save's files, by a clock that only waiting moves; the committer finds that no file
    is shown."""
    reports: list[dict[int, Any]] = []
    real = Commit.prepare

    def prepare(self: Commit, written: dict[int, Any]) -> None:
        reports.append(written)
        real(self, written)

    with monkeypatch.context() as patch:
        patch.setattr(Commit, "prepare", prepare)
        call = begin_call(holdfast.Job(roster=MemoryRoster(), timeout=60, stall_timeout=60))
        SaveJob(
            SaveRequest(store=store, collect=lambda rank: flatten({"w": torch.ones(4)}, rank), call=call)
        ).run()
    slow = Delayed()
    slow.files = store.files
    made = Commit(
        slow, "save", Deadline(1000.0, ManualClock()), {}, None, None, "", lambda name: [], lambda: tick(made)
    )
    (file,) = reports[0][0].files
    made.about |= {"step": None, "attempt": file.name.removeprefix("data/").partition("-")[0]}
    real(made, reports[0])
    return made


def test_a_file_is_waited_for_longer_than_nfs_caches_a_folder_and_not_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others would take a committer without progress for a stuck one: it ticks every second."""
    ticks: list[float] = []

    def tick(made: Commit) -> None:
        ticks.append(made.deadline.clock.now())
        made.store.hidden = ticks[-1] < 60.0  # type: ignore[attr-defined]

    made = waiting_commit(MemoryStore(), tick, monkeypatch)
    assert made.file_names
    assert made.deadline.clock.now() >= 60.0
    assert max(after - before for before, after in pairwise(ticks)) < 1.2


def test_a_file_that_never_shows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        SaveFailed, match=r"rank 0 wrote data/.*-r00000.safetensors, but it is not to be seen"
    ):
        waiting_commit(MemoryStore(), lambda made: None, monkeypatch)


# -- files are read back together -----------------------------------------------------------------


class Counted(MemoryStore):
    """Counts opens and reads of data files, each of which takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.opened: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self.threads: set[int] = set()
        self.together = threading.Barrier(5)

    def open(self, path: str) -> Any:
        reader = super().open(path)
        if not path.startswith("data/"):
            return reader
        self.opened[path] += 1
        self.threads.add(threading.get_ident())
        if self.seconds and len(self.opened) > self.opened[path] == 1:
            self.together.wait(60)  # all after the first are under way at once
        time.sleep(self.seconds)
        real = reader.read

        def read(start: int, length: int) -> bytes:
            self.reads[path] += 1
            return real(start, length)

        reader.read = read  # type: ignore[method-assign]
        return reader


@pytest.mark.parametrize(("seconds", "threads"), [(0.0, 1), (0.1, 5)])
def test_files_are_read_back_in_one_piece_each_and_together_where_storage_is_slow(
    seconds: float, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not seconds:
        monkeypatch.setattr(commit, "AT_ONCE", 1.0)  # a busy machine is no slow storage
    store = Counted(seconds)
    options = holdfast.Options(max_file_bytes=1)
    tensors = {f"w{number}": torch.full((4,), float(number)) for number in range(6)}
    holdfast.save(tensors, store, job=holdfast.Job(no_dist=True, options=options))
    assert len(store.opened) == 6
    assert set(store.opened.values()) == set(store.reads.values()) == {1}
    assert len(store.threads) == threads
    back = {name: torch.zeros(4) for name in tensors}
    holdfast.load(back, store, job=holdfast.Job(no_dist=True))
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_the_committers_own_index_is_known_as_it_would_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are compared with those in storage, and not taken apart again."""
    compared = []
    real = Commit.prepare

    def prepare(self: Commit, written: dict[int, Any]) -> None:
        for name, (sealed, columns) in self.own.items():
            read = Index(lambda start, length, held=sealed: held[start : start + length], len(sealed), name)  # type: ignore[misc]
            assert not len(columns.late_tensor)
            for field in fields(columns):
                if "late" in field.name:  # a file without any leaves these columns out
                    continue
                mine, theirs = getattr(columns, field.name), getattr(read.embedded(), field.name)
                assert np.array_equal(mine, theirs), field.name
            compared.append(name)
        real(self, written)

    monkeypatch.setattr(Commit, "prepare", prepare)
    weight = torch.ones(3, 4)
    tensors = {"w": weight, "tied": weight, "empty": torch.ones(0, 2), "scalar": torch.tensor(1.0), "n": 7}
    options = holdfast.Options(max_file_bytes=20, fingerprint=True)
    holdfast.save(tensors, MemoryStore(), job=holdfast.Job(no_dist=True, options=options))
    assert len(compared) == 2


def test_an_index_that_storage_has_changed_is_found_in_the_commit() -> None:
    class Flips(MemoryStore):
        """Storage that changes the last byte of each data file."""

        def open(self, path: str) -> Any:
            reader = super().open(path)
            if path.startswith("data/"):
                real, size = reader.read, reader.size

                def read(start: int, length: int) -> bytes:
                    data = bytearray(real(start, length))
                    data[size - 1 - start] ^= 1
                    return bytes(data)

                reader.read = read  # type: ignore[method-assign]
            return reader

    with pytest.raises(CorruptCheckpoint, match="embedded index"):
        holdfast.save({"w": torch.ones(4)}, Flips(), job=holdfast.Job(no_dist=True))


def test_a_save_after_ctrl_c_waits_for_what_storage_still_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage puts the first index in place only after the interrupted call has returned."""
    entered, goes_on = threading.Event(), threading.Event()
    before = signal.getsignal(signal.SIGINT)
    reached = interruptible()

    def slow(self: LocalStore, name: str, data: bytes, replacing: bytes | None) -> None:
        if not entered.is_set():
            entered.set()
            os.kill(os.getpid(), signal.SIGINT)
            assert reached.wait(30)
            assert goes_on.wait(60)
        real_publish(self, name, data, replacing)

    monkeypatch.setattr(LocalStore, "publish", slow)
    job = holdfast.Job(no_dist=True, timeout=60)
    try:
        with pytest.raises(KeyboardInterrupt):
            holdfast.save({"value": 1}, tmp_path / "it", job=job)
        assert not (tmp_path / "it" / "index.safetensors").exists()
        with pytest.raises(DeadlineExceeded, match="an earlier save of this process, which was interrupted"):
            holdfast.save({"value": 2}, tmp_path / "it", job=holdfast.Job(no_dist=True, timeout=0.5))
        threading.Timer(0.5, goes_on.set).start()
        holdfast.save({"value": 3}, tmp_path / "it", job=job)
    finally:
        goes_on.set()
        signal.signal(signal.SIGINT, before)
    assert holdfast.load(tmp_path / "it") == {"value": 3}
