"""A checkpoint may be moved or removed as soon as a rank's own save has returned, although others have not."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import holdfast
import holdfast.dcp as dcp
from holdfast._core.format.names import INDEX, METADATA
from holdfast._core.saving.job import SaveJob
from holdfast.errors import CommitUnconfirmed
from tests.support.processes import ProcessWorld
from tests.support.waiting import wait_until

JOB = holdfast.Job(timeout=30.0)


@pytest.fixture(scope="module")
def pair() -> Iterator[ProcessWorld]:
    with ProcessWorld(2) as world:
        yield world


def move(rank: int, folder: str, how: str) -> tuple[str, float, list[str]]:
    """Rank 1 is busy between the word of the commit and its look into storage; rank 0 does not wait for it.
    Return how the save ended, after how many seconds, and what rank 0 moved."""
    here, there = Path(folder, "tmp"), Path(folder, "step")
    look, moved = SaveJob.is_committed, []
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            done = Path(folder, "moved").exists
            patch.setattr(SaveJob, "is_committed", lambda self: wait_until(done) or look(self))
        began = time.monotonic()
        try:
            if how.startswith("dcp"):
                dcp.save({"w": torch.arange(4.0), f"own{rank}": torch.ones(2)}, checkpoint_id=here)
            else:
                holdfast.save({"w": torch.arange(4.0), f"own{rank}": torch.ones(2)}, here, job=JOB)
            end = "saved"
        except CommitUnconfirmed as error:
            end = str(error)
        seconds = time.monotonic() - began
    if rank == 0:
        moved = sorted(file.name for file in here.iterdir() if file.is_file())
        if how.endswith("removed"):
            shutil.rmtree(here)
        elif how == "without its index":
            (here / INDEX).unlink()
        else:
            here.rename(there)
        Path(folder, "moved").touch()
    return end, seconds, moved


@pytest.mark.parametrize("how", ["renamed", "removed", "dcp, renamed", "dcp, removed"])
def test_a_checkpoint_is_moved_while_a_rank_has_not_returned(
    pair: ProcessWorld, tmp_path: Path, how: str
) -> None:
    ends = pair.run(move, str(tmp_path), how)
    assert [end for end, _, _ in ends] == ["saved", "saved"]
    assert max(seconds for _, seconds, _ in ends) < 10.0
    assert INDEX in ends[0][2]
    assert (METADATA in ends[0][2]) == how.startswith("dcp"), "marks of others are there when a save returns"
    assert not (tmp_path / "tmp").exists(), "nothing is written into the old place"
    if how.endswith("renamed"):
        found = {"w": torch.zeros(4)}
        holdfast.load(found, tmp_path / "step", job=holdfast.Job(no_dist=True))
        assert found["w"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_word_of_a_commit_is_not_believed_beside_files_that_are_there(
    pair: ProcessWorld, tmp_path: Path
) -> None:
    ends = pair.run(move_the_index, str(tmp_path))
    assert ends[0] == "saved"
    assert "could not learn whether the index was put in place (rank 0 says that it is committed" in ends[1]


def move_the_index(rank: int, folder: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast._core.protocol.core.VISIBLE_WITHIN", 1.5)
        return move(rank, folder, "without its index")[0]
