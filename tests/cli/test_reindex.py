"""`holdfast reindex`: the index from the data files alone, or a refusal with a reason."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast._core.format.columns import Columns
from holdfast._core.io.index_file import open_index
from holdfast._core.roster.memory import Board, MemoryRoster
from holdfast._core.store.local import LocalStore
from tests.cli.conftest import WIDE, Run, data_files, flip, save_ranks

Json = Callable[..., tuple[Any, int]]


def lose_index(checkpoint: Path) -> Path:
    (checkpoint / "index.safetensors").unlink()
    return checkpoint


def add_files(checkpoint: Path, other: Path, *ranks: int) -> list[Path]:
    """Files of another attempt into a checkpoint's folder."""
    return [Path(shutil.copy(data_files(other)[rank], checkpoint / "data")) for rank in ranks]


def columns_of(checkpoint: Path) -> Columns:
    with open_index(LocalStore(checkpoint)) as index:
        return index.select()


def test_a_lost_index_comes_back_the_same(checkpoint: Path, run: Run, run_json: Json) -> None:
    before = columns_of(checkpoint)
    lose_index(checkpoint)
    found, code = run_json("reindex", checkpoint)
    assert (code, found["action"], found["step"], found["tensors"]) == (0, "written", 7, 10)
    assert found["files"] == [f"data/{path.name}" for path in data_files(checkpoint)]
    after = columns_of(checkpoint)
    for name in vars(before):
        assert np.array_equal(getattr(before, name), getattr(after, name)), name
    assert run("verify", checkpoint).exit_code == 0
    wide = torch.zeros_like(WIDE)
    assert holdfast.load({"wide": wide}, checkpoint, job=holdfast.Job(no_dist=True)).step == 7
    assert torch.equal(wide, WIDE)


@pytest.mark.parametrize("damage", ["flipped", "short", "empty"])
def test_a_damaged_index_is_replaced(damage: str, checkpoint: Path, run: Run) -> None:
    index = checkpoint / "index.safetensors"
    if damage == "flipped":
        flip(index, index.stat().st_size // 2)
    else:
        index.write_bytes(index.read_bytes()[: {"short": 500, "empty": 0}[damage]])
    result = run("reindex", checkpoint)
    assert result.exit_code == 0, result.stderr
    assert "An index was written" in result.stdout
    assert run("verify", checkpoint).exit_code == 0


def test_a_good_index_is_left_alone(checkpoint: Path, run: Run, run_json: Json) -> None:
    index = checkpoint / "index.safetensors"
    before = index.read_bytes()
    found, code = run_json("reindex", checkpoint)
    assert (code, found["action"], found["tensors"]) == (0, "none", 10)
    assert "nothing was done" in run("reindex", checkpoint).stdout
    assert index.read_bytes() == before
    assert run_json("reindex", checkpoint, "--force")[0]["action"] == "written"
    assert index.read_bytes() != before
    assert run("verify", checkpoint).exit_code == 0


def test_a_dry_run_writes_nothing(checkpoint: Path, run: Run, run_json: Json) -> None:
    lose_index(checkpoint)
    assert run_json("reindex", checkpoint, "--dry-run")[0]["action"] == "would write"
    assert "would be written" in run("reindex", checkpoint, "--dry-run").stdout
    assert not (checkpoint / "index.safetensors").exists()


def test_half_written_files_of_another_attempt_are_left_out(
    checkpoint: Path, tmp_path: Path, run: Run, run_json: Json
) -> None:
    other = save_ranks(tmp_path / "other", step=7)
    (torn,) = add_files(checkpoint, other, 0)
    torn.write_bytes(torn.read_bytes()[:-3000])
    lose_index(checkpoint)
    found, code = run_json("reindex", checkpoint)
    assert (code, found["action"]) == (0, "written")
    assert [item["name"] for item in found["left_out"]] == [f"data/{torn.name}"]
    assert "announces" in found["left_out"][0]["why"]
    assert run("verify", checkpoint).exit_code == 0


def test_two_whole_attempts_are_refused_until_one_is_named(
    checkpoint: Path, tmp_path: Path, run: Run, run_json: Json
) -> None:
    other = save_ranks(tmp_path / "other", step=7, norm=torch.ones(64))
    mine = [path.name for path in data_files(checkpoint)]
    add_files(checkpoint, other, 0, 1)
    lose_index(checkpoint)
    result = run("reindex", checkpoint)
    assert result.exit_code == 2
    assert "2 finished attempts" in result.stderr
    assert not (checkpoint / "index.safetensors").exists()
    found, code = run_json("reindex", checkpoint, "--only", mine[0], "--only", f"data/{mine[1]}")
    assert (code, found["files"]) == (0, [f"data/{name}" for name in mine])
    assert run("diff", checkpoint, other).exit_code == 1


def test_one_rank_of_a_second_attempt_is_left_out(checkpoint: Path, tmp_path: Path, run_json: Json) -> None:
    """Rank 0 wrote twice: both of its files fit rank 1's, but each says which attempt it is of."""
    other = save_ranks(tmp_path / "other", step=7)
    mine = [f"data/{path.name}" for path in data_files(checkpoint)]
    add_files(checkpoint, other, 0)
    lose_index(checkpoint)
    found, code = run_json("reindex", checkpoint)
    assert (code, found["files"]) == (0, mine)


def test_attempts_are_never_mixed(checkpoint: Path, tmp_path: Path, run: Run) -> None:
    """Rank 0 of one attempt and rank 1 of another would cover everything exactly once."""
    other = save_ranks(tmp_path / "other", step=7)
    data_files(checkpoint)[1].unlink()
    add_files(checkpoint, other, 1)
    lose_index(checkpoint)
    result = run("reindex", checkpoint)
    assert result.exit_code == 2
    assert "No save in" in result.stderr
    assert "1 data files are missing, 1 are there" in result.stderr


def test_an_attempt_in_another_layout_that_did_not_finish_is_left_out(
    checkpoint: Path, tmp_path: Path, run: Run, run_json: Json
) -> None:
    """Three of four ranks of another attempt overlap with both of ours, and are not complete."""
    other = save_ranks(tmp_path / "other", world=4, step=7)
    mine = [f"data/{path.name}" for path in data_files(checkpoint)]
    added = add_files(checkpoint, other, 0, 1)
    lose_index(checkpoint)
    found, code = run_json("reindex", checkpoint)
    assert (code, found["files"]) == (0, mine)
    assert {item["name"] for item in found["left_out"]} == {f"data/{path.name}" for path in added}
    assert run("verify", checkpoint).exit_code == 0


@pytest.mark.parametrize("how", ["missing", "short", "embedded", "header"])
def test_what_is_lost_is_refused(how: str, checkpoint: Path, run: Run) -> None:
    lose_index(checkpoint)
    second = data_files(checkpoint)[1]
    if how == "missing":
        second.unlink()
    elif how == "short":
        second.write_bytes(second.read_bytes()[:-1])
    else:
        flip(second, {"embedded": -50, "header": 20}[how])
    result = run("reindex", checkpoint)
    assert result.exit_code == 2
    assert result.stderr.startswith("holdfast: ")
    assert not (checkpoint / "index.safetensors").exists()


def test_a_lost_file_of_names_that_only_it_held_is_noticed(tmp_path: Path, run: Run) -> None:
    """Without rank 1 the others still tile all they name: its own tensors would vanish silently."""
    board, states = Board(), ({"a": torch.ones(4)}, {"b": torch.ones(5)})

    def save(rank: int) -> None:
        holdfast.save(states[rank], tmp_path / "c", job=holdfast.Job(roster=MemoryRoster(rank, 2, board)))

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    data_files(tmp_path / "c")[1].unlink()
    lose_index(tmp_path / "c")
    result = run("reindex", tmp_path / "c")
    assert result.exit_code == 2
    assert "1 data files are missing" in result.stderr


def test_the_layout_and_the_notes_come_back(tmp_path: Path, run_json: Json) -> None:
    place = tmp_path / "step"
    holdfast.save(
        {"a": torch.ones(4)}, place, step=3, job=holdfast.Job(grid=holdfast.Grid(1)), notes={"who": "me"}
    )
    before, _ = run_json("inspect", place)
    lose_index(place)
    run_json("reindex", place)
    after, _ = run_json("inspect", place)
    assert (after["grid"], after["notes"], after["step"]) == (before["grid"], {"who": "me"}, 3)


def test_a_renamed_file_is_not_taken(checkpoint: Path, run: Run) -> None:
    first = data_files(checkpoint)[0]
    first.rename(first.with_name("000000000000-r00000.safetensors"))
    lose_index(checkpoint)
    result = run("reindex", checkpoint)
    assert result.exit_code == 2
    assert "renamed" in result.stderr


def test_only_takes_names_inside_the_data_folder(checkpoint: Path, run: Run) -> None:
    lose_index(checkpoint)
    for name in ("../x.safetensors", "/etc/passwd", "nothing.safetensors"):
        result = run("reindex", checkpoint, "--only", name)
        assert result.exit_code == 2
        assert "has no data file" in result.stderr
