"""What `publish` says of a file is so, whatever the system's calls have answered."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast._core.store import filesystem
from holdfast._core.store.base import VERSION_BYTES, Unsettled
from holdfast._core.store.local import LocalStore
from holdfast._core.store.publishing import publish
from holdfast.errors import Conflict, StorageError, from_message
from holdfast.testing.store_actions import content, put

OLD, NEW, OTHER = b"1" * 50, b"2" * 60, b"3" * 70
Call = Callable[..., Any]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """A store that does not wait long for what fails."""
    monkeypatch.setattr(filesystem, "PATIENCE", 0.05)
    return LocalStore(tmp_path)


def fail(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def loses_the_answer(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """The call does what it is for, and then says that it failed."""
    real: Call = getattr(os, name)

    def call(*args: Any, **named: Any) -> Any:
        real(*args, **named)
        raise fail(number)

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("number", [errno.EEXIST, errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_link_whose_answer_was_lost_is_a_success(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    loses_the_answer(monkeypatch, "link", number)
    store.publish("index", NEW, None)
    assert content(store, "index") == NEW
    assert store.list() == ["index"]


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_rename_whose_answer_was_lost_is_a_success(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store.publish("index", OLD, None)
    loses_the_answer(monkeypatch, "rename", number)
    store.publish("index", NEW, OLD[-VERSION_BYTES:])
    assert content(store, "index") == NEW
    assert store.list() == ["index"]


def test_another_version_that_was_there_first_stays_a_conflict(store: LocalStore) -> None:
    """The same bytes, too: what counts is whose file it is."""
    store.publish("index", NEW, None)
    for data in (OTHER, NEW):
        with pytest.raises(Conflict):
            store.publish("index", data, None)
    assert content(store, "index") == NEW
    assert store.list() == ["index"]


@pytest.mark.parametrize(("name", "replacing"), [("link", None), ("rename", OLD[-VERSION_BYTES:])])
def test_what_failed_for_sure_can_not_take_effect_later(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, name: str, replacing: bytes | None
) -> None:
    """A server that was given up may still do what it was asked: what it would need is gone by then."""
    if replacing is not None:
        store.publish("index", OLD, None)
    real, asked = getattr(os, name), []

    def times_out(source: str, target: str) -> None:
        asked.append((source, target))
        raise fail(errno.ETIMEDOUT)

    monkeypatch.setattr(os, name, times_out)
    with pytest.raises(StorageError, match="Connection timed out") as caught:
        store.publish("index", NEW, replacing)
    assert not isinstance(caught.value, Unsettled)
    with pytest.raises(FileNotFoundError):
        real(*asked[0])
    assert store.list() == (["index"] if replacing else [])


@pytest.mark.parametrize(("name", "replacing"), [("link", None), ("rename", OLD[-VERSION_BYTES:])])
def test_storage_that_answers_nothing_more_leaves_it_open(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, name: str, replacing: bytes | None
) -> None:
    if replacing is not None:
        store.publish("index", OLD, None)

    def gone(*args: Any, **named: Any) -> Any:
        raise fail(errno.EIO)

    def last(source: str, target: str) -> None:
        for call in ("open", "stat", "fstat", "unlink"):
            patch.setattr(os, call, gone)
        raise fail(errno.EIO)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, last)
        with pytest.raises(Unsettled, match="can't be told: Input/output error") as caught:
            store.publish("index", NEW, replacing)
    assert not caught.value.in_place
    assert caught.value.errno == errno.EIO


def test_an_unsettled_end_is_known_on_every_rank(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It travels between ranks as JSON, and stays what it is."""
    real, synced = os.fsync, []

    def fsync(fd: int) -> None:
        synced.append(fd)
        if len(synced) > 1:  # the file is synced, its folder is not
            raise fail(errno.EIO)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(
        Unsettled, match="is in place, but syncing its folder failed: Input/output error"
    ) as caught:
        store.publish("index", NEW, None)
    assert len(synced) == 2  # what failed is not synced again
    heard = from_message(caught.value.to_message())
    assert isinstance(heard, Unsettled)
    assert (caught.value.in_place, heard.in_place) == (True, True)
    assert content(store, "index") == NEW


def test_a_moment_without_descriptors_fails_nothing_that_is_in_place(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_link = os.link

    def none_left(*args: Any, **named: Any) -> int:
        raise fail(errno.EMFILE)

    def link(source: str, target: str) -> None:
        real_link(source, target)
        monkeypatch.setattr(os, "open", none_left)

    monkeypatch.setattr(os, "link", link)
    store.publish("index", NEW, None)
    monkeypatch.undo()
    assert content(store, "index") == NEW


def test_a_hidden_file_that_can_not_be_removed_fails_nothing(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlink(*args: Any, **named: Any) -> None:
        raise fail(errno.EIO)

    monkeypatch.setattr(os, "unlink", unlink)
    store.publish("index", NEW, None)
    assert content(store, "index") == NEW
    assert len(store.list()) == 2  # `prune` sweeps the other


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_can_not_sync_folders_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    import torch

    real = os.fsync

    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise fail(number)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(filesystem, "_warned", set())
    state = {"w": torch.arange(5.0)}
    with caplog.at_level(logging.WARNING, "holdfast"):
        for step in (1, 2):
            holdfast.save(state, tmp_path / f"step-{step}", job=holdfast.Job(no_dist=True))
    told = [record.getMessage() for record in caplog.records if "can't sync a folder" in record.getMessage()]
    assert len(told) == 1
    assert os.strerror(number) in told[0]
    back = {"w": torch.zeros(5)}
    holdfast.load(back, tmp_path / "step-2", job=holdfast.Job(no_dist=True))
    assert torch.equal(back["w"], state["w"])


def test_the_version_to_replace_is_locked_through_a_descriptor_that_may_write(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that is held alone needs one."""
    store.publish("index", OLD, None)
    real, modes = fcntl.fcntl, []

    def set_lock(fd: int, how: int, what: bytes) -> None:
        modes.append(real(fd, fcntl.F_GETFL) & os.O_ACCMODE)
        real(fd, how, what)

    monkeypatch.setattr(fcntl, "fcntl", set_lock)
    store.publish("index", NEW, OLD[-VERSION_BYTES:])
    real_open = os.open

    def read_only(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if os.fspath(path).endswith("index") and flags & os.O_RDWR:
            raise fail(errno.EACCES)
        return real_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", read_only)
    store.publish("index", OTHER, NEW[-VERSION_BYTES:])
    assert modes == [os.O_RDWR, os.O_RDONLY]
    assert content(store, "index") == OTHER


def test_a_version_that_comes_in_pieces_is_no_other_one(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read may return less than it was asked for, and is not the end of the file."""
    store.publish("index", OLD, None)
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, length, start: real(fd, min(length, 5), start))
    store.publish("index", NEW, OLD[-VERSION_BYTES:])
    assert content(store, "index") == NEW


def test_a_stale_handle_is_opened_again(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "PATIENCE", 1.0)  # enough for four tries on a loaded machine
    put(store, "data/a", b"abc")
    real, stale = os.open, [3]

    def opens(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if os.fspath(path).endswith("data/a") and stale[0]:
            stale[0] -= 1
            raise fail(errno.ESTALE)
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(filesystem, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(os, "open", opens)
    assert content(store, "data/a") == b"abc"
    stale[0] = 1 << 30
    with pytest.raises(StorageError, match=r"Opening .*data/a failed: Stale file handle"):
        store.open("data/a")


def test_a_parent_that_may_not_be_listed_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's folder of mode 711, with one of ours in it."""
    (tmp_path / "mine").mkdir()
    real = os.open

    def opened(path: Any, *args: Any, **named: Any) -> int:
        if os.fspath(path) == str(tmp_path):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **named)

    monkeypatch.setattr(os, "open", opened)
    publish(str(tmp_path / "mine" / "index"), b"x" * 32, None)
    assert LocalStore(tmp_path / "mine").list() == ["index"]
