"""What is deleted is Holdfast's own: files and links that somebody else has put there stay, wherever
something is deleted."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
import holdfast.dcp
from holdfast._core.format.names import HOLDFAST_CONFIG, METADATA, is_named_by_save
from holdfast._core.io.old_steps import remove_step
from holdfast._core.store.local import LocalStore
from holdfast._tools.checkpoints.inspect import Run, describe
from holdfast._tools.checkpoints.prune import prune
from holdfast.errors import HoldfastError
from tests.support.mounts import remount, unmount

SOLO = holdfast.Job(no_dist=True)
STATE = {"w": torch.ones(3)}
THEIRS = (
    "notes.txt",
    "data/extra.bin",
    "data/model-r00001.safetensors",
    "data/best.safetensors",
    "data/mine/f",
    "mine/f",
    "metadata.json",
)


def paths(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()
    }


def put_theirs(step: Path) -> set[str]:
    """Put files and links of a user's into a folder; return their names."""
    for name in THEIRS:
        (step / name).parent.mkdir(parents=True, exist_ok=True)
        (step / name).write_text("{}")
    links = ("link", "data/link", "data/abcdef012345-r00000.safetensors", "data/folder")
    for name in links:
        (step / name).symlink_to("/etc/hostname" if name != "data/folder" else "/etc")
    return {*THEIRS, *links}


def by_keep(run: Path) -> None:
    with holdfast.Checkpoints(run, keep=1, asynchronous=False, job=SOLO) as checkpoints:
        checkpoints.save(2, STATE)
        checkpoints.save(3, STATE)
        assert checkpoints.steps() == [3], "a folder of other files is no step"


def by_prune(run: Path) -> None:
    with holdfast.Checkpoints(run, asynchronous=False, job=SOLO) as checkpoints:
        checkpoints.save(2, STATE)
    planned = prune(run, keep=1, older_than=0.0, dry_run=True)
    done = prune(run, keep=1, older_than=0.0)
    assert (done.removed, done.skipped) == (planned.removed, planned.skipped)
    assert [item.why for item in done.skipped] == ["it holds files that no save of Holdfast has made"]
    assert done.kept == (2,)


@pytest.mark.parametrize("remove", [by_keep, by_prune])
def test_what_a_user_has_put_into_an_old_step_stays(tmp_path: Path, remove: Callable[[Path], None]) -> None:
    holdfast.save(STATE, tmp_path / "step-00000001", step=1, job=SOLO)
    theirs = put_theirs(tmp_path / "step-00000001")
    remove(tmp_path)
    assert paths(tmp_path / "step-00000001") == theirs
    assert holdfast.latest(tmp_path) == str(max(tmp_path.glob("step-*")))
    described = describe(tmp_path)
    assert isinstance(described, Run)
    assert [step.step for step in described.steps if not step.committed] == [1]
    assert prune(tmp_path, older_than=0.0).removed == ()
    assert paths(tmp_path / "step-00000001") == theirs


def test_the_marks_that_holdfast_writes_go_with_their_step(tmp_path: Path) -> None:
    """Also if the removal is cut off after the index; and a file that only the index tells to be ours."""
    for step in (1, 2):
        holdfast.dcp.save(dict(STATE), checkpoint_id=tmp_path / f"step-{step:08d}", no_dist=True)
        (tmp_path / f"step-{step:08d}" / "metadata.json").write_text(json.dumps(HOLDFAST_CONFIG))
    (tmp_path / "step-00000002" / "index.safetensors").unlink()
    assert remove_step(LocalStore(tmp_path), "step-00000001")
    assert prune(tmp_path, older_than=0.0).skipped == ()
    assert os.listdir(tmp_path) == []


def test_the_metadata_of_stock_dcp_beside_an_index_stays(tmp_path: Path) -> None:
    step = tmp_path / "step-00000001"
    torch.distributed.checkpoint.save(dict(STATE), checkpoint_id=step, no_dist=True)
    theirs = paths(step)
    holdfast.save(STATE, step, job=SOLO)
    assert not remove_step(LocalStore(tmp_path), step.name)
    assert paths(step) == theirs
    assert METADATA in theirs


def test_an_index_that_is_a_link_keeps_its_step(tmp_path: Path) -> None:
    step = tmp_path / "step-00000001"
    holdfast.save(STATE, step, job=SOLO)
    (step / "index.safetensors").rename(tmp_path / "elsewhere")
    (step / "index.safetensors").symlink_to(tmp_path / "elsewhere")
    before = paths(step)
    assert not remove_step(LocalStore(tmp_path), step.name)
    assert paths(step) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_old_steps_that_can_not_be_removed_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of another user's steps; each of them would be tried, and its index read, at each save."""
    old = [tmp_path / f"step-{step:08d}" for step in range(1, 9)]
    for step, folder in enumerate(old, 1):
        holdfast.save(STATE, folder, step=step, job=SOLO)
        subprocess.run(["mount", "--bind", folder, folder], check=True, timeout=30)
        remount(folder, "ro,bind")
    try:
        with holdfast.Checkpoints(tmp_path, keep=1, asynchronous=False, job=SOLO) as checkpoints:
            for step in range(9, 13):
                checkpoints.save(step, {"w": torch.full((3,), float(step))})
                assert checkpoints.steps() == [*range(1, 9), step], "what may be removed is removed"
            [told] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
            assert told.startswith(f"Old steps of {tmp_path} are not removed, and take up space: Deleting ")
            assert "Read-only file system." in told
            for folder in old:
                unmount(folder)
            checkpoints.save(13, {"w": torch.zeros(3)})
            assert checkpoints.steps() == [13]
    finally:
        for folder in old:
            unmount(folder)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_save_that_fails_deletes_nothing_that_is_named_data(
    tmp_path: Path, kind: str, asynchronous: bool
) -> None:
    """A file or a link of that name is in the way of a save, and it is not the save's."""
    data = tmp_path / "data"
    data.write_text("mine") if kind == "file" else data.symlink_to("/etc")
    save = holdfast.async_save if asynchronous else holdfast.save
    with pytest.raises(HoldfastError):
        getattr(save(STATE, tmp_path, job=SOLO), "committed", lambda timeout: None)(60)
    assert data.is_symlink() == (kind == "link")
    assert kind == "link" or data.read_text() == "mine"


def test_no_folder_behind_a_link_is_removed(tmp_path: Path) -> None:
    (tmp_path / "others" / "data").mkdir(parents=True)
    (tmp_path / "step").symlink_to("others")
    assert not LocalStore(tmp_path).child("step").child("data").remove()
    assert (tmp_path / "others" / "data").is_dir()


def test_an_overwrite_leaves_links(tmp_path: Path) -> None:
    """Of a checkpoint whose file a user has moved elsewhere."""
    holdfast.save(STATE, tmp_path / "step", job=SOLO)
    (file,) = (tmp_path / "step" / "data").iterdir()
    file.rename(tmp_path / file.name)
    file.symlink_to(tmp_path / file.name)
    holdfast.save(STATE, tmp_path / "step", job=SOLO)
    assert file.is_symlink()
    assert file.exists()


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("abcdef012345-r00001.safetensors", True),
        ("abcdef012345-r100001-002.safetensors", True),
        ("abcdef012345-r00001-012345abcdef-r00000-001.safetensors", True),
        ("import-0123456789abcdef-abcdef012345-r00000.safetensors", True),
        ("fetch-0123456789abcdef-00000-r00000.safetensors", False),
        ("model-r00001.safetensors", False),
        ("abcdef012345.safetensors", False),
        ("abcdef012345-r00001.safetensors.bak", False),
        ("my-abcdef012345-r00001.safetensors", False),
    ],
)
def test_names_that_holdfast_alone_gives(name: str, ours: bool) -> None:
    assert is_named_by_save(name) == ours
