"""torch DCP's own functions inside a guarded function: what goes through Holdfast, and what stays DCP's."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

import holdfast
from holdfast._core.format.names import INDEX

HERE = "tests.frameworks.torch_dcp.test_in_frameworks"


class Trainer:
    """A framework's save and load around DCP."""

    def save(self, state: dict[str, Any], **how: Any) -> Any:
        return dcp.save(state, no_dist=True, **how)

    def save_in_background(self, state: dict[str, Any], **how: Any) -> Any:
        return dcp.async_save(state, no_dist=True, **how)

    def load(self, state: dict[str, Any], **how: Any) -> None:
        dcp.load(state, no_dist=True, **how)

    def load_old(self, state: dict[str, Any], reader: FileSystemReader, planner: Any) -> None:
        dcp.load_state_dict(state, storage_reader=reader, no_dist=True, planner=planner)


@pytest.fixture(autouse=True)
def installed() -> Any:
    names = ("save", "save_in_background", "load", "load_old")
    holdfast.install(
        "torch-dcp", guard=[f"{HERE}.Trainer.{name}" for name in names], job=holdfast.Job(timeout=60)
    )
    yield
    holdfast.uninstall()


def test_a_plain_writer_names_a_folder(tmp_path: Path) -> None:
    state = {"w": torch.arange(4.0), "step": 3}
    Trainer().save(state, storage_writer=FileSystemWriter(tmp_path / "a"))
    assert (tmp_path / "a" / INDEX).exists()
    back: dict[str, Any] = {"w": torch.zeros(4), "step": 0}
    Trainer().load(back, storage_reader=FileSystemReader(tmp_path / "a"))
    assert torch.equal(back["w"], state["w"])
    assert back["step"] == 3


def test_the_deprecated_load_and_names_that_are_not_there(tmp_path: Path) -> None:
    Trainer().save({"w": torch.arange(4.0)}, checkpoint_id=tmp_path / "a")
    back = {"w": torch.zeros(4), "new": torch.full((2,), 7.0)}
    lenient = dcp.DefaultLoadPlanner(allow_partial_load=True)
    Trainer().load_old(back, FileSystemReader(tmp_path / "a"), lenient)
    assert torch.equal(back["w"], torch.arange(4.0))
    assert torch.equal(back["new"], torch.full((2,), 7.0))
    with pytest.raises(holdfast.errors.HoldfastError, match="new"):
        Trainer().load_old(back, FileSystemReader(tmp_path / "a"), dcp.DefaultLoadPlanner())


def test_elsewhere_dcp_is_dcp(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(4.0)}, checkpoint_id=tmp_path / "a", no_dist=True)
    assert not (tmp_path / "a" / INDEX).exists()
    back = {"w": torch.zeros(4)}
    Trainer().load(back, checkpoint_id=tmp_path / "a")
    assert torch.equal(back["w"], torch.arange(4.0)), "and Holdfast loads it"


def test_what_plans_by_itself_reads_what_holdfast_saved(tmp_path: Path) -> None:
    """As Accelerate's `merge_fsdp_weights` and Lightning's consolidation do, outside of what is guarded."""
    state = {"model": {"w": torch.arange(6.0).view(2, 3)}, "step": 3}
    Trainer().save(state, checkpoint_id=tmp_path / "a")
    dcp_to_torch_save(tmp_path / "a", tmp_path / "one.pt")
    one = torch.load(tmp_path / "one.pt", weights_only=True)
    assert torch.equal(one["model"]["w"], state["model"]["w"])
    assert one["step"] == 3
    back: dict[str, Any] = {"model": {"w": torch.zeros(2, 3)}}
    dcp.load(back, checkpoint_id=tmp_path / "a", no_dist=True)
    assert torch.equal(back["model"]["w"], state["model"]["w"])
    dcp.save({"model": {"w": torch.ones(2, 3)}}, checkpoint_id=tmp_path / "a", no_dist=True)
    dcp.load(back, checkpoint_id=tmp_path / "a", no_dist=True)
    assert torch.equal(back["model"]["w"], torch.ones(2, 3)), "what DCP has put over it"


class Sorting(dcp.DefaultSavePlanner):
    """A planner that plans."""


def test_what_brings_code_of_its_own_goes_to_dcp_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "holdfast"):
        for name in ("a", "b"):
            Trainer().save({"w": torch.arange(4.0)}, checkpoint_id=tmp_path / name, planner=Sorting())
    assert not (tmp_path / "a" / INDEX).exists()
    assert (tmp_path / "a" / ".metadata").exists()
    assert [record.message for record in caplog.records] == [
        "torch.distributed.checkpoint.save is not replaced: holdfast.dcp.save takes no planner= (Sorting): "
        "Holdfast plans, writes and reads by itself. Leave planner out."
    ]


TOOL = """
import sys, holdfast
holdfast.install("torch-dcp")
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sys.argv[1], sys.argv[2])
assert "holdfast.dcp" not in sys.modules
print(torch.load(sys.argv[2])["w"].tolist())
"""


def test_a_tool_that_only_installs_reads_ours(tmp_path: Path) -> None:
    """As `holdfast run -- accelerate merge-weights` does."""
    holdfast.save({"w": torch.arange(3.0)}, tmp_path / "a", job=holdfast.Job(no_dist=True))
    command = [sys.executable, "-W", "ignore", "-c", TOOL, str(tmp_path / "a"), str(tmp_path / "one.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[0.0, 1.0, 2.0]\n", done.stderr


def test_in_the_background_with_and_without_a_stager(tmp_path: Path) -> None:
    state = {"w": torch.arange(4.0)}
    Trainer().save_in_background(state, checkpoint_id=tmp_path / "a").result()
    stager = DefaultStager(StagingOptions(False, False, False, False))
    Trainer().save_in_background(state, checkpoint_id=tmp_path / "b", async_stager=stager).result()
    stager = DefaultStager(StagingOptions(False, False, True, False))  # in the background, as torchtitan's
    response = Trainer().save_in_background(state, checkpoint_id=tmp_path / "c", async_stager=stager)
    assert isinstance(response, AsyncSaveResponse)
    response.staging_completion.result()
    response.upload_completion.result()
    stager.close()
    for name in ("a", "b", "c"):
        assert (tmp_path / name / INDEX).exists()
