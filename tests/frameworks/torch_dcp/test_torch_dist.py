"""Checkpoints that torch DCP wrote, loaded through `holdfast.load`."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast._core.io import open_files
from holdfast._core.store.local import LocalStore
from holdfast._frameworks.torch_dcp import torch_dist
from holdfast._frameworks.torch_dcp.torch_dist import export_torch_dist, import_torch_dist
from holdfast.errors import CorruptCheckpoint, LoadFailed, MissingTensors, NotCommitted

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP's own


def state() -> dict[str, Any]:
    made = torch.Generator().manual_seed(3)
    return {
        "model": {
            "w": torch.randn(37, 11, generator=made),
            "half": torch.randn(64, 8, generator=made).bfloat16(),
            "fp8": torch.randn(16, generator=made).to(torch.float8_e4m3fn),
            "scalar": torch.tensor(3.5),
            "flags": torch.tensor([True, False, True]),
            "none": torch.zeros(0, 4),
            "view": torch.arange(100.0)[10:20],
        },
        "step": 7,
        "notes": {"lr": 1e-3, "names": ["a", "b"]},
    }


def empty() -> dict[str, Any]:
    def blank(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: blank(item) for key, item in value.items()}
        return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None

    return blank(state())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save(state(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.flatten().view(torch.uint8).equal(b.flatten().view(torch.uint8))
            if a.dim()
            else bool(a == b)
        )
    return bool(a == b)


def test_everything_that_dcp_saves(folder: Path) -> None:
    found = empty()
    report = holdfast.load(found, folder)
    assert same(found, state())
    assert report.tensors >= 9


def test_a_slice_reads_a_slice(tmp_path: Path) -> None:
    dcp.save(
        {"w": torch.arange(8 << 20).float().view(8192, 1024)}, checkpoint_id=tmp_path / "dcp", no_dist=True
    )
    rows = torch.zeros(1024, 1024)
    report = holdfast.load({"w": holdfast.Shard(rows, (8192, 1024), (2048, 0))}, tmp_path / "dcp")
    assert torch.equal(rows, torch.arange(2 << 20, 3 << 20).float().view(1024, 1024))
    assert report.bytes_read < 3 * rows.nbytes


def test_a_missing_name_is_told(folder: Path) -> None:
    with pytest.raises(MissingTensors, match=r"'model\.W' \(nearest: 'model\.w'\)"):
        holdfast.load({"model": {"W": torch.zeros(37, 11)}}, folder)


def test_a_folder_without_metadata_is_none(folder: Path) -> None:
    (folder / ".metadata").unlink()
    with pytest.raises(NotCommitted):
        holdfast.load(empty(), folder)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_metadata_executes_nothing(folder: Path) -> None:
    mark = folder.parent / "executed"
    root = pickle.loads((folder / ".metadata").read_bytes())
    root.planner_data = Evil(mark)
    (folder / ".metadata").write_bytes(pickle.dumps(root))
    with pytest.raises(CorruptCheckpoint, match=r"posix\.system, which is not part of the format"):
        holdfast.load(empty(), folder)
    assert not mark.exists()


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../b", ".."])
def test_metadata_points_at_nothing_outside(folder: Path, path: str) -> None:
    root = pickle.loads((folder / ".metadata").read_bytes())
    for info in root.storage_data.values():
        info.relative_path = path
    (folder / ".metadata").write_bytes(pickle.dumps(root))
    with pytest.raises(CorruptCheckpoint, match="outside the checkpoint's folder"):
        holdfast.load(empty(), folder)


def test_a_torn_data_file_is_told(folder: Path) -> None:
    (data,) = folder.glob("*.distcp")
    content = data.read_bytes()
    for length in (0, 100, len(content) // 2, len(content) - 30):
        data.write_bytes(content[:length])
        with pytest.raises(CorruptCheckpoint, match=r"damaged|truncated|decoded|not loaded|ends before"):
            holdfast.load(empty(), folder)


def test_another_dtype_in_the_metadata_is_told(folder: Path) -> None:
    content = (folder / ".metadata").read_bytes()
    assert b"float32" in content
    (folder / ".metadata").write_bytes(content.replace(b"float32", b"float64"))
    state = {"model": {name: value.double() for name, value in empty()["model"].items()}}
    with pytest.raises(CorruptCheckpoint, match="it holds float32, the metadata says float64"):
        holdfast.load(state, folder)


def test_another_order_than_row_major_is_no_damage(tmp_path: Path) -> None:
    """Else `restore` would pass over the step."""
    whole = torch.arange(6.0).view(2, 3)
    dcp.save({"w": whole.t(), "x": whole}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(LoadFailed, match=r"'w' at 0 can't be read: its elements are not in row-major order"):
        holdfast.load({"w": torch.zeros(3, 2)}, tmp_path / "dcp")
    target = torch.zeros(2, 3)
    holdfast.load({"x": target}, tmp_path / "dcp")
    assert torch.equal(target, whole)


@pytest.mark.parametrize("given", [[{"a": 3}, {}], [{"a": 3, "m": {}}], [{"a": 3, "b": 4}]])
def test_empty_dicts_in_a_list_stay(given: list[Any], tmp_path: Path) -> None:
    """torch DCP stores nothing of them."""
    dcp.save({"list": given}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    state = {"list": [{key: value and 0 for key, value in item.items()} for item in given]}
    holdfast.load(state, tmp_path / "dcp")
    assert state["list"] == given


@pytest.mark.parametrize(
    ("given", "present"),
    [
        ([[3], [3, {"q": 3}]], [[0], [0, {"q": 0}]]),
        ([{"q.x": 3, "q": {"y": [4]}}], [{"q.x": 0, "q": {"y": []}}]),
        ([{"a": {1: 3}}, {}, {"b": 4}], [{"a": {7: 0}}, {}, {"b": 0}]),
        ([{"m": {3: 1, 5: 1}}], [{"m": {}}]),
        ([{"a": [{"b": 1}, {"b": 2}]}], [{"a": []}]),
        ([{"a": 1}, {"a": 2}], []),
    ],
)
def test_lists_of_lists_and_dicts(given: list[Any], present: list[Any], tmp_path: Path) -> None:
    """torch DCP stores their values one by one, each under the text of its path."""
    dcp.save({"list": given}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    state = {"list": present}
    holdfast.load(state, tmp_path / "dcp")
    assert state["list"] == given


def test_a_list_with_a_number_left_out_is_told(tmp_path: Path) -> None:
    dcp.save({"list": {"0": {"a": 1}, "2": {"a": 2}}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(MissingTensors, match="'list'"):
        holdfast.load({"list": [{"a": 0}, {"a": 0}, {"a": 0}]}, tmp_path / "dcp")


@pytest.mark.parametrize("at_once", [1, 200, 1 << 20])
def test_an_export_reads_in_batches(at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_dist, "_AT_ONCE", at_once)
    sizes, read = list[int](), torch_dist.read_boxes

    def counted(store: Any, source: Any, batch: Any) -> Any:
        contents = read(store, source, batch)
        sizes.append(sum(content.nbytes for content in contents[0]))
        return contents

    monkeypatch.setattr(torch_dist, "read_boxes", counted)
    given = {str(number): torch.arange(float(number)) for number in range(30)} | {
        "objects": {"a": 1, "b": "x"}
    }
    holdfast.save(given, tmp_path / "it", job=holdfast.Job(no_dist=True))
    export_torch_dist(tmp_path / "it", tmp_path / "out")
    assert all(size <= max(at_once, 4 * 29) for size in sizes)
    assert len(sizes) == 1 or at_once < 1 << 20
    found = {str(number): torch.zeros(number) for number in range(30)} | {"objects": {"a": 0, "b": ""}}
    dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    assert same(found, given)


@pytest.mark.parametrize("is_there", [False, True])
def test_an_export_of_what_lacks_a_file_leaves_nothing(is_there: bool, tmp_path: Path) -> None:
    holdfast.save(state(), tmp_path / "it", job=holdfast.Job(no_dist=True))
    for path in (tmp_path / "it" / "data").iterdir():
        path.unlink()
    if is_there:
        (tmp_path / "out").mkdir()
    with pytest.raises(CorruptCheckpoint, match=f"A data file of {tmp_path / 'it'} is missing: ") as raised:
        export_torch_dist(tmp_path / "it", tmp_path / "out")
    assert raised.value.hint
    # A folder of the user stays, empty as it was.
    assert (tmp_path / "out").exists() == is_there
    assert not is_there or not any((tmp_path / "out").iterdir())


def sequential(steps: int) -> torch.optim.lr_scheduler.SequentialLR:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
    parts = [
        torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2),
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5]),
    ]
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [2])
    for _ in range(steps):
        optimizer.step()
        schedule.step()
    return schedule


def test_a_schedule_of_schedules_goes_on(tmp_path: Path) -> None:
    dcp.save({"schedule": sequential(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    fresh, other = sequential(0), sequential(9)
    for found in (fresh, other):
        holdfast.load({"schedule": found}, tmp_path / "dcp")
        assert found.state_dict() == sequential(3).state_dict()
        assert type(found.state_dict()["_schedulers"][1]["milestones"]) is Counter


def test_garbage_metadata_is_told(folder: Path) -> None:
    content = (folder / ".metadata").read_bytes()
    for bad in (b"", b"garbage", content[:-10], content[:50], b"\x80\x02}."):
        (folder / ".metadata").write_bytes(bad)
        with pytest.raises(CorruptCheckpoint, match="metadata of a torch_dist checkpoint"):
            holdfast.load(empty(), folder)


@pytest.mark.parametrize("imported", [False, True], ids=["loaded", "imported"])
def test_more_files_than_may_be_open(imported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, most = tmp_path / "dcp", 2
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
    dcp.save(state(), storage_writer=writer, no_dist=True)
    assert len(list(folder.glob("*.distcp"))) > 3 * most
    open_now: list[int] = []
    really_open = LocalStore.open

    def counted(self: LocalStore, path: str) -> Any:
        reader = really_open(self, path)
        open_now.append(open_data_files(folder))
        return reader

    monkeypatch.setattr(open_files, "OPEN_FILES", most)
    monkeypatch.setattr(LocalStore, "open", counted)
    found = empty()
    if imported:
        import_torch_dist(folder, tmp_path / "new")
        holdfast.load(found, tmp_path / "new")
    else:
        holdfast.load(found, folder)
    assert same(found, state())
    assert max(open_now) == most + 1, "one more until another is closed for it"


def open_data_files(folder: Path) -> int:
    """How many descriptors of this process are of data files in a folder."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            found += path.parent == folder and path.suffix == ".distcp"
    return found
