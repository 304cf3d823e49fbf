"""`holdfast prune` removes what no index names, and nothing else."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run, data_files, flip, save_ranks

Json = Callable[..., tuple[Any, int]]


def step(run_folder: Path, number: int) -> Path:
    return run_folder / f"step-{number:08d}"


def age(path: Path, seconds: float = 7200) -> None:
    """Make a file, or all in a folder, look old."""
    then = time.time() - seconds
    for one in [path, *path.rglob("*")]:
        os.utime(one, (then, then), follow_symlinks=False)


def tree(path: Path) -> set[str]:
    return {str(one.relative_to(path)) for one in path.rglob("*")}


@pytest.fixture
def swept(kept: Path, tmp_path: Path) -> Path:
    """Steps 1 and 2 committed, 2 with left-overs of another attempt, 3 and 4 never committed; all old."""
    folder = tmp_path / "run"
    for number in (1, 2, 3):
        shutil.copytree(kept, step(folder, number))
    for name in ("aaaaaaaaaaaa-r00000.safetensors", "aaaaaaaaaaaa-r00001-002.safetensors"):
        (step(folder, 2) / "data" / name).write_bytes(b"x" * 1000)
    (step(folder, 2) / ".publishing-0011223344556677").write_bytes(b"y" * 10)
    (step(folder, 3) / "index.safetensors").unlink()
    step(folder, 4).mkdir()
    age(folder)
    return folder


def test_left_overs_go_and_nothing_else(swept: Path, run_json: Json, run: Run) -> None:
    before = tree(swept)
    lost = sum(path.stat().st_size for path in data_files(step(swept, 3)))
    found, code = run_json("prune", swept)
    assert code == 0
    gone = before - tree(swept)
    assert gone == {
        "step-00000002/data/aaaaaaaaaaaa-r00000.safetensors",
        "step-00000002/data/aaaaaaaaaaaa-r00001-002.safetensors",
        "step-00000002/.publishing-0011223344556677",
        "step-00000003",
        "step-00000003/data",
        *(f"step-00000003/data/{path.name}" for path in data_files(step(swept, 1))),
        "step-00000004",
    }
    assert found["bytes_freed"] == 2010 + lost
    assert {item["path"] for item in found["removed"]} == gone - {"step-00000003/data"}
    assert (found["kept"], found["skipped"]) == ([1, 2], [])
    assert run("verify", swept).exit_code == 0
    assert "0 B freed; 2 committed steps kept." in run("prune", swept).stdout


def test_a_dry_run_lists_the_same_and_removes_nothing(swept: Path, run_json: Json, run: Run) -> None:
    before = tree(swept)
    planned, code = run_json("prune", swept, "--keep", "1", "--dry-run")
    assert (code, planned["dry_run"]) == (0, True)
    shown = run("prune", swept, "--dry-run").stdout
    assert "would go" in shown
    assert "would be freed" in shown
    assert tree(swept) == before
    done, _ = run_json("prune", swept, "--keep", "1")
    assert done == planned | {"dry_run": False}
    assert tree(swept) != before


def test_one_young_file_keeps_all_left_overs_of_its_folder(swept: Path, run_json: Json) -> None:
    (step(swept, 2) / "data" / "aaaaaaaaaaaa-r00000.safetensors").touch()
    data_files(step(swept, 3))[1].touch()
    step(swept, 4).touch()
    before = tree(swept)
    found, code = run_json("prune", swept)
    assert (code, found["removed"], tree(swept)) == (0, [], before)
    assert {item["path"] for item in found["skipped"]} == {f"step-0000000{n}" for n in (2, 3, 4)}
    found, _ = run_json("prune", swept, "--older-than", "0")
    assert {"step-00000003", "step-00000004"} <= {item["path"] for item in found["removed"]}


def test_keep_counts_committed_steps_and_never_takes_the_newest(
    swept: Path, run_json: Json, run: Run
) -> None:
    found, _ = run_json("prune", swept, "--keep", "1")
    assert found["kept"] == [2]
    assert not step(swept, 1).exists()
    assert run("verify", step(swept, 2)).exit_code == 0
    assert run("prune", swept, "--keep", "0").exit_code == 2
    assert run("prune", swept, "--keep", "1", "--older-than", "0").exit_code == 0
    assert step(swept, 2).exists()
    assert run("prune", swept, "--keep", "5").exit_code == 0


def test_a_strangers_folders_in_an_old_step_stay_and_the_rest_goes(
    kept: Path, tmp_path: Path, run_json: Json
) -> None:
    folder = tmp_path / "run"
    for number in (1, 2):
        shutil.copytree(kept, step(folder, number))
    theirs = {"notes/mine.txt", "data/0/mine.txt"}  # before our files, in the order of names
    for name in theirs:
        (step(folder, 1) / name).parent.mkdir()
        (step(folder, 1) / name).write_text("mine")
    ours = sum(path.stat().st_size for path in kept.rglob("*.safetensors"))
    found, _ = run_json("prune", folder, "--keep", "1")
    [removed] = found["removed"]
    assert removed["bytes"] == ours
    assert tree(step(folder, 1)) == {*theirs, "notes", "data", "data/0"}


def test_a_step_with_an_unreadable_index_is_left_alone_and_does_not_count(
    swept: Path, run_json: Json
) -> None:
    """The newest step is damaged: its files may be all there is, and the good one before it must stay."""
    index = step(swept, 2) / "index.safetensors"
    flip(index, index.stat().st_size // 2)
    age(swept)
    before = tree(step(swept, 2))
    found, code = run_json("prune", swept, "--keep", "1")
    assert (code, found["kept"]) == (0, [1])
    assert tree(step(swept, 2)) == before
    assert "can't be read" in found["skipped"][0]["why"]


def test_an_old_step_that_is_being_overwritten_stays(swept: Path, run_json: Json) -> None:
    (step(swept, 1) / "data" / "bbbbbbbbbbbb-r00000.safetensors").write_bytes(b"z")
    found, _ = run_json("prune", swept, "--keep", "1")
    assert found["kept"] == [1, 2]
    assert step(swept, 1).exists()


def test_links_are_not_followed(swept: Path, kept: Path, tmp_path: Path, run_json: Json) -> None:
    outside = tmp_path / "outside"
    shutil.copytree(kept, outside)
    (outside / "index.safetensors").unlink()
    age(outside)
    step(swept, 5).symlink_to(outside)
    step(swept, 6).mkdir()
    (step(swept, 6) / "data").symlink_to(outside / "data")
    age(swept)
    before = tree(outside)
    found, _ = run_json("prune", swept)
    assert tree(outside) == before
    assert {item["path"] for item in found["skipped"]} == {"step-00000005", "step-00000006"}


def test_other_formats_checkpoints_stay(swept: Path, run_json: Json) -> None:
    """Under names that Holdfast gives, too, and with `--keep`."""
    for number in (3, 9):
        (step(swept, number)).mkdir(exist_ok=True)
        (step(swept, number) / ".metadata").write_bytes(b"x")
    age(swept)
    found, _ = run_json("prune", swept, "--keep", "1")
    assert {item["path"]: item["why"] for item in found["skipped"]} == dict.fromkeys(
        ("step-00000003", "step-00000009"), "it is a checkpoint of another format"
    )
    assert found["kept"] == [2]
    assert step(swept, 9).exists()


def test_files_that_are_not_holdfasts_stay(swept: Path, run_json: Json) -> None:
    notes = [
        step(swept, 3) / "notes.txt",
        step(swept, 2) / "data" / "model.safetensors",
        swept / "other" / "x",
    ]
    notes[2].parent.mkdir()
    for path in notes:
        path.write_text("mine")
    age(swept)
    for extra in ((), ("--dry-run",)):
        found, _ = run_json("prune", swept, *extra)
        assert all(path.exists() for path in notes)
        assert "step-00000003" in {item["path"] for item in found["skipped"]}
        assert "step-00000003" not in {item["path"] for item in found["removed"]}


def test_what_a_real_failed_save_leaves_is_swept(tmp_path: Path, run_json: Json, run: Run) -> None:
    folder = tmp_path / "run"
    save_ranks(step(folder, 1), step=1)
    left = save_ranks(tmp_path / "other", step=1)
    for path in data_files(left):
        shutil.copy(path, step(folder, 1) / "data")
    found, _ = run_json("prune", folder, "--older-than", "0")
    assert {item["path"] for item in found["removed"]} == {
        f"step-00000001/data/{path.name}" for path in data_files(left)
    }
    assert run("verify", folder).exit_code == 0


def test_what_was_never_put_in_place_in_the_run_folder_goes(swept: Path, run_json: Json) -> None:
    """A crash while Megatron-LM's tracker was written."""
    for name in (".publishing-0011", ".publishing-2233"):
        (swept / name).write_bytes(b"10")
    age(swept / ".publishing-0011")
    found, _ = run_json("prune", swept)
    assert ".publishing-0011" in {item["path"] for item in found["removed"]}
    assert [path.name for path in swept.glob(".publishing-*")] == [".publishing-2233"]


def test_a_checkpoint_is_not_a_run(kept: Path, run: Run) -> None:
    result = run("prune", kept, "--older-than", "0")
    assert result.exit_code == 2
    assert "not a run folder" in result.stderr
    assert data_files(kept)


def test_an_empty_run_is_nothing_to_do(tmp_path: Path, run_json: Json) -> None:
    found, code = run_json("prune", tmp_path, "--keep", "1")
    assert (code, found["removed"], found["kept"]) == (0, [], [])


def test_a_run_that_is_not_there_is_trouble(tmp_path: Path, run: Run) -> None:
    (tmp_path / "file").write_text("x")
    for name, words in (("missing", "does not exist"), ("file", "is a file, not a folder")):
        result = run("prune", tmp_path / name)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == f"holdfast: {tmp_path / name} {words}.\n"


def test_one_step_that_can_not_be_looked_into_hides_no_other(
    swept: Path, run_json: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's folder, say."""
    real = os.scandir

    def scandir(path: Any) -> Any:
        if "step-00000003" in os.fspath(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    found, code = run_json("prune", swept)
    assert code == 0
    assert [item["path"] for item in found["skipped"]] == ["step-00000003"]
    assert "Permission denied" in found["skipped"][0]["why"]
    assert "step-00000004" in {item["path"] for item in found["removed"]}


def test_a_step_counts_only_if_all_of_its_index_can_be_read(tmp_path: Path, run_json: Json) -> None:
    """The page that names the files is good, another is not: the step before must stay."""
    import torch

    import holdfast

    for number in (1, 2):
        state = {f"n{at}": torch.zeros(1) for at in range(4000)}
        holdfast.save(state, step(tmp_path, number), step=number, job=holdfast.Job(no_dist=True))
    index = step(tmp_path, 2) / "index.safetensors"
    flip(index, int.from_bytes(index.read_bytes()[:8], "little") + 8 + 9)
    found, _ = run_json("prune", tmp_path, "--keep", "1", "--older-than", "0")
    assert found["kept"] == [1]
    assert step(tmp_path, 1).exists()
