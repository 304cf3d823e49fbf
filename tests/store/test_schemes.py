"""Stores of a user's own: found by the scheme of a URL, and asked for what they can do."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast._core.background.sinks import is_written_here
from holdfast._core.store.base import Entry, Kind, capabilities
from holdfast._core.store.local import LocalStore, open_local, open_store
from holdfast._core.store.run_folder import AT_ONCE
from holdfast.errors import BadInput, HoldfastError, StorageError
from holdfast.interfaces import Capabilities
from holdfast.testing import MemoryStore

ALONE = holdfast.Job(no_dist=True)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installed package with a store for shelf:// places."""
    about = tmp_path / "shelf_store-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf-store\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[holdfast.stores]\nshelf = shelf_store:open\nbroken = shelf_store:broken\n"
    )
    (tmp_path / "shelf_store.py").write_text(
        "from holdfast.testing import MemoryStore\n"
        "shelves = {}\n"
        "def open(url):\n"
        "    head, *folders = url.removeprefix('shelf://').split('/')\n"
        "    if head not in shelves:\n"
        "        shelves[head] = MemoryStore()\n"
        "        shelves[head].url = f'shelf://{head}/'\n"
        "    store = shelves[head]\n"
        "    for folder in filter(None, folders):\n"
        "        store = store.child(folder)\n"
        "    return store\n"
        "def broken(url):\n"
        "    raise KeyError(url)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "shelf://one"
    sys.modules.pop("shelf_store", None)


def test_a_package_offers_a_store_by_its_scheme(shelf: str) -> None:
    run = f"{shelf}/run"
    with holdfast.Checkpoints(run, keep=1, job=ALONE) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": torch.full((5,), float(step))})
    state = {"w": torch.zeros(5)}
    newest = holdfast.latest(run)
    assert newest is not None
    holdfast.load(state, newest, job=ALONE)
    assert state["w"].tolist() == [2.0] * 5
    with pytest.raises(StorageError, match="The store for broken:// places, shelf_store:broken, could not"):
        open_store("broken://x")


def test_an_unknown_scheme_is_one_sentence_without_the_url(shelf: str) -> None:
    with pytest.raises(
        StorageError, match=r"There is no store for odd:// places here; there are .*shelf://"
    ) as caught:
        holdfast.save({"w": torch.zeros(1)}, "odd://user:secret@place", job=ALONE)
    assert "secret" not in str(caught.value)
    with pytest.raises(BadInput, match=r"An export needs a local path, not odd://"):
        open_local("odd://user:secret@place", "An export")


class InOrder(MemoryStore):
    """Takes the bytes of a file in order; keeps at most `ROOM` of those that come too early."""

    capabilities = Capabilities(any_order=False, sized=True)
    ROOM = 1 << 20

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.waited: list[int] = []

    def create(self, path: str, size: int = 0) -> Any:
        self.sizes.append(size)
        return InOrderWriter(self, super().create(path))


class InOrderWriter:
    def __init__(self, store: InOrder, writer: Any) -> None:
        self._store, self._writer = store, writer
        self._at, self._early, self._given_up = 0, dict[int, int](), False
        self._turn = threading.Condition()

    def write_at(self, start: int, buffers: Sequence[Any]) -> None:
        size = sum(map(len, buffers))
        with self._turn:
            while start > self._at + InOrder.ROOM and not self._given_up:
                self._store.waited.append(start)
                self._turn.wait(30)
            if self._given_up:
                raise StorageError("It was given up.")
            self._writer.write_at(start, buffers)
            self._early[start] = size
            while self._at in self._early:
                self._at += self._early.pop(self._at)
            self._turn.notify_all()

    def finish(self) -> None:
        assert not self._early
        self._writer.finish()

    def discard(self) -> None:
        with self._turn:
            self._given_up = True
            self._turn.notify_all()
        self._writer.discard()


def large() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"{number:02d}": torch.randn(300_000) for number in range(40)}


def test_a_store_that_takes_bytes_in_order_is_written_by_several_threads_in_turns() -> None:
    store, state = InOrder(), large()
    job = holdfast.Job(no_dist=True, options=holdfast.Options(writer_threads=4))
    holdfast.save(state, store, job=job)
    back = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    holdfast.load(back, store, job=job)
    assert all(torch.equal(back[name], state[name]) for name in state)
    data = sum(tensor.nbytes for tensor in state.values())
    # Without turns, three of four threads would wait for a quarter of the file each.
    assert store.sizes == [data]
    assert max((start for start in store.waited), default=0) < data


def test_a_thread_that_fails_wakes_those_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = InOrderWriter.write_at

    def fails(self: InOrderWriter, start: int, buffers: Sequence[Any]) -> None:
        if start > 5 << 20 and start == self._at:
            raise StorageError("The disk is full.")
        real(self, start, buffers)

    monkeypatch.setattr(InOrderWriter, "write_at", fails)
    monkeypatch.setattr(InOrder, "ROOM", 1 << 16)
    job = holdfast.Job(no_dist=True, timeout=60.0, options=holdfast.Options(writer_threads=4))
    with pytest.raises(HoldfastError, match="disk is full"):
        holdfast.save(large(), InOrder(), job=job)


class AtOnce(MemoryStore):
    """Looks at files at once, and counts that and its other calls."""

    capabilities = Capabilities(at_once=True)

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def begin_stats(self, paths: Sequence[str]) -> Callable[[], list[Entry | None]]:
        self.calls.append(f"{len(paths)} files")
        return lambda: [Entry(Kind.FILE, 9, 0.0) if path in self.files else None for path in paths]

    def stat(self, path: str = "") -> Entry | None:
        self.calls.append("stat")
        return super().stat(path)

    def list(self, folder: str = "") -> list[str]:
        self.calls.append("list")
        return super().list(folder)


def test_the_newest_step_is_found_by_a_list_and_one_look() -> None:
    store = AtOnce()
    assert holdfast.latest(store) is None
    for step in range(1, 41):
        store.files[f"step-{step:08d}/data/a"] = b"1"
        if step <= 30:
            store.files[f"step-{step:08d}/index.safetensors"] = b"1" * 99
    store.calls.clear()
    assert str(holdfast.latest(store)).endswith("step-00000030/")
    many = f"{AT_ONCE} files"  # their indexes, and then their markers of torch DCP
    assert store.calls == ["list", "1 files", "1 files", many, many]
    for step in range(31, 41):
        store.files[f"step-{step:08d}/index.safetensors"] = b"1" * 99
    store.calls.clear()
    assert str(holdfast.latest(store)).endswith("step-00000040/")
    assert store.calls == ["list", "1 files"]


class _Quiet(LocalStore):
    """A store of a user's that stands on ours."""


def test_a_store_that_stands_on_ours_is_written_by_this_process(tmp_path: Path) -> None:
    """The writer process would open ours in its place."""
    assert is_written_here(_Quiet(tmp_path))
    assert capabilities(_Quiet(tmp_path)).links
    assert not is_written_here(LocalStore(tmp_path))


def test_an_attribute_of_another_meaning_is_told() -> None:
    store = MemoryStore()
    store.capabilities = ["links"]  # type: ignore[attr-defined]
    with pytest.raises(BadInput, match="`capabilities` of the store MemoryStore is of type list"):
        capabilities(store)
