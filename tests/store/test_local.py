"""Files: the order of syncing, failures of the system, and links that lead outside."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast._core.store import filesystem
from holdfast._core.store.base import VERSION_BYTES, NotFound, Store, storage_errors
from holdfast._core.store.filesystem import lock
from holdfast._core.store.local import WRITEBACK, LocalStore, open_store
from holdfast.errors import BadInput, Conflict, StorageError
from holdfast.testing.store_actions import content, put

Call = tuple[str, str]


class Recorder:
    """Names and order of the system calls that durability is made of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.calls: list[Call] = []
        self.fail: dict[Call, int] = {}
        self.paths: dict[int, str] = {}
        self._root = str(root)
        for name in ("open", "fsync", "link", "rename", "mkdir", "pwritev", "write", "close"):
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _short(self, path: Any) -> str:
        text = os.path.relpath(os.fspath(path), self._root)
        return text.partition(".publishing-")[0] + ".publishing" if ".publishing-" in text else text

    def _wrap(self, name: str, original: Any) -> Any:
        def call(first: Any, *rest: Any, **named: Any) -> Any:
            what = self.paths.get(first, "?") if isinstance(first, int) else self._short(first)
            if name in ("link", "rename"):
                what = self._short(rest[0])
            if name != "open" and not (name == "close" and what == "?"):
                self.calls.append((name, what))
            if (name, what) in self.fail:
                raise OSError(self.fail[name, what], "told to fail")
            found = original(first, *rest, **named)
            if name == "open":
                self.paths[found] = what
            if name == "close":
                self.paths.pop(first, None)
            return found

        return call

    def at(self, name: str, what: str) -> int:
        return self.calls.index((name, what))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recorder:
    return Recorder(monkeypatch, tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run")


def test_a_file_is_synced_before_its_folder(recorder: Recorder, store: LocalStore) -> None:
    put(store, "data/a", b"abc")
    recorded = recorder.calls
    assert recorder.at("pwritev", "run/data/a") < recorder.at("fsync", "run/data/a")
    last = [call for call in recorded if call[0] == "fsync"]
    assert last[-2:] == [("fsync", "run/data/a"), ("fsync", "run/data")]


def test_every_folder_made_on_the_way_has_a_durable_name(recorder: Recorder, store: LocalStore) -> None:
    put(store, "data/a", b"abc")
    for made, parent in (("run", "."), ("run/data", "run")):
        at = recorder.at("mkdir", made)
        assert ("fsync", parent) in recorder.calls[at:]


def test_folders_are_made_however_long_storage_takes_to_say_that_there_are_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(filesystem, "VANISHING", 0.0)
    store = LocalStore(tmp_path / "new" / "step")
    put(store, "data/x", b"one")
    assert content(store, "data/x") == b"one"


@pytest.mark.parametrize("replace", [False, True])
def test_an_index_is_named_only_after_its_bytes_are_durable(
    recorder: Recorder, store: LocalStore, replace: bool
) -> None:
    first, second = b"1" * 50, b"2" * 50
    store.publish("step/index", first, None)
    if replace:
        recorder.calls.clear()
        store.publish("step/index", second, first[-VERSION_BYTES:])
    named = recorder.at("rename" if replace else "link", "run/step/index")
    assert recorder.at("write", "run/step/.publishing") < recorder.at("fsync", "run/step/.publishing") < named
    after = recorder.calls[named:]
    assert ("fsync", "run/step") in after
    assert ("fsync", "run") in after
    assert ("write", "run/step/.publishing") not in after
    assert ("link", "run/step/index") in recorder.calls or replace


def test_data_is_durable_before_the_index_that_names_it(recorder: Recorder, tmp_path: Path) -> None:
    """The whole save: every data file and its folder are synced before the index is linked."""
    import torch

    import holdfast

    for split in (1 << 30, 1 << 12):
        folder = f"run-{split}"
        recorder.calls.clear()
        state = {f"w{at}": torch.arange(1000) for at in range(4)}
        holdfast.save(
            state, tmp_path / folder, job=holdfast.Job(options=holdfast.Options(max_file_bytes=split))
        )
        linked = recorder.at("link", f"{folder}/index.safetensors")
        files = {what for name, what in recorder.calls if name == "pwritev"}
        assert len(files) == (1 if split == 1 << 30 else 4)
        for file in files:
            synced = recorder.at("fsync", file)
            wrote = max(at for at, call in enumerate(recorder.calls) if call == ("pwritev", file))
            assert wrote < synced < linked
            folder_synced = [
                at for at, call in enumerate(recorder.calls) if call == ("fsync", f"{folder}/data")
            ]
            assert any(synced < at < linked for at in folder_synced)


def test_a_plain_save_asks_storage_little(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each of these calls is a round trip on a network file system."""
    import torch

    import holdfast

    folder, asked = tmp_path / "deep" / "in" / "folders" / "run", Counter[str]()
    folder.mkdir(parents=True)

    def counted(name: str, real: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            # What Python looks at to import a module is no part of a save.
            asked[name] += isinstance(given[0], int) or str(tmp_path) in str(given[0])
            return real(*given, **named)

        return call

    for name in ("stat", "lstat", "fstat", "open", "fsync", "mkdir", "pread", "readlink"):
        monkeypatch.setattr(os, name, counted(name, getattr(os, name)))
    holdfast.save({"w": torch.ones(9)}, folder / "step", job=holdfast.Job(no_dist=True))
    stats = asked["stat"] + asked["lstat"] + asked["fstat"]
    assert stats <= 6, asked  # the folder, no link on the way (twice), what is open (twice)
    # The data file and the hidden index, their folders, and those folders' own names.
    assert asked["open"] <= 10, asked
    assert asked["fsync"] <= 7, asked
    assert asked["mkdir"] <= 3, asked
    assert asked["pread"] == 1, asked
    assert not asked["readlink"], asked


def test_a_failed_fsync_abandons_the_file_and_is_never_retried(recorder: Recorder, store: LocalStore) -> None:
    recorder.fail["fsync", "run/data/a"] = errno.EIO
    writer = store.create("data/a")
    writer.write_at(0, [b"abc"])
    with pytest.raises(StorageError, match=r"Syncing .*run/data/a failed: Input/output error") as caught:
        writer.finish()
    assert caught.value.errno == errno.EIO
    writer.discard()
    assert recorder.calls.count(("fsync", "run/data/a")) == 1
    assert recorder.calls.count(("close", "run/data/a")) == 1
    assert store.list("data") == []


def test_a_failed_fsync_of_the_index_publishes_nothing(recorder: Recorder, store: LocalStore) -> None:
    recorder.fail["fsync", "run/.publishing"] = errno.EIO
    with pytest.raises(StorageError, match="Input/output error"):
        store.publish("index", b"1" * 20, None)
    assert store.list() == []
    assert recorder.calls.count(("fsync", "run/.publishing")) == 1
    assert not any(name == "link" for name, _ in recorder.calls)


def test_a_failed_fsync_fails_the_save_and_leaves_nothing(recorder: Recorder, tmp_path: Path) -> None:
    import torch

    import holdfast

    original = os.fsync
    failing: list[str] = []

    def fsync(fd: int) -> None:
        what = recorder.paths.get(fd, "?")
        if what.endswith(".safetensors"):
            failing.append(what)
            raise OSError(errno.EIO, "told to fail")
        original(fd)

    os.fsync = fsync  # undone by monkeypatch, which has its own copy
    with pytest.raises(StorageError, match="Input/output error"):
        holdfast.save({"a": torch.ones(3)}, tmp_path / "x")
    assert len(failing) == 1
    assert holdfast.latest(tmp_path) is None
    assert not list((tmp_path / "x").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "prune old steps"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "can be written to"),
        (errno.EIO, ""),
    ],
)
def test_errors_have_a_number_and_say_what_to_do(
    recorder: Recorder, store: LocalStore, number: int, words: str
) -> None:
    writer = store.create("a")
    recorder.fail["pwritev", "run/a"] = number
    with pytest.raises(StorageError, match=os.strerror(number)) as caught:
        writer.write_at(0, [b"x"])
    assert caught.value.errno == number
    assert caught.value.details == {"errno": number}
    assert words in caught.value.hint
    assert "run/a" in str(caught.value)
    writer.discard()


def dirty_pages(path: Path) -> int:
    """Return the pages of a file that the kernel has not begun to write to storage, by cachestat(2)."""
    libc, found = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint64 * 5)()
    with open(path, "rb") as file:
        if libc.syscall(451, file.fileno(), (ctypes.c_uint64 * 2)(0, 0), found, 0):
            pytest.skip(f"cachestat: {os.strerror(ctypes.get_errno())}")
    return found[1]


def test_storage_is_at_work_while_a_large_file_is_written(tmp_path: Path) -> None:
    store, part, plain = LocalStore(tmp_path), b"x" * WRITEBACK, tmp_path / "plain"
    with open(plain, "wb") as file:
        for _ in range(8):
            file.write(part)
        file.flush()
        expected = dirty_pages(plain)
        os.fsync(file.fileno())
    if dirty_pages(plain):
        pytest.skip("a file system in memory")
    writer = store.create("ours")
    for number in range(8):
        writer.write_at(number * len(part), [part])
    assert dirty_pages(tmp_path / "ours") < expected / 2
    writer.finish()
    with closing(store.open("ours")) as reader:
        assert reader.read(0, reader.size) == 8 * part


def test_short_writes_and_reads_are_carried_on(monkeypatch: pytest.MonkeyPatch, store: LocalStore) -> None:
    write, read, read_one = os.pwritev, os.preadv, os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: read_one(fd, min(size, 3), at))
    monkeypatch.setattr(
        os,
        "pwritev",
        lambda fd, bufs, at: write(fd, [memoryview(bytes(bufs[0]))[:3]] if len(bufs[0]) else bufs[1:2], at),
    )
    monkeypatch.setattr(
        os,
        "preadv",
        lambda fd, bufs, at: read(fd, [memoryview(bufs[0])[:2]] if len(bufs[0]) else bufs[1:2], at),
    )
    data = bytes(range(40))
    writer = store.create("a")
    writer.write_at(0, [data[:1], b"", data[1:17], data[17:]])
    writer.finish()
    assert content(store, "a") == data
    targets = [bytearray(5), bytearray(), bytearray(35)]
    reader = store.open("a")
    assert reader.read_into(0, targets) == 40
    assert b"".join(targets) == data
    reader.close()
    store.publish("a", data[::-1], data[-VERSION_BYTES:])  # and the version to replace is compared whole
    assert content(store, "a") == data[::-1]


def test_a_write_that_takes_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch, store: LocalStore) -> None:
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: 0)
    writer = store.create("a")
    with pytest.raises(StorageError) as caught:
        writer.write_at(0, [b"abc"])
    assert caught.value.errno == errno.ENOSPC
    writer.discard()


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[LocalStore]:
    folder = tmp_path / "locked"
    folder.mkdir()
    (folder / "a").write_bytes(b"1" * 20)
    folder.chmod(0o500)
    yield LocalStore(folder)
    folder.chmod(0o700)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_can_not_be_written_to(read_only: LocalStore) -> None:
    _refused(read_only)


def test_a_folder_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As above where tests run as root: the system's answer is put in its mouth."""
    (tmp_path / "a").write_bytes(b"1" * 20)
    original = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "no", path)
        return original(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    _refused(LocalStore(tmp_path))


def _refused(store: Store) -> None:
    for act in (
        lambda: store.create("b"),
        lambda: store.publish("b", b"2" * 20, None),
        lambda: store.publish("a", b"2" * 20, b"1" * VERSION_BYTES),
    ):
        with pytest.raises(StorageError, match="Permission denied") as caught:
            act()
        assert caught.value.errno == errno.EACCES
        assert "this user can write to" in caught.value.hint
    assert store.list() == ["a"]
    assert content(store, "a") == b"1" * 20


def test_links_that_leave_the_folder_are_not_opened(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (tmp_path / "store-2").mkdir()
    (tmp_path / "store-2" / "near").write_bytes(b"a name that begins alike")
    root = tmp_path / "store"
    (root / "data").mkdir(parents=True)
    (root / "data" / "a").symlink_to(outside / "secret")
    (root / "data" / "b").symlink_to("../../outside/secret")
    (root / "data" / "c").symlink_to(tmp_path / "store-2" / "near")
    (root / "folder").symlink_to(outside)
    store = LocalStore(root)
    for path in ("data/a", "data/b", "data/c", "folder/secret"):
        with pytest.raises(StorageError, match="a link that leaves its folder"):
            store.open(path)
    put(store, "data/real", b"1")
    (root / "data" / "inside").symlink_to("real")
    assert content(store, "data/inside") == b"1"


def test_a_store_that_is_itself_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to("real")
    store = LocalStore(tmp_path / "alias")
    put(store, "data/a", b"1")
    assert content(store, "data/a") == b"1"
    assert content(LocalStore(tmp_path / "real"), "data/a") == b"1"


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    """A pipe would block for ever, a folder or device has no bytes of ours."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    store = LocalStore(tmp_path)
    for path in ("pipe", "folder"):
        with pytest.raises(StorageError, match="is not a file"):
            store.open(path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StorageError):
        store.open("loop")


def test_a_folder_that_can_not_be_made_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an automounter, or /proc, says that there is no such folder. The error of a write came as
    `NotFound`, which is not among the public errors, and without a hint."""

    def mkdir(path: str, *_: Any) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)

    monkeypatch.setattr(filesystem, "VANISHING", 0.1)
    monkeypatch.setattr(os, "mkdir", mkdir)
    store = LocalStore(tmp_path / "gone")
    for write in (lambda: store.create("a"), lambda: store.publish("a", b"1", None)):
        with pytest.raises(StorageError, match="No such file or directory") as caught:
            write()
        assert type(caught.value) is StorageError
        assert "mounted on this host" in caught.value.hint


def test_a_file_in_the_place_of_a_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    put(store, "data", b"1")
    with pytest.raises(NotFound):
        store.open("data/a")
    with pytest.raises(StorageError):
        store.create("data/a")
    put(store, "folder/a", b"1")
    with pytest.raises(StorageError) as caught:
        store.delete("folder")
    assert caught.value.errno == errno.ENOTEMPTY
    assert store.list("data") == []


def test_a_dead_publisher_leaves_a_hidden_file_and_no_lock(tmp_path: Path) -> None:
    """A leftover of a crash does not stand in the way of the next publish."""
    store = LocalStore(tmp_path)
    store.publish("index", b"1" * 20, None)
    (tmp_path / ".publishing-0123").write_bytes(b"half")
    store.publish("index", b"2" * 20, b"1" * VERSION_BYTES)
    assert content(store, "index") == b"2" * 20


def test_a_lock_held_by_another_is_a_conflict(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.publish("index", b"1" * 20, None)
    with open(tmp_path / "index", "rb+") as other:
        assert lock(other.fileno(), 0, alone=True)
        with pytest.raises(Conflict):
            store.publish("index", b"2" * 20, b"1" * VERSION_BYTES)
    store.publish("index", b"2" * 20, b"1" * VERSION_BYTES)
    assert store.list() == ["index"]


def test_a_file_system_without_locks_still_compares(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none(fd: int, how: int, what: bytes) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "fcntl", none)
    store = LocalStore(tmp_path)
    store.publish("index", b"1" * 20, None)
    with pytest.raises(Conflict):
        store.publish("index", b"3" * 20, b"2" * VERSION_BYTES)
    store.publish("index", b"2" * 20, b"1" * VERSION_BYTES)
    assert content(store, "index") == b"2" * 20


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    before = os.listdir("/proc/self/fd")
    put(store, "a", b"1")
    store.create("b").discard()
    store.publish("i", b"1" * 20, None)
    store.publish("i", b"2" * 20, b"1" * VERSION_BYTES)
    with pytest.raises(Conflict):
        store.publish("i", b"2" * 20, b"1" * VERSION_BYTES)
    with pytest.raises(StorageError):
        store.create("a")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError):
        store.open("folder")
    content(store, "a")
    store.list()
    assert {*os.listdir("/proc/self/fd")} <= {*before}


def test_urls(tmp_path: Path) -> None:
    assert open_store(f"file://{tmp_path}").url == str(tmp_path)
    with pytest.raises(BadInput, match="names 'host' as a host") as told:
        open_store("file://host/run")
    assert "file:///host/run" in told.value.hint
    assert open_store(tmp_path).child("a").url == f"{tmp_path}/a"
    with pytest.raises(StorageError, match="no store for odd:// places here"):
        open_store("odd://bucket/x")
    assert open_store(f"{tmp_path}/odd://name").url == f"{tmp_path}/odd:/name"  # an absolute path is no URL


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_what_may_not_be_read_is_not_told_of_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """By errno, because root may read a file of mode 0000."""
    (tmp_path / "a").write_bytes(b"1")

    def refuse(*args: Any, **named: Any) -> Any:
        raise OSError(number, os.strerror(number))

    store = LocalStore(tmp_path)
    for call in ("open", "scandir", "stat"):
        monkeypatch.setattr(os, call, refuse)
    for act in (lambda: store.open("a"), lambda: store.list(), lambda: store.stat("a")):
        with pytest.raises(StorageError) as caught:
            act()
        assert "right to read" in caught.value.hint
        assert "write" not in str(caught.value)


@pytest.mark.parametrize("doing", ["Reading", "Writing"])
@pytest.mark.parametrize("name", ["EMFILE", "ENFILE", "ENOMEM", "ENAMETOOLONG", "ELOOP", "ESTALE"])
def test_every_limit_has_its_own_advice(doing: str, name: str) -> None:
    with pytest.raises(StorageError) as caught, storage_errors(doing, "a"):
        raise OSError(getattr(errno, name), "")
    assert caught.value.hint
    assert not {"read", "write"} & set(caught.value.hint.split())
