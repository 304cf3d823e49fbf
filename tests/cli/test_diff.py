"""`holdfast diff`."""

from __future__ import annotations

import argparse
import collections
import decimal
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast._tools.checkpoints import diff
from tests.cli.conftest import EXPERTS, WIDE, Run, data_files, flip, save_ranks, state_of

Json = Callable[..., tuple[Any, int]]
ALONE = holdfast.Job(no_dist=True)


def one_rank(place: Path, **changes: Any) -> Path:
    """The same tensors from one rank: another layout, so that digests can't answer for those cut up."""
    state = state_of(0, 1) | {"layer1": {"weight": torch.full((100, 7), 1.0)}} | changes
    holdfast.save(state, place, job=holdfast.Job(no_dist=True))
    return place


def test_the_same_reads_no_data(kept: Path, checkpoint: Path, run: Run, run_json: Json) -> None:
    for path in data_files(checkpoint):
        size = path.stat().st_size
        path.write_bytes(b"")
        os.truncate(path, size)  # zeros of the same length: their size is looked at, and nothing is read
    found, code = run_json("diff", kept, checkpoint)
    assert (code, found["same"], found["equal"], found["bytes_read"]) == (0, True, 10, 0)
    assert run("diff", kept, checkpoint).stdout == "The same: 10 names, 0 B of data read.\n"


def test_the_same_in_another_layout_is_found_by_reading(kept: Path, tmp_path: Path, run_json: Json) -> None:
    found, code = run_json("diff", kept, one_rank(tmp_path / "b"))
    assert (code, found["same"], found["content"]) == (0, True, [])
    assert found["bytes_read"] == 2 * 4 * (WIDE.numel() + EXPERTS.numel())


def compare(a: Path, b: Path, values: bool = False) -> diff.Compared:
    with holdfast.open(a) as opened:
        return diff.compare(a, b, values, lambda _, name, data: opened.decoded(name, data))


@pytest.mark.parametrize("slab", [10_000, 1 << 16, 1 << 26])
def test_a_difference_in_another_layout_is_found_in_any_slab(
    slab: int, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast._core.io.raw_read.slabs.__defaults__", (slab,))
    wide = WIDE.clone()
    wide[300, 700] += 8192  # a float32 that can be told from its neighbours
    wide[511, 1023] = -1.0
    other = one_rank(tmp_path / "b", wide=wide)
    found = compare(kept, other)
    assert [(item.name, item.parts, item.of, item.first) for item in found.content] == [
        ("wide", 1, 2, (0, 512))
    ]
    assert found.content[0].elements is None
    found = compare(kept, other, values=True)
    assert (found.content[0].elements, found.content[0].largest) == (2, WIDE[511, 1023].item() + 1)
    assert not found.same


def test_everything_that_can_differ(kept: Path, tmp_path: Path, run: Run, run_json: Json) -> None:
    norm = torch.full((64,), 0.5, dtype=torch.bfloat16)
    norm[3] = 2.0
    other = save_ranks(
        tmp_path / "b", norm=norm, scalar=torch.tensor(3.0), empty=torch.zeros(0, 5), lr=0.5,
        args={"a": [1, "x[bold]y"], "c": 1},
    )  # fmt: skip
    found, code = run_json("diff", kept, other)
    assert code == 1
    assert (found["only_a"], found["only_b"]) == (["args.b"], ["args.c"])
    assert found["changed"] == [
        {"name": "empty", "a": "float32[0, 4]", "b": "float32[0, 5]"},
        {"name": "scalar", "a": "int64[]", "b": "float32[]"},
    ]
    content = {item["name"]: item for item in found["content"]}
    assert set(content) == {"lr", "norm"}
    assert (content["lr"]["a"], content["lr"]["b"]) == ("0.25", "0.5")
    assert content["norm"]["elements"] is None
    assert found["equal"] == 5
    found, code = run_json("diff", kept, other, "--values")
    (norm_found,) = [item for item in found["content"] if item["name"] == "norm"]
    assert (norm_found["elements"], norm_found["largest"]) == (1, 1.5)
    shown = run("diff", kept, other, "--values")
    assert shown.exit_code == 1
    for piece in ("only in A", "only in B", "int64[] -> float32[]", "0.25 -> 0.5", "1 element, by up to 1.5"):
        assert piece in shown.stdout
    assert "Different: 6 names; equal: 5" in shown.stdout


def test_objects_are_compared_by_value(tmp_path: Path, run_json: Json) -> None:
    for place, value in (("a", [{"x": 1, "y": 2}]), ("b", [{"y": 2, "x": 1}]), ("c", [{"y": 2, "x": 3}])):
        holdfast.save({"o": value}, tmp_path / place, job=holdfast.Job(no_dist=True))
    assert run_json("diff", tmp_path / "a", tmp_path / "b")[1] == 0
    found, code = run_json("diff", tmp_path / "a", tmp_path / "c")
    assert code == 1
    assert found["content"][0]["kind"] == "object"


NAN = float("nan")
EQUAL: list[tuple[object, object]] = [
    ([NAN, {"b": 1, "a": NAN}], [NAN, {"a": NAN, "b": 1}]),
    ({1: "x", 2: "y", "c": {3: 4, 5: 6}}, {"c": {5: 6, 3: 4}, 2: "y", 1: "x"}),
    ([{frozenset({"a", "b"}), 1}, {"!": 1, "a": 2}], [{1, frozenset({"b", "a"})}, {"a": 2, "!": 1}]),
    (argparse.Namespace(a=1, b={1: 2, 3: 4}), argparse.Namespace(b={3: 4, 1: 2}, a=1)),
]
UNEQUAL: list[tuple[object, object]] = [
    (1, 1.0),
    (True, 1),
    (0.0, -0.0),
    (2**70, float(2**70)),
    ([True], [1]),
    ({"a": 1}, {"a": 1.0}),
    ({1: "a"}, {1.0: "a"}),
    ({1, "a"}, {True, "a"}),
    ((1, 2), [1, 2]),
    ({"a"}, frozenset({"a"})),
    (b"a", bytearray(b"a")),
    (complex(1, 0.0), complex(1, -0.0)),
    (collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1)),
    (collections.OrderedDict(a=1), {"a": 1}),
    (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
    (None, False),
]


@pytest.mark.parametrize(
    ("a", "b", "equal"), [(*pair, True) for pair in EQUAL] + [(*p, False) for p in UNEQUAL]
)
def test_values_of_another_type_differ(a: object, b: object, equal: bool, tmp_path: Path) -> None:
    """Python's == says 1 == 1.0 == True, 0.0 == -0.0, and that no NaN equals itself."""
    for place, value in (("a", a), ("b", b)):
        holdfast.save({"o": [value]}, tmp_path / place, job=holdfast.Job(no_dist=True))
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.same == equal
    assert [content.name for content in found.content] == ([] if equal else ["o"])


PARTS = [1, 2]
SPARSE = torch.eye(3).to_sparse()
OTHERS: list[tuple[object, object, bool]] = [
    ([PARTS, PARTS, torch.bfloat16], [[1, 2], [1, 2], torch.bfloat16], True),
    ({"a": np.arange(3), "b": 1}, {"b": 1, "a": np.arange(3)}, True),
    ({"t": torch.Size([2]), 1: np.float32(math.nan)}, {1: np.float32(math.nan), "t": torch.Size([2])}, True),
    ([SPARSE, PARTS, PARTS], [SPARSE.clone(), [1, 2], [1, 2]], True),
    ([SPARSE], [SPARSE * 2], False),
    (torch.bfloat16, torch.float16, False),
    (np.arange(3), np.arange(3.0), False),
    ([np.zeros(1)], [-np.zeros(1)], False),
    ([np.int64(1), 2], [np.int64(1), 2.0], False),
    ({1: np.int64(1)}, {True: np.int64(1)}, False),
    ({"a": 1}, {"a": np.int64(1)}, False),
    ([np.int64(1)], (np.int64(1),), False),
]


@pytest.mark.parametrize(("a", "b", "equal"), OTHERS)
def test_values_that_json_does_not_have_are_compared(
    a: object, b: object, equal: bool, tmp_path: Path
) -> None:
    """Their encoding also depends on which parts are the same object, and on the order of a dict."""
    for place, value in (("a", a), ("b", b)):
        holdfast.save({"o": [value]}, tmp_path / place, job=ALONE)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert (found.same, found.untold, len(found.content)) == (equal, (), not equal)


def test_objects_of_run_folders_are_compared(tmp_path: Path, run_json: Json) -> None:
    for place, names in (("a", ("x", "y")), ("b", ("y", "x"))):
        state = {"o": [{name: np.arange(3) for name in names}]}
        holdfast.save(state, tmp_path / place / "step-00000001", step=1, job=ALONE)
    found, code = run_json("diff", tmp_path / "a", tmp_path / "b")
    assert (code, found["same"]) == (0, True)


def test_an_export_and_an_import_change_no_value(tmp_path: Path, run: Run) -> None:
    """An import keeps objects as torch DCP has stored them, in torch's encoding."""
    values = {"t": (1, 2), "s": {1, 2}, "z": -0.0, "nan": NAN, "b": b"x", "d": torch.float32}
    holdfast.save({"n": 5, "o": values}, tmp_path / "a", job=ALONE)
    assert run("export", "torch_dist", tmp_path / "a", tmp_path / "dcp").exit_code == 0
    assert run("import", "torch_dist", tmp_path / "dcp", tmp_path / "b").exit_code == 0
    found = compare(tmp_path / "a", tmp_path / "b")
    assert (found.same, found.equal) == (True, 7)
    holdfast.save({"n": 5.0, "o": {**values, "z": 0.0}}, tmp_path / "c", job=ALONE)
    assert [item.name for item in compare(tmp_path / "c", tmp_path / "b").content] == ["n", "o.z"]


class Odd:
    """Of a class that only its owner can compare."""

    def __init__(self, value: int) -> None:
        self.value = value


def test_what_can_not_be_told_is_no_difference(tmp_path: Path, run: Run, run_json: Json) -> None:
    with torch.serialization.safe_globals([Odd]):
        for place, value, more in (("a", 1, {}), ("b", 2, {}), ("c", 1, {"n": 1})):
            holdfast.save({"o": [Odd(value)], **more}, tmp_path / place, job=ALONE)
        known, code = run_json("diff", tmp_path / "a", tmp_path / "b")
    assert (code, known["same"], known["content"]) == (2, False, [])
    found, code = run_json("diff", tmp_path / "a", tmp_path / "b")  # nor is its class allowed now
    assert (code, [item["name"] for item in found["untold"]]) == (2, ["o"])
    shown = run("diff", tmp_path / "a", tmp_path / "b")
    assert "o     can't be told" in shown.stdout
    assert "Can't be told: 1 name; equal: 0" in shown.stdout
    shown = run("diff", tmp_path / "b", tmp_path / "c")
    assert shown.exit_code == 1
    assert "Different: 1 name; can't be told: 1 name; equal: 0" in shown.stdout


def test_a_tensor_and_an_object_under_one_name(tmp_path: Path, run_json: Json) -> None:
    holdfast.save({"o": 5}, tmp_path / "a", job=holdfast.Job(no_dist=True))
    holdfast.save({"o": torch.zeros(2)}, tmp_path / "b", job=holdfast.Job(no_dist=True))
    found, code = run_json("diff", tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert found["changed"] == [{"name": "o", "a": "an object of 2 bytes", "b": "float32[2]"}]


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(torch.uint8, 3.0), (torch.int64, 3.0), (torch.bool, 1.0), (torch.float16, 3.0), (torch.complex64, 3.0),
     (torch.uint16, 3.0), (torch.float64, 3.0), (torch.float8_e4m3fn, None)],
)  # fmt: skip
def test_values_of_all_kinds_of_numbers(
    dtype: torch.dtype, largest: float | None, tmp_path: Path, run_json: Json
) -> None:
    before, after = torch.zeros(100).to(dtype), torch.zeros(100)
    after[7] = 3
    holdfast.save({"w": before}, tmp_path / "a", job=holdfast.Job(no_dist=True))
    holdfast.save({"w": after.to(dtype)}, tmp_path / "b", job=holdfast.Job(no_dist=True))
    found, _ = run_json("diff", tmp_path / "a", tmp_path / "b", "--values")
    assert (found["content"][0]["elements"], found["content"][0]["largest"]) == (1, largest)


def test_infinities_and_nans_are_counted(tmp_path: Path, run_json: Json) -> None:
    holdfast.save(
        {"w": torch.tensor([1.0, float("nan"), 2.0])}, tmp_path / "a", job=holdfast.Job(no_dist=True)
    )
    holdfast.save(
        {"w": torch.tensor([float("inf"), float("nan"), 2.5])}, tmp_path / "b", job=holdfast.Job(no_dist=True)
    )
    found, _ = run_json("diff", tmp_path / "a", tmp_path / "b", "--values")
    assert (found["content"][0]["elements"], found["content"][0]["largest"]) == (2, 0.5)


def test_damage_met_while_reading_is_trouble_not_a_difference(
    checkpoint: Path, tmp_path: Path, run: Run, run_json: Json
) -> None:
    other = one_rank(tmp_path / "b")
    part = run_json("explain", checkpoint, "wide")[0]["parts"][0]
    flip(checkpoint / part["file"], part["start"])
    result = run("diff", checkpoint, other)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is damaged" in result.stderr


@pytest.mark.parametrize(
    ("length", "words"), [(None, "is missing"), (0, "has 0 bytes, but was written with")]
)
def test_a_data_file_that_is_gone_or_short_is_trouble_not_sameness(
    length: int | None, words: str, kept: Path, checkpoint: Path, run: Run
) -> None:
    gone = data_files(checkpoint)[1]
    if length is None:
        gone.unlink()
    else:
        os.truncate(gone, length)
    for pair in ((kept, checkpoint), (checkpoint, kept)):
        result = run("diff", *pair)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"{checkpoint} can't be compared: its data file data/{gone.name} {words}" in result.stderr


def test_an_index_in_the_folder_of_another_step_is_a_difference(
    kept: Path, tmp_path: Path, run: Run, run_json: Json
) -> None:
    moved = Path(shutil.copytree(kept, tmp_path / "step-00000020"))
    found, code = run_json("diff", kept, moved)
    assert (code, found["same"], found["equal"]) == (1, False, 10)
    assert found["misplaced"] == [{"path": str(moved), "folder_step": 20, "index_step": 7}]
    shown = run("diff", kept, moved).stdout
    assert f"{moved} is a folder of step 20; its index is of step 7." in shown
    assert shutil.copytree(kept, tmp_path / "backup").exists()
    assert run("diff", kept, tmp_path / "backup").exit_code == 0, (
        "a folder that is no step's has no step to differ in"
    )


def test_of_a_run_folder_the_newest_committed_step_is_compared(kept: Path, tmp_path: Path, run: Run) -> None:
    for step in (5, 7):
        save_ranks(tmp_path / "run" / f"step-{step:08d}", step=step, lr=0.25 if step == 7 else 0.5)
    (tmp_path / "run" / "step-00000009" / "data").mkdir(parents=True)
    result = run("diff", tmp_path / "run", kept)
    assert result.exit_code == 0
    assert f"A is {tmp_path / 'run' / 'step-00000007'}.\nThe same: 10 names" in result.stdout
    shutil.rmtree(tmp_path / "run" / "step-00000005")
    shutil.rmtree(tmp_path / "run" / "step-00000007")
    result = run("diff", kept, tmp_path / "run")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is a run folder with no committed step; begun were: 9." in result.stderr
