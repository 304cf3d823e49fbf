"""`holdfast reindex`: the index from the data files alone, or a refusal with a reason."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.flow.places import opened
from holdfast.format.index import Columns
from holdfast.plan.choose import choices
from holdfast.store.local import LocalStore
from tests.cli.conftest import WIDE, Run, data_files, flip, save_ranks

Json = Callable[..., tuple[Any, int]]


def lose_index(checkpoint: Path) -> Path:
    (checkpoint / "index.safetensors").unlink()
    return checkpoint


def add_files(checkpoint: Path, other: Path, *ranks: int) -> list[Path]:
    """Files of another attempt into a checkpoint's folder."""
    return [Path(shutil.copy(data_files(other)[rank], checkpoint / "data")) for rank in ranks]


def columns_of(checkpoint: Path) -> Columns:
    with opened(LocalStore(checkpoint)) as index:
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
    assert holdfast.load({"wide": wide}, checkpoint, no_dist=True).step == 7
    assert torch.equal(wide, WIDE)


@pytest.mark.parametrize("damage", ["flipped", "short", "empty"])
def test_a_damaged_index_is_replaced(damage: str, checkpoint: Path, run: Run) -> None:
    index = checkpoint / "index.safetensors"
    if damage == "flipped":
        flip(index, 3000)
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
    assert "several attempts" in result.stderr
    assert not (checkpoint / "index.safetensors").exists()
    found, code = run_json("reindex", checkpoint, "--only", mine[0], "--only", f"data/{mine[1]}")
    assert (code, found["files"]) == (0, [f"data/{name}" for name in mine])
    assert run("diff", checkpoint, other).exit_code == 1


def test_one_rank_of_a_second_attempt_is_refused(checkpoint: Path, tmp_path: Path, run: Run) -> None:
    """Rank 0 finished twice: both of its files fit rank 1's, and nobody knows which was committed."""
    other = save_ranks(tmp_path / "other", step=7)
    add_files(checkpoint, other, 0)
    lose_index(checkpoint)
    result = run("reindex", checkpoint)
    assert result.exit_code == 2
    assert "several attempts" in result.stderr


def test_attempts_of_different_steps_are_never_mixed(checkpoint: Path, tmp_path: Path, run: Run) -> None:
    """Rank 0 of step 7 and rank 1 of step 8 would cover everything exactly once."""
    other = save_ranks(tmp_path / "other", step=8)
    data_files(checkpoint)[1].unlink()
    add_files(checkpoint, other, 1)
    lose_index(checkpoint)
    result = run("reindex", checkpoint)
    assert result.exit_code == 2
    assert "No set of the 2 whole data files" in result.stderr


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


@pytest.mark.parametrize("cut", [-1, 30])
def test_a_broken_file_with_names_of_its_own_is_not_forgotten(cut: int, tmp_path: Path, run: Run) -> None:
    """Without rank 1 the others still tile all they name: its own tensors would vanish silently."""
    board = {"a": torch.ones(4)}, {"b": torch.ones(5)}
    for rank, state in enumerate(board):
        holdfast.save(state, tmp_path / f"{rank}", no_dist=True)
    shutil.copytree(tmp_path / "0", tmp_path / "c")
    (file,) = add_files(tmp_path / "c", tmp_path / "1", 0)
    file.write_bytes(file.read_bytes()[:cut])
    lose_index(tmp_path / "c")
    result = run("reindex", tmp_path / "c")
    assert result.exit_code == 2
    assert ("holds 'b', which no whole file does" if cut == -1 else "nobody knows") in result.stderr


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


def _file(*intervals: tuple[int, int]) -> Columns:
    """A file that holds intervals of one tensor of 6 elements."""
    return Columns(
        names=["t"],
        dtype=np.zeros(1, "u1"),
        kind=np.zeros(1, "u1"),
        ndim=np.ones(1, "u1"),
        shape=np.asarray([[6]], "<i8"),
        chunk_end=np.asarray([len(intervals)], "<i8"),
        offset=np.asarray([[low] for low, _ in intervals], "<i8").reshape(-1, 1),
        size=np.asarray([[high - low] for low, high in intervals], "<i8").reshape(-1, 1),
        file=np.zeros(len(intervals), "<i4"),
    )


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=7))
def test_choices_are_those_of_trying_all_sets(intervals: list[tuple[int, int]]) -> None:
    spans = [(low, min(low + length, 6)) for low, length in intervals]
    right = [
        list(chosen)
        for count in range(1, len(spans) + 1)
        for chosen in itertools.combinations(range(len(spans)), count)
        if sorted(at for i in chosen for at in range(*spans[i])) == list(range(6))
    ]
    found = choices([_file(span) for span in spans])
    assert len(found) == min(len(right), 2)
    assert all(choice in right for choice in found)


def test_a_search_that_is_given_up_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    import holdfast.plan.choose as module
    from holdfast.errors import CoverageError

    files = [_file((0, 3)), _file((3, 6)), _file((0, 6))]
    monkeypatch.setattr(module, "MOST_STEPS", 4)
    with pytest.raises(CoverageError, match="too many sets"):
        choices(files)
    monkeypatch.setattr(module, "MOST_STEPS", 20)
    assert sorted(choices(files)) == [[0, 1], [2]]
