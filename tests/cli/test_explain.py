"""`holdfast explain`: true to the files, and to what a reader reads."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast._core.format.digest import digest, hex_digest
from holdfast._core.io.index_file import open_index
from holdfast._core.io.raw_read import read_box
from holdfast._core.layout.box import Box
from holdfast._core.plan.read import touched_blocks
from holdfast._core.store.local import LocalStore
from holdfast._tools.checkpoints.explain import explain, parse_box
from holdfast._tools.checkpoints.needed import needed
from holdfast.errors import MissingTensors
from tests.cli.conftest import WIDE, Run

Json = Callable[..., tuple[Any, int]]


class Counting(LocalStore):
    """Notes the byte ranges that are read of each file."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read: dict[str, set[int]] = {}

    def open(self, path: str) -> Any:
        reader, seen = super().open(path), self.read.setdefault(path, set())
        inner = reader.read_into

        def noted(start: int, buffers: Any) -> int:
            seen.update(range(start, start + sum(map(len, buffers))))
            return int(inner(start, buffers))

        reader.read_into = noted  # type: ignore[method-assign]
        return reader


def test_parts_are_where_they_are_said_to_be(kept: Path, run: Run, run_json: Json) -> None:
    found, code = run_json("explain", kept, "wide")
    assert code == 0
    assert (found["dtype"], found["shape"], found["size"]) == ("float32", [512, 1024], [512, 1024])
    assert found["bytes_wanted"] == found["bytes_read"] == WIDE.nbytes
    assert [part["rank"] for part in found["parts"]] == [0, 1]
    for part in found["parts"]:
        data = (kept / part["file"]).read_bytes()[part["start"] : part["stop"]]
        low = part["offset"][1]
        assert np.array_equal(np.frombuffer(data, "<f4").reshape(512, 512), WIDE.numpy()[:, low : low + 512])
        blocks = [data[at : at + part["block"]] for at in range(0, len(data), part["block"])]
        assert part["digests"] == [hex_digest(digest(block)) for block in blocks]
        assert part["ranges"] == [[part["start"], part["stop"]]]
    shown = run("explain", kept, "wide").stdout
    assert "0:512,512:1024" in shown
    assert "14 more" in shown


@pytest.mark.parametrize(
    ("name", "box"),
    [
        ("wide", "0:4,500:520"),
        ("wide", "100:300,0:10"),
        ("wide", "511,:"),
        ("wide", ":,:"),
        ("experts", "3:5,1:2,:"),
        ("norm", "0:1"),
        ("scalar", ""),
        ("empty", ":,:"),
        ("wide", "4:4,:"),
    ],
)
def test_a_box_names_just_the_bytes_that_a_reader_reads(name: str, box: str, kept: Path) -> None:
    found = explain(kept, name, box)
    wanted: dict[str, set[int]] = {}
    for part in found.parts:
        for start, stop in part.ranges:
            wanted.setdefault(part.file, set()).update(range(start, stop))
    store = Counting(kept)
    with open_index(store) as index:
        columns = index.select(index.find([name]))
        assert found.offset is not None
        assert found.size is not None
        data = read_box(store, columns, Box(found.offset, found.size), "here")
    assert {file: seen for file, seen in store.read.items() if seen} == wanted
    assert len(data) == found.bytes_wanted
    assert found.bytes_read == sum(map(len, wanted.values()))


def test_a_box_as_text_and_json(kept: Path, run: Run, run_json: Json) -> None:
    found, _ = run_json("explain", kept, "wide", "--box", "0:4,500:520")
    assert [(part["offset"], part["shape"]) for part in found["parts"]] == [
        ([0, 500], [4, 12]),
        ([0, 512], [4, 8]),
    ]
    assert (found["bytes_wanted"], found["bytes_read"]) == (4 * 20 * 4, 2 * 65536)
    assert "is 320 bytes; a reader reads 131072 bytes" in run(
        "explain", kept, "wide", "--box", "0:4,500:520"
    ).stdout  # fmt: skip


@pytest.mark.parametrize("box", ["0:4", "0:4,0:4,0:4", "a:b,:", "0:513,:", "-1:2,:", "4:2,:", ""])
def test_a_bad_box_is_a_sentence(box: str, kept: Path, run: Run) -> None:
    result = run("explain", kept, "wide", "--box", box)
    assert result.exit_code == 2
    assert result.stderr.startswith("holdfast: ")


def test_of_a_run_folder_the_newest_committed_step_is_looked_at(kept: Path, run: Run, run_json: Json) -> None:
    found, code = run_json("explain", kept.parent, "wide")
    assert (code, found["path"]) == (0, str(kept))
    assert str(kept) in run("explain", kept.parent, "wide").stdout


def test_a_name_that_is_not_there_names_the_nearest(kept: Path, run: Run) -> None:
    result = run("explain", kept, "layer0.wieght")
    assert result.exit_code == 2
    assert "The nearest name that is there is 'layer0.weight'" in result.stderr


def test_the_nearest_of_many_names_is_found_among_a_few_thousand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To compare with each name takes seconds where there are 100,000."""
    state = {f"{number}": {"bias": 0, "weight": 0} for number in range(2500)}
    holdfast.save(state, tmp_path / "a", job=holdfast.Job(no_dist=True))
    compared: list[str] = []
    really_set = difflib.SequenceMatcher.set_seq1

    def noted(self: Any, name: str) -> None:
        compared.append(name)
        really_set(self, name)

    monkeypatch.setattr(difflib.SequenceMatcher, "set_seq1", noted)
    with pytest.raises(MissingTensors) as caught:
        explain(tmp_path / "a", "x1234.weight")
    assert caught.value.hint == "The nearest name that is there is '1234.weight'."
    assert 0 < len(compared) < 2500
    assert not any(name.endswith("bias") for name in compared)


def test_boxes_are_read_as_people_write_them() -> None:
    assert parse_box("1:3, 2 ,:", (4, 5, 6)) == Box((1, 2, 0), (2, 1, 6))
    assert parse_box(":2,3:,0:0", (4, 5, 6)) == Box((0, 3, 0), (2, 2, 0))
    assert parse_box("", ()) == Box((), ())


@given(st.data())
def test_touched_blocks_are_those_of_every_element(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    offset = tuple(data.draw(st.integers(0, side - 1)) for side in shape)
    size = tuple(data.draw(st.integers(1, side - o)) for side, o in zip(shape, offset, strict=True))
    itemsize, block = data.draw(st.sampled_from([1, 2, 8])), data.draw(st.integers(8, 64))
    if not shape:
        block = itemsize
    flat = np.arange(int(np.prod(shape))).reshape(shape)[Box(offset, size).slices()].ravel()
    wanted = {int(at) * itemsize // block for at in flat}
    wanted |= {(int(at) * itemsize + itemsize - 1) // block for at in flat}
    assert touched_blocks(shape, Box(offset, size), itemsize, block).tolist() == sorted(wanted)


def test_needed_counts_tensors_of_any_number_of_dimensions(kept: Path) -> None:
    """In the whole index every tensor is padded to the widest one's number of dimensions."""
    with open_index(LocalStore(kept)) as index:
        columns = index.select()
        row = columns.names.index("norm")
        parts = needed(columns, row, Box((3,), (5,)))
    assert [(part.offset, part.shape) for part in parts] == [((3,), (5,))]
