"""`holdfast verify` finds every damage, and only damage."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast._core.format.index import Index
from holdfast._core.format.index_layout import encode
from holdfast._tools.checkpoints.verify import verify
from tests.cli.conftest import Run, data_files, flip, save_ranks

Json = Callable[..., tuple[Any, int]]


def parts_of(run_json: Json, checkpoint: Path, name: str) -> list[dict[str, Any]]:
    return list(run_json("explain", checkpoint, name)[0]["parts"])


def test_a_whole_checkpoint(kept: Path, run: Run, run_json: Json) -> None:
    found, code = run_json("verify", kept)
    assert (code, found["whole"], found["damage"]) == (0, True, [])
    assert (found["step"], found["files"]) == (7, 2)
    assert found["bytes_checked"] > 512 * 1024 * 4
    assert ": whole (" in run("verify", kept).stdout
    found, code = run_json("verify", kept, "--quick")
    assert (code, found["whole"], found["bytes_checked"]) == (0, True, 0)


@pytest.mark.parametrize("threads", ["1", "3"])
def test_data_damage_is_named_by_file_tensor_and_bytes(
    threads: str, checkpoint: Path, run: Run, run_json: Json
) -> None:
    first, second = parts_of(run_json, checkpoint, "wide")
    flip(checkpoint / first["file"], first["start"] + 5)
    flip(checkpoint / first["file"], first["start"] + first["block"] + 5)  # the next block: one range
    flip(checkpoint / second["file"], second["stop"] - 1)
    (norm, *_) = parts_of(run_json, checkpoint, "norm")
    flip(checkpoint / norm["file"], norm["start"], 7)
    found, code = run_json("verify", checkpoint, "--threads", threads)
    assert code == 1
    seen = {(item["file"], item["tensor"], item["start"], item["stop"]) for item in found["damage"]}
    assert seen == {
        (first["file"], "wide", first["start"], first["start"] + 2 * first["block"]),
        (second["file"], "wide", second["stop"] - second["block"], second["stop"]),
        (norm["file"], "norm", norm["start"], norm["stop"]),
    }
    result = run("verify", checkpoint)
    assert result.exit_code == 1
    assert "3 findings" in result.stdout
    assert f"{norm['start']}-{norm['stop']}" in result.stdout
    assert run("verify", checkpoint, "--quick").exit_code == 0


def test_any_flipped_bit_of_any_file_is_found(kept: Path, tmp_path: Path) -> None:
    """Headers, data, embedded indexes and the index, in a small checkpoint: nothing goes unnoticed."""
    import torch

    place = save_ranks(tmp_path / "c", wide=torch.zeros(3))
    draw = random.Random(5)
    for path in [*data_files(place), place / "index.safetensors"]:
        good = path.read_bytes()
        spots = [*range(8), *(draw.randrange(len(good)) for _ in range(150)), len(good) - 1]
        for at in spots:
            flip(path, at, draw.randrange(8))
            found = verify(place)
            assert found.whole is False, f"byte {at} of {path.name}"
            path.write_bytes(good)
    assert verify(place).whole


@pytest.mark.parametrize("part", ["dtype", "shape"])
def test_the_embedded_index_is_listed_in_the_header_as_it_was_written(
    checkpoint: Path, part: str, run_json: Json
) -> None:
    """No digest covers that entry, and other readers of safetensors refuse a file in which it is wrong."""
    first = data_files(checkpoint)[0]
    data = first.read_bytes()
    wrong = {"dtype": (b'"dtype":"U8"', b'"dtype":"I8"'), "shape": (b'"shape":[', b'"shape":[9')}[part]
    low = data.index(b'"__holdfast__"')
    stop = data.index(b"}", low) + 1
    entry = data[low:stop].replace(*wrong, 1)
    entry = entry[: entry.index(b"9") + 1] + entry[entry.index(b"9") + 2 :] if part == "shape" else entry
    assert len(entry) == stop - low
    first.write_bytes(data[:low] + entry + data[stop:])
    found, code = run_json("verify", checkpoint, "--quick")
    assert (code, found["whole"]) == (1, False)
    assert "'__holdfast__'" in found["damage"][0]["problem"]


@contextmanager
def as_nobody() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("closed", ["index.safetensors", "data/*"])
def test_what_this_user_may_not_read_is_not_called_damaged(kept: Path, run: Run, closed: str) -> None:
    assert run("verify", kept).exit_code == 0  # imports what the other user may not reach
    place = Path(tempfile.mkdtemp(dir="/dev/shm"))  # nor may it reach pytest's folders
    alone, among = place / "alone", place / "among"
    try:
        place.chmod(0o755)
        for step in (alone / "step-00000007", *(among / f"step-0000000{number}" for number in (6, 7, 8))):
            shutil.copytree(kept, step)
            for path in step.glob(closed) if step.name == "step-00000007" else ():
                path.chmod(0)
        with as_nobody():
            step = alone / "step-00000007"
            results = [run("verify", step), run("verify", step, "--quick"), run("verify", alone)]
            shown, others = run("inspect", alone).stdout, run("verify", among)
        shutil.rmtree(among / "step-00000006" / "data")
        with as_nobody():
            damaged = run("verify", among)
    finally:
        shutil.rmtree(place)
    for found in results:
        assert (found.exit_code, found.stdout) == (2, "")
        assert "Permission denied" in found.stderr
        assert "Give this user the right" in found.stderr
    assert "damaged" not in shown
    assert ("not known: Opening" in shown) == (closed == "index.safetensors")
    said = [line.partition(": ")[2] for line in others.stdout.splitlines()]
    assert [words.partition(" (")[0].partition(":")[0] for words in said] == ["whole", "whole", "not known"]
    assert (others.exit_code, damaged.exit_code) == (2, 1)
    assert "damaged, " in damaged.stdout
    assert "not known: " in damaged.stdout


def test_quick_sees_headers_and_embedded_indexes(checkpoint: Path, run_json: Json) -> None:
    first, second = data_files(checkpoint)
    data = bytearray(first.read_bytes())
    at = data.index(b'"layer0.weight"')
    data[at + 1 : at + 2] = b"m"
    first.write_bytes(data)
    flip(second, -40)
    found, code = run_json("verify", checkpoint, "--quick")
    assert code == 1
    assert {item["file"] for item in found["damage"]} == {f"data/{first.name}", f"data/{second.name}"}
    assert "layer0.weight" in {item["tensor"] for item in found["damage"]}


def test_truncated_and_missing_files_name_what_is_lost(checkpoint: Path, run_json: Json) -> None:
    first, second = data_files(checkpoint)
    names, file = ("wide", "norm", "layer0.weight", "experts"), f"data/{first.name}"
    last = max(
        (part for name in names for part in parts_of(run_json, checkpoint, name) if part["file"] == file),
        key=lambda part: int(part["stop"]),
    )  # fmt: skip
    first.write_bytes(first.read_bytes()[: last["stop"] - 4])
    second.unlink()
    found, code = run_json("verify", checkpoint)
    assert code == 1
    cut = [item for item in found["damage"] if item["file"] == f"data/{first.name}"]
    assert any("bytes, but was written with" in item["problem"] for item in cut)
    assert any((item["start"], item["stop"]) == (last["stop"] - 4, last["stop"]) for item in cut)
    gone = [item for item in found["damage"] if item["file"] == f"data/{second.name}"]
    assert gone[0]["problem"] == "the file is missing"
    assert {"layer1.weight", "wide", "experts"} <= {item["tensor"] for item in gone}


def test_a_longer_file_is_damage(checkpoint: Path, run_json: Json) -> None:
    first = data_files(checkpoint)[0]
    size = first.stat().st_size
    first.write_bytes(first.read_bytes() + b"more")
    found, code = run_json("verify", checkpoint)
    assert code == 1
    assert [(item["start"], item["stop"]) for item in found["damage"]] == [(size, size + 4)]


def test_every_bad_page_of_the_index_is_listed(tmp_path: Path, run_json: Json) -> None:
    import torch

    import holdfast

    holdfast.save({f"n{at}": torch.zeros(1) for at in range(9000)}, tmp_path, job=holdfast.Job(no_dist=True))
    index = tmp_path / "index.safetensors"
    body = int.from_bytes(index.read_bytes()[:8], "little") + 8
    for page in (0, 2, 3):
        flip(index, body + page * 65536 + 9)
    found, code = run_json("verify", tmp_path)
    assert code == 1
    assert [item["start"] - body for item in found["damage"]] == [0, 2 * 65536, 3 * 65536]


def test_an_index_that_tiles_nothing_is_damage_although_its_digests_are_good(
    checkpoint: Path, run_json: Json
) -> None:
    """Two tensors whose boxes were swapped for their neighbours': the first is named."""
    path = checkpoint / "index.safetensors"
    raw = path.read_bytes()
    columns = Index(lambda at, length: raw[at : at + length], len(raw), "x").select()
    offset = np.array(columns.offset)
    tensor = [columns.names[row] for row in columns.tensor_of_chunk()]
    for name in ("experts", "wide"):
        mine = [at for at, other in enumerate(tensor) if other == name]
        offset[mine[1]] = offset[mine[0]]
    columns.offset = offset
    path.write_bytes(encode(columns, {"step": 7}))
    found, code = run_json("verify", checkpoint, "--quick")
    assert code == 1
    untiled = [item["tensor"] for item in found["damage"] if "do not tile" in item["problem"]]
    assert untiled == ["experts"]


def test_files_of_another_checkpoint_are_damage(checkpoint: Path, tmp_path: Path, run_json: Json) -> None:
    """Same names, same sizes, another step's content: embedded and main index disagree."""
    other = save_ranks(tmp_path / "other", step=8, norm=__import__("torch").zeros(64).bfloat16())
    for mine, theirs in zip(data_files(checkpoint), data_files(other), strict=True):
        shutil.copyfile(theirs, mine)
    found, code = run_json("verify", checkpoint, "--quick")
    assert code == 1
    problems = {item["problem"] for item in found["damage"]}
    assert any("step 8" in problem for problem in problems)
    assert "norm" in {item["tensor"] for item in found["damage"]}


def test_a_run_is_all_its_committed_steps(kept: Path, tmp_path: Path, run: Run, run_json: Json) -> None:
    for step in (1, 2, 3):
        shutil.copytree(kept, tmp_path / f"step-{step:08d}")
    (tmp_path / "step-00000003" / "index.safetensors").unlink()
    found, code = run_json("verify", tmp_path)
    assert (code, [step["whole"] for step in found["steps"]]) == (0, [True, True])
    flip(data_files(tmp_path / "step-00000002")[0], -200)
    found, code = run_json("verify", tmp_path)
    assert (code, [step["whole"] for step in found["steps"]]) == (1, [True, False])
    shown = run("verify", tmp_path).stdout
    assert "step-00000001: whole" in shown
    assert "step-00000002: damaged" in shown


def test_a_run_without_a_step_that_can_be_checked_is_not_called_whole(tmp_path: Path, run: Run) -> None:
    (tmp_path / "run" / "step-00000001" / "data").mkdir(parents=True)  # a save that was killed
    found = run("verify", tmp_path / "run")
    assert found.exit_code == 2
    assert "no committed step" in found.stderr


def test_a_link_out_of_the_checkpoint_is_not_followed(
    checkpoint: Path, tmp_path: Path, run_json: Json
) -> None:
    first = data_files(checkpoint)[0]
    outside = tmp_path / "outside"
    shutil.move(first, outside)
    first.symlink_to(outside)
    found, code = run_json("verify", checkpoint)
    assert code == 1
    assert "leaves its folder" in found["damage"][0]["problem"]


def test_progress_ends_at_the_total(kept: Path) -> None:
    told: list[tuple[int, int]] = []
    found = verify(kept, progress=lambda done, total: told.append((done, total)))
    assert found.whole
    assert told[-1][0] == told[-1][1] > 0


def test_a_file_under_another_name_than_its_own_is_damage(checkpoint: Path, run_json: Json) -> None:
    """A file that was moved, and an index that was made to say so: the file itself disagrees."""
    first = data_files(checkpoint)[0]
    moved = first.rename(first.with_name("000000000000-r00000.safetensors"))
    path = checkpoint / "index.safetensors"
    raw = path.read_bytes()
    columns = Index(lambda at, length: raw[at : at + length], len(raw), "x").select()
    columns.file_names = [
        f"data/{moved.name}" if name == f"data/{first.name}" else name for name in columns.file_names
    ]
    path.write_bytes(encode(columns, {"step": 7}))
    found, code = run_json("verify", checkpoint)
    assert code == 1
    assert [item["file"] for item in found["damage"]] == [f"data/{moved.name}"]
    assert first.name in found["damage"][0]["problem"]


def test_an_index_may_say_anything_of_itself(checkpoint: Path, run: Run, run_json: Json) -> None:
    path = checkpoint / "index.safetensors"
    raw = path.read_bytes()
    columns = Index(lambda at, length: raw[at : at + length], len(raw), "x").select()
    path.write_bytes(
        encode(columns, {"step": "x", "created": [], "ranks": True, "versions": 3, "notes": [None]})
    )
    assert run_json("inspect", checkpoint)[0]["step"] is None
    assert run("inspect", checkpoint).exit_code == 0
    assert run_json("verify", checkpoint)[0]["whole"] is False  # the files say step 7
    assert run("reindex", checkpoint).exit_code == 0
    assert run("diff", checkpoint, checkpoint).exit_code == 0


def test_no_damage_ends_in_a_traceback(tmp_path: Path, run: Run) -> None:
    """Several bytes at once, stretches of zeros, cuts: every command ends in one of its exit codes."""
    import torch

    place = save_ranks(tmp_path / "step-00000001", step=1, wide=torch.zeros(3))
    good = {path: path.read_bytes() for path in [*data_files(place), place / "index.safetensors"]}
    draw = random.Random(11)
    for turn in range(60):
        for path, data in good.items():
            bad = bytearray(data)
            at = draw.randrange(len(bad)) if turn % 2 else draw.randrange(min(len(bad), 600))
            if turn % 3 == 0:
                bad[at : at + 40] = draw.randbytes(len(bad[at : at + 40]))
            elif turn % 3 == 1:
                bad[at : at + 3] = bytes(len(bad[at : at + 3]))
            else:
                del bad[at:]
            path.write_bytes(bad if draw.random() < 0.6 else data)
        for call in (
            ("inspect", place, "--chunks"), ("inspect", tmp_path),
            ("verify", place), ("explain", place, "norm"),
            ("diff", place, place, "--values"), ("reindex", place, "--dry-run"), ("latest", tmp_path),
            ("reindex", place, "--dry-run", "--force"), ("prune", tmp_path, "--dry-run", "--older-than", "0"),
        ):  # fmt: skip
            assert run(*call).exit_code in (0, 1, 2)
