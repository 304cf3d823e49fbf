"""Damage on purpose: indexes that lie under right digests, links, pipes and pickles.

Each is one clear error; nothing is executed, and nothing is written outside the folder.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import holdfast
from holdfast._core.format import objects, plain_objects
from holdfast._core.format.columns import Columns
from holdfast._core.format.digest import digest, digest_many
from holdfast._tools.cli import cli
from holdfast.errors import CorruptCheckpoint, HoldfastError, LoadFailed, NotCommitted, StorageError
from tests.hostile.checkpoint import columns_of, forge, is_right, outcome, read, rows_of, snapshot, write


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine") / "step"
    write(folder)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy with something to steal and to overwrite beside it; no load changes any of it."""
    shutil.copytree(pristine, tmp_path / "run" / "step")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.safetensors").write_bytes(b"secret" * 10)
    yield tmp_path / "run" / "step"
    assert not (tmp_path / "executed").exists()


def refused(folder: Path, words: str, kind: type[HoldfastError] = CorruptCheckpoint) -> None:
    """A load that raises so, and leaves all that lies around as it was."""
    around = folder.parent.parent
    before = snapshot(around)
    with pytest.raises(kind, match=words):
        read(folder)
    assert snapshot(around) == before


def test_a_forged_index_that_says_the_truth_is_read(folder: Path) -> None:
    forge(folder, lambda columns: None)
    assert is_right(read(folder))


# -- names of files --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../../outside/secret.safetensors",
        "data/../../../outside/secret.safetensors",
        "/etc/passwd",
        "/data/x.safetensors",
        "data/..",
        "data/a\0.safetensors",
        "data//x.safetensors",
        "~/x.safetensors",
        "index.safetensors",
        "",
        "file:///etc/passwd",
        "data/x.safetensors\n",
    ],
)
def test_names_that_leave_the_folder_are_not_opened(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(columns: Columns) -> None:
        columns.file_names[0] = name

    forge(folder, change)
    opened: list[str] = []
    original = os.open

    def record(path: Any, *rest: Any, **named: Any) -> int:
        opened.append(os.fspath(path) if not isinstance(path, int) else "")
        return original(path, *rest, **named)

    monkeypatch.setattr(os, "open", record)
    with pytest.raises(CorruptCheckpoint, match="which is not inside its data folder; it was not opened"):
        read(folder)
    inside = [path for path in opened if path.endswith(".safetensors") or "passwd" in path]
    assert set(inside) == {str(folder / "index.safetensors")}


def test_data_files_that_are_links_to_outside(folder: Path) -> None:
    columns, _ = columns_of(folder)
    path = folder / columns.file_names[0]
    outside = folder.parent.parent / "outside" / path.name
    for target in (outside, Path("../../../outside") / path.name):
        shutil.copy(folder / columns.file_names[0], outside)
        path.unlink()
        path.symlink_to(target)
        refused(folder, "is a link that leaves its folder; it was not opened", StorageError)
        path.unlink()
        shutil.move(outside, path)
    assert outcome(folder) is None


def test_a_data_folder_or_an_index_that_is_a_link_to_outside(folder: Path) -> None:
    outside = folder.parent.parent / "outside"
    shutil.move(folder / "data", outside / "data")
    (folder / "data").symlink_to(outside / "data")
    refused(folder, "link that leaves its folder", StorageError)
    (folder / "data").unlink()
    shutil.move(outside / "data", folder / "data")
    shutil.move(folder / "index.safetensors", outside / "index.safetensors")
    (folder / "index.safetensors").symlink_to(outside / "index.safetensors")
    refused(folder, "link that leaves its folder", StorageError)


def test_a_save_through_a_link_to_outside_leaves_nothing_there(folder: Path) -> None:
    outside = folder.parent.parent / "outside"
    fresh = folder.parent / "fresh"
    fresh.mkdir()
    (fresh / "data").symlink_to(outside)
    before = snapshot(outside)
    with pytest.raises(StorageError):
        write(fresh)
    assert snapshot(outside) == before
    assert not (fresh / "index.safetensors").exists()


def test_pipes_folders_and_devices_are_not_read(folder: Path) -> None:
    columns, _ = columns_of(folder)
    path = folder / columns.file_names[0]
    path.unlink()
    os.mkfifo(path)
    refused(folder, "is not a file", StorageError)
    path.unlink()
    path.mkdir()
    refused(folder, "is not a file", StorageError)
    index = folder / "index.safetensors"
    index.unlink()
    os.mkfifo(index)
    with pytest.raises(StorageError, match="is not a file"):
        read(folder)
    index.unlink()
    index.mkdir()
    with pytest.raises((StorageError, NotCommitted)):
        read(folder)


# -- numbers ---------------------------------------------------------------------------------------

HUGE = 2**63 - 1


def chunk(name: str, column: str, value: Any, at: int = 0) -> Callable[[Columns], None]:
    def change(columns: Columns) -> None:
        _, rows = rows_of(columns, name)
        getattr(columns, column)[rows.start + at] = value

    return change


def tensor(name: str, column: str, value: Any) -> Callable[[Columns], None]:
    def change(columns: Columns) -> None:
        row, _ = rows_of(columns, name)
        getattr(columns, column)[row] = value

    return change


def double_position(columns: Columns) -> None:
    _, rows = rows_of(columns, "shards")
    columns.file[rows.start + 1] = columns.file[rows.start]
    columns.position[rows.start + 1] = columns.position[rows.start] + 4


def wrong_digest(columns: Columns) -> None:
    columns.digests[3] ^= np.uint64(1)


def same_name(columns: Columns) -> None:
    columns.names[1] = columns.names[0]


FORGERIES: list[tuple[str, Callable[[Columns], object], str]] = [
    ("a digest", wrong_digest, "do not match the digest they were written with"),
    ("a name twice", same_name, "do not ascend, so one stands twice"),
    ("two chunks on the same bytes", double_position, "two chunks on the same bytes"),
    ("a chunk past the end", chunk("big", "position", 10**9), "a chunk of 'big' outside its file"),
    ("a chunk before the start", chunk("big", "position", -1), "a chunk of 'big' outside its file"),
    ("a chunk at 2^63 - 1", chunk("big", "position", HUGE), "a chunk of 'big' outside its file"),
    ("a chunk at -2^63", chunk("big", "position", -(2**63)), "a chunk of 'big' outside its file"),
    ("a chunk elsewhere", chunk("half", "position", 8), "do not match the digest|the same bytes"),
    ("a chunk in no file", chunk("big", "file", 99), "a file that it does not name"),
    ("a chunk in file -1", chunk("big", "file", -1), "a file that it does not name"),
    ("a negative size", chunk("big", "size", -600), "impossible size"),
    ("a huge size", chunk("big", "size", HUGE), "impossible size"),
    (
        "a size too large",
        chunk("half", "size", (1, 34)),
        "digests|outside its file|same bytes|overlap|outside",
    ),
    ("a size too small", chunk("shards", "size", (49, 7)), "'shards' completely: gap from index \\[49, 0\\]"),
    (
        "an overlap",
        chunk("shards", "offset", (49, 0), 1),
        "'shards' completely: overlap from index \\[49, 0\\]",
    ),
    ("an offset outside", chunk("shards", "offset", (51, 0), 1), "'shards' completely: outside"),
    ("a negative offset", chunk("shards", "offset", (-1, 0)), "'shards' completely: outside"),
    ("an offset that overflows", chunk("shards", "offset", (HUGE, 0)), "'shards' completely: outside"),
    ("a block of zero", chunk("big", "block", 0), "outside its file"),
    ("a negative block", chunk("big", "block", -(2**63)), "outside its file"),
    ("a block of one byte", chunk("big", "block", 1), "too few or too many digests"),
    ("a shape too large", tensor("big", "shape", (601, 64)), r"holds float32\[601, 64\]"),
    ("a negative shape", tensor("big", "shape", (-600, 64)), "impossible shape"),
    ("a shape of 2^62", tensor("big", "shape", (1 << 31, 1 << 31)), "impossible shape"),
    ("a shape of 2^126", tensor("big", "shape", HUGE), "impossible shape"),
    ("an object of 2^60 bytes", tensor("step", "shape", (1, 1 << 60)), "impossible shape"),
    ("an object of minus 5 bytes", tensor("step", "shape", (1, -5)), "impossible shape"),
    ("an object too long", tensor("step", "shape", (1, 4000)), "'step' completely: gap"),
    ("an object too short", tensor("step", "shape", (1, 1)), "'step' completely: outside"),
    ("an object of no dimension", tensor("step", "ndim", 0), "impossible shape"),
    ("an object of floats", tensor("step", "dtype", 1), "impossible shape|outside|digests"),
    ("another dtype", tensor("big", "dtype", 4), "outside its file|digests|same bytes"),
    ("a dtype of the same size", tensor("half", "dtype", 3), r"holds float16\[33\]"),
    ("no dtype", tensor("big", "dtype", 200), "dtype, kind or number of dimensions"),
    ("no kind", tensor("big", "kind", 9), "dtype, kind or number of dimensions"),
    ("an object for a tensor", tensor("half", "kind", 1), "impossible shape"),
    ("a tensor for an object", tensor("step", "kind", 0), "can't be exchanged"),
    ("255 dimensions", tensor("big", "ndim", 255), "dtype, kind or number of dimensions"),
    ("chunks that descend", tensor("big", "chunk_end", 0), "do not ascend|completely: gap"),
    ("chunks without end", tensor("turned", "chunk_end", HUGE), "do not ascend"),
    ("digests without end", lambda c: c.digest_end.__setitem__(-1, HUGE), "do not ascend"),
    (
        "a file size of 2^63 - 1",
        lambda c: c.file_size.__setitem__(slice(None), HUGE),
        "bytes, but was written with 9223372036854775807",
    ),
    ("a negative file size", lambda c: c.file_size.__setitem__(slice(None), -1), "outside its file"),
]


@pytest.mark.parametrize(("change", "words"), [f[1:] for f in FORGERIES], ids=[f[0] for f in FORGERIES])
def test_numbers_that_can_not_be_are_clear_errors(
    folder: Path, change: Callable[[Columns], object], words: str
) -> None:
    forge(folder, change)
    refused(folder, words, HoldfastError)


@pytest.mark.parametrize("seed", range(100))
def test_random_numbers_in_random_columns(folder: Path, seed: int) -> None:
    """Forgeries nobody thought of: an error of ours, or the right values."""
    rng = np.random.default_rng(seed)

    def change(columns: Columns) -> None:
        numbers = [
            name for name, value in vars(columns).items() if isinstance(value, np.ndarray) and value.size
        ]
        name = numbers[int(rng.integers(len(numbers)))]
        array = getattr(columns, name)
        info = np.iinfo(array.dtype)
        picks = [0, 1, -1, 7, 2**31, 2**32 - 1, 2**62, info.max, info.min, int(array.flat[0]) + 1]
        at = int(rng.integers(array.size))
        array.flat[at] = int(np.clip(picks[int(rng.integers(len(picks)))], info.min, info.max))

    forge(folder, change)
    error = outcome(folder)
    assert error is None or "Error:" not in error.message, f"an accident, not a check: {error}"


@pytest.mark.parametrize(
    "about",
    [
        {"step": float("nan"), "notes": float("inf")},
        {"step": -1e308},
        {"step": "../../x"},
        {"step": [1]},
        {},
        {"grid": 5, "notes": {"a" * 1000: None}},
    ],
)
def test_odd_notes_do_not_matter(folder: Path, about: dict[str, Any]) -> None:
    forge(folder, lambda columns: None, about)
    assert is_right(read(folder))


# -- headers ---------------------------------------------------------------------------------------


def rewrite_header(path: Path, edit: Callable[[str], str], seal: bool = True) -> None:
    """Change an index's JSON text as text, and seal it again."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    body = data[8 + length : -16]
    text = edit(data[8 : 8 + length].decode()).encode()
    text += b" " * (-(len(text) + 8) % 64)
    header = struct.pack("<Q", len(text)) + text
    end = data[-16:]
    if seal:
        start, stop = json.loads(text)["pages"]["data_offsets"]
        pages = digest_many(np.frombuffer(body[start:stop], "<u8"))
        end = np.asarray([digest(header), pages], "<u8").tobytes()
    path.write_bytes(header + body + end)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, 1 << 30, 10**6])
def test_a_header_that_says_it_is_huge(folder: Path, length: int) -> None:
    index = folder / "index.safetensors"
    data = bytearray(index.read_bytes())
    data[:8] = struct.pack("<Q", length)
    index.write_bytes(data)
    refused(folder, f"announces a header of {length} bytes")


def test_a_column_twice_in_the_header(folder: Path) -> None:
    entry = '"seal":{"dtype":"U64","shape":[2],"data_offsets":[0,16]}'
    rewrite_header(folder / "index.safetensors", lambda text: text.rstrip()[:-1] + "," + entry + "}")
    refused(folder, "the name 'seal' stands twice")


def test_a_header_edited_without_its_digest(folder: Path) -> None:
    rewrite_header(
        folder / "index.safetensors",
        lambda text: text.replace('"17"', '"18"').replace("17", "18"),
        seal=False,
    )
    refused(folder, "header of .* does not match its digest")


def test_columns_that_overlap_or_lie_outside(folder: Path) -> None:
    index = folder / "index.safetensors"
    good = index.read_bytes()
    (length,) = struct.unpack("<Q", good[:8])
    header = json.loads(good[8 : 8 + length])
    for name, offsets, words in (
        ("position", header["offset"]["data_offsets"], "column 'position'|two chunks on the same bytes"),
        ("digests", [0, 1 << 40], "at bytes 0 to"),
        ("digests", [-8, 0], "at bytes -8 to 0"),
        ("file", [8, 4], "at bytes 8 to 4"),
    ):

        def edit(text: str, name: str = name, offsets: Any = offsets) -> str:
            values = json.loads(text)
            values[name]["data_offsets"] = offsets
            return json.dumps(values)

        rewrite_header(index, edit)
        refused(folder, words)
        index.write_bytes(good)
    assert outcome(folder) is None


def test_columns_on_each_others_bytes_give_no_wrong_value(folder: Path) -> None:
    """Two columns of equal length exchanged: the digests of the data still tell."""

    def edit(text: str) -> str:
        values = json.loads(text)
        values["position"], values["block"] = values["block"], values["position"]
        return json.dumps(values)

    rewrite_header(folder / "index.safetensors", edit)
    refused(folder, "outside its file|digests|same bytes")


# -- numbers that no float holds, text that no UTF-8 holds ----------------------------------------


@pytest.mark.parametrize(
    "payload",
    [
        b'J{"!":"float","v":' + b"1" * 400 + b"}",
        b'J{"!":"complex","v":[' + b"1" * 400 + b",0]}",
        b'J[{"!":"tuple","v":[{"!":"float","v":-' + b"9" * 400 + b"}]}]",
    ],
)
def test_a_float_of_400_digits_is_damage_and_inspect_says_so(
    payload: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(objects, "encode", lambda value, name: payload)
        holdfast.save({"lr": 0.1}, tmp_path / "step")
    with pytest.raises(CorruptCheckpoint, match="'lr' can't be decoded: OverflowError"):
        holdfast.load({"lr": 0.0}, tmp_path / "step")
    found = CliRunner().invoke(cli, ["inspect", str(tmp_path / "step"), "--json"])
    assert found.exit_code == 0, found.exception
    assert json.loads(found.stdout)["shown"][0]["value"] == "<damaged>"


@pytest.mark.parametrize("kind", ["set", "frozenset", "dict", "OrderedDict"])
def test_keys_that_all_have_one_hash_are_damage(kind: str) -> None:
    """A hundred thousand of them would take minutes to put into a dict; all would be compared with each
    other."""
    numbers = [at * ((1 << 61) - 1) for at in range(100_000)]
    values = numbers if kind.endswith("set") else [[number, 1] for number in numbers]
    data = b"J" + json.dumps({"!": kind, "v": values}).encode()
    with pytest.raises(CorruptCheckpoint, match="keys have one hash"):
        objects.decode(data, "it")
    assert plain_objects.preview(data) == "<damaged>"


@pytest.mark.parametrize(
    "notes", [10**400, -(10**400), "\ud800", {"\udfff": ["\ud800"]}, float("nan"), [[[[]]]] * 3], ids=repr
)
def test_notes_that_some_json_can_not_say_are_shown(folder: Path, notes: Any) -> None:
    forge(folder, lambda columns: None, {"step": 10**400, "created": 10**400, "notes": notes})
    for more in ([], ["--json"]):
        found = CliRunner().invoke(cli, ["inspect", str(folder), *more])
        assert found.exit_code == 0, found.exception
        assert found.stdout
    assert json.loads(found.stdout)["path"] == str(folder)


# -- pickles ---------------------------------------------------------------------------------------


class Touch:
    """Unpickling it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def payloads(mark: Path) -> dict[str, bytes]:
    zipped = io.BytesIO()
    torch.save([Touch(mark)], zipped)
    by_hand = io.BytesIO()
    with zipfile.ZipFile(by_hand, "w") as archive:
        archive.writestr("a/data.pkl", b"cposix\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR.")
        archive.writestr("a/version", b"3\n")
    return {
        "torch": b"T" + zipped.getvalue(),
        "by hand": b"T" + by_hand.getvalue(),
        "bare pickle": b"T" + pickle.dumps(Touch(mark)),
        "no encoding of ours": pickle.dumps(Touch(mark)),
        "json that asks for eval": b'J{"!":"eval","v":"__import__(\'os\').system(\'touch '
        + str(mark).encode()
        + b"')\"}",
    }


@pytest.mark.parametrize("kind", payloads(Path("x")))
def test_pickles_in_objects_are_not_executed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "executed"
    payload = payloads(mark)[kind]
    if kind == "bare pickle":  # the payload is a real one: unpickled for real, it runs
        pickle.loads(payload[1:])
        assert mark.exists()
        mark.unlink()
    folder = tmp_path / "step"
    with monkeypatch.context() as patch:
        patch.setattr(objects, "encode", lambda value, name: payload)
        holdfast.save({"evil": [1]}, folder)
    before = snapshot(tmp_path)
    state: dict[str, Any] = {"evil": None}
    with pytest.raises((CorruptCheckpoint, LoadFailed), match="'evil'"):
        holdfast.load(state, folder)
    assert state == {"evil": None}
    assert not mark.exists()
    assert snapshot(tmp_path) == before


def test_pickles_in_the_place_of_files_are_not_executed(folder: Path) -> None:
    mark = folder.parent.parent / "executed"
    index = folder / "index.safetensors"
    good = index.read_bytes()
    for payload in payloads(mark).values():
        index.write_bytes(payload)
        with pytest.raises(CorruptCheckpoint):
            read(folder)
    index.write_bytes(good)
    columns, _ = columns_of(folder)
    (folder / columns.file_names[0]).write_bytes(payloads(mark)["torch"])
    refused(folder, "truncated or replaced")
    assert not mark.exists()
