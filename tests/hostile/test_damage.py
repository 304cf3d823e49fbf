"""Damage by accident: bits that flip, files that end early. Never a wrong value, always a HoldfastError."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from holdfast._core.format.container import read_header
from holdfast.errors import CorruptCheckpoint, HoldfastError, NotCommitted
from tests.hostile.checkpoint import columns_of, is_right, outcome, read, snapshot, write


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine") / "step"
    write(folder)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A copy to harm."""
    target = tmp_path / "run" / "step"
    shutil.copytree(pristine, target)
    return target


def regions(folder: Path) -> list[tuple[str, Path, int, int]]:
    """(kind, file, first byte, last byte after) of everything in a checkpoint."""
    index = folder / "index.safetensors"
    found = [("index", index, 0, index.stat().st_size)]
    for path in sorted((folder / "data").iterdir()):
        data = path.read_bytes()
        header = read_header(lambda at, n, data=data: data[at : at + n], len(data), str(path))
        low, high = header.entries["__holdfast__"].data_offsets
        start = header.data_start
        found.append(("header", path, 0, start))
        if low:
            found.append(("data", path, start, start + low))
        found.append(("embedded", path, start + low, start + high))
    return found


def test_the_checkpoint_has_all_kinds_of_regions(folder: Path) -> None:
    found = regions(folder)
    assert {kind for kind, *_ in found} == {"index", "header", "data", "embedded"}
    assert len({path for _, path, *_ in found}) >= 4
    assert outcome(folder) is None
    assert sum(b - a for _, _, a, b in found) == sum(p.stat().st_size for p in folder.rglob("*.safetensors"))


@pytest.mark.parametrize("kind", ["index", "header", "data", "embedded"])
def test_flipped_bits_are_errors_or_harmless(folder: Path, kind: str) -> None:
    """50 seeded flips a region: 200 in all."""
    rng = random.Random(f"flips in {kind}")
    places = [region for region in regions(folder) if region[0] == kind]
    before = snapshot(folder.parent.parent)
    noticed = 0
    for _ in range(50):
        _, path, low, high = rng.choices(places, weights=[r[3] - r[2] for r in places])[0]
        at, bit = rng.randrange(low, high), rng.randrange(8)
        good = path.read_bytes()
        bad = bytearray(good)
        bad[at] ^= 1 << bit
        path.write_bytes(bad)
        error = outcome(folder)
        if error is not None:
            noticed += 1
            assert isinstance(error, CorruptCheckpoint), f"{path.name} byte {at} bit {bit}: {error!r}"
            assert path.name in str(error)
        path.write_bytes(good)
    # A load reads every byte of the index and of the data; headers and embedded indexes it leaves alone.
    assert noticed == (50 if kind in ("index", "data") else 0)
    assert snapshot(folder.parent.parent) == before
    assert outcome(folder) is None


def test_the_message_names_file_tensor_and_bytes(folder: Path) -> None:
    columns, _ = columns_of(folder)
    row = columns.names.index("half")
    chunk = int(columns.chunk_end[row - 1])
    path = folder / columns.file_names[int(columns.file[chunk])]
    data = bytearray(path.read_bytes())
    data[int(columns.position[chunk]) + 5] ^= 4
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpoint) as caught:
        read(folder)
    first, last = int(columns.position[chunk]), int(columns.position[chunk]) + 66
    assert f"is damaged: bytes {first} to {last}, part of 'half'" in str(caught.value)
    assert caught.value.details["tensor"] == "half"
    assert caught.value.details["file"] == columns.file_names[int(columns.file[chunk])]


def test_truncated_files_are_errors(folder: Path) -> None:
    rng = random.Random(5)
    before = snapshot(folder.parent.parent)
    for path in sorted(folder.rglob("*.safetensors")):
        good = path.read_bytes()
        lengths = {0, 1, 7, 8, 9, 100, len(good) // 2, len(good) - 16, len(good) - 8, len(good) - 1}
        lengths |= {rng.randrange(len(good)) for _ in range(8)}
        for length in sorted(lengths):
            path.write_bytes(good[:length])
            error = outcome(folder)
            if error is None:  # a data file that holds nothing but names is never opened
                assert path.name != "index.safetensors"
                assert not any(region[1] == path and region[0] == "data" for region in regions_of(good, path))
                continue
            assert isinstance(error, CorruptCheckpoint), f"{path.name} cut at {length}: {error!r}"
            assert path.name in str(error)
        path.write_bytes(good)
    assert snapshot(folder.parent.parent) == before


def regions_of(data: bytes, path: Path) -> list[tuple[str, Path, int, int]]:
    header = read_header(lambda at, n: data[at : at + n], len(data), str(path))
    low, _ = header.entries["__holdfast__"].data_offsets
    return [("data", path, header.data_start, header.data_start + low)] if low else []


def test_files_that_grew_are_errors(folder: Path) -> None:
    for path in sorted(folder.rglob("*.safetensors")):
        good = path.read_bytes()
        for extra in (b"\0", b"x" * 64, good[-64:]):
            path.write_bytes(good + extra)
            error = outcome(folder)
            assert isinstance(error, CorruptCheckpoint) or not regions_of(good, path)
        path.write_bytes(good)


def test_zeroed_pages_and_swapped_files_are_errors(folder: Path) -> None:
    files = [path for path in sorted((folder / "data").iterdir()) if regions_of(path.read_bytes(), path)]
    for path in files:
        good = path.read_bytes()
        low = regions_of(good, path)[0][2]
        bad = bytearray(good)
        bad[low : low + 4096] = bytes(min(4096, len(good) - low))
        path.write_bytes(bad)
        assert isinstance(outcome(folder), CorruptCheckpoint)
        path.write_bytes(good)
    first, second = files[0].read_bytes(), files[1].read_bytes()
    files[0].write_bytes(second)
    files[1].write_bytes(first)
    assert isinstance(outcome(folder), CorruptCheckpoint)


def test_missing_files_are_errors(folder: Path) -> None:
    for path in sorted((folder / "data").iterdir()):
        good = path.read_bytes()
        path.unlink()
        error = outcome(folder)
        if regions_of(good, path):
            assert isinstance(error, CorruptCheckpoint)
            assert path.name in str(error)
            assert "No such file" in str(error)
        path.write_bytes(good)
    (folder / "index.safetensors").unlink()
    with pytest.raises(NotCommitted, match=r"no index\.safetensors"):
        read(folder)


def test_random_files_in_the_place_of_an_index(folder: Path) -> None:
    rng = random.Random(3)
    index = folder / "index.safetensors"
    for length in (0, 1, 8, 16, 64, 1000, 70_000):
        index.write_bytes(rng.randbytes(length))
        with pytest.raises(CorruptCheckpoint, match=r"index\.safetensors"):
            read(folder)
    data = next(iter(sorted((folder / "data").iterdir()))).read_bytes()
    index.write_bytes(data)  # a file of the same format that is no index
    with pytest.raises(HoldfastError, match=r"index\.safetensors"):
        read(folder)


def test_a_save_over_a_damaged_checkpoint_mends_it(folder: Path) -> None:
    (folder / "index.safetensors").write_bytes(b"rubbish that is no index at all")
    write(folder)
    assert is_right(read(folder))
