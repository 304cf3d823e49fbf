"""The `.metadata` beside a checkpoint of `holdfast.dcp`: tools of torch DCP find it, and nobody takes it for
DCP's."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from click.testing import CliRunner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

import holdfast
import holdfast.dcp as dcp
from holdfast._core.format.names import MARKER
from holdfast._tools.cli import cli
from holdfast.errors import NotCommitted
from tests.frameworks.torch_dcp.test_torch_dist import empty, same, state

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP's own
ONLY_MARKER = "holds no committed checkpoint: it holds only the marker that Holdfast leaves beside one"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save(state(), checkpoint_id=tmp_path / "step-10")
    return tmp_path / "step-10"


def test_what_a_save_returns_is_printed_as_one_short_line(tmp_path: Path) -> None:
    state = {f"w{number}": torch.ones(2) for number in range(100)}
    saved = dcp.save(state, checkpoint_id=tmp_path / "step-10")
    assert str(saved).startswith(f"<Metadata of {tmp_path / 'step-10'}: ")
    assert len(str(saved)) < 150 + len(str(tmp_path))
    assert len(saved.state_dict_metadata) == 100


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tools_of_dcp_see_every_name_type_and_shape(asynchronous: bool, tmp_path: Path) -> None:
    if asynchronous:
        dcp.async_save(state(), checkpoint_id=tmp_path / "step-10").result()
    else:
        dcp.save(state(), checkpoint_id=tmp_path / "step-10")
    assert (tmp_path / "step-10" / ".metadata").is_file(), (
        "what torchtitan's search for the newest step looks for"
    )
    found = stock.FileSystemReader(tmp_path / "step-10").read_metadata()
    expected = flat(state())
    assert set(found.state_dict_metadata) == set(expected)
    for name, value in expected.items():
        said = found.state_dict_metadata[name]
        if isinstance(value, torch.Tensor):
            assert isinstance(said, TensorStorageMetadata)
            assert (said.properties.dtype, said.size) == (value.dtype, value.shape)
            (chunk,) = said.chunks
            assert (chunk.offsets, chunk.sizes) == (torch.Size([0] * value.dim()), value.shape)
            assert found.storage_data[MetadataIndex(name, chunk.offsets)].relative_path == MARKER
        else:
            assert isinstance(said, BytesStorageMetadata)
            assert found.storage_data[MetadataIndex(name)].relative_path == MARKER


STOCK = """
import sys, torch, torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
state = {"model": {"w": torch.zeros(37, 11)}}
for call in (lambda: stock.load(state, checkpoint_id=sys.argv[1]), lambda: dcp_to_torch_save(sys.argv[1], "x")):
    try:
        call()
    except CheckpointException as error:
        [(failure, _)] = error.failures.values()
        print(type(failure).__name__, failure.filename)
"""


def test_stock_dcp_fails_with_a_file_name_that_says_what_to_do(folder: Path) -> None:
    """In a process that has not imported Holdfast."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STOCK, str(folder)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == [f"FileNotFoundError {folder / MARKER}"] * 2, done.stderr


def test_stock_dcp_reads_it_once_holdfast_dcp_is_imported(folder: Path, tmp_path: Path) -> None:
    found = empty()
    stock.load(found, checkpoint_id=folder)
    assert same(found, state())
    dcp_to_torch_save(folder, tmp_path / "one.pt")
    assert same(torch.load(tmp_path / "one.pt", weights_only=False), state()), "nested as it was"


def test_holdfast_reads_the_checkpoint_and_not_its_marker(folder: Path) -> None:
    for load in (
        lambda found: dcp.load(found, checkpoint_id=folder),
        lambda found: holdfast.load(found, folder),
    ):
        found = empty()
        load(found)
        assert same(found, state())
    assert CliRunner().invoke(cli, ["verify", str(folder)]).exit_code == 0
    (folder / ".metadata").write_bytes(b"garbage")
    found = empty()
    dcp.load(found, checkpoint_id=folder)
    assert same(found, state())


def test_the_next_save_renews_it(folder: Path) -> None:
    dcp.save({"other": torch.zeros(5)}, checkpoint_id=folder)
    assert set(stock.FileSystemReader(folder).read_metadata().state_dict_metadata) == {"other"}


def test_a_save_over_a_checkpoint_of_dcp_marks_the_folder_as_holdfasts(tmp_path: Path) -> None:
    stock.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "a")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a")
    found = {"w": torch.zeros(3)}
    stock.load(found, checkpoint_id=tmp_path / "a")
    assert torch.equal(found["w"], torch.ones(3))
    found = {"w": torch.zeros(3)}
    dcp.load(found, checkpoint_id=tmp_path / "a")
    assert torch.equal(found["w"], torch.ones(3))


def test_a_marker_without_an_index_is_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    (folder / "index.safetensors").rename(tmp_path / "index")
    for load in (lambda: dcp.load(empty(), checkpoint_id=folder), lambda: holdfast.load(empty(), folder)):
        with pytest.raises(NotCommitted, match=ONLY_MARKER):
            load()
    for command in (
        ["inspect", folder],
        ["verify", folder],
        ["import", "torch_dist", folder, tmp_path / "b"],
    ):
        done = CliRunner().invoke(cli, [str(word) for word in command])
        assert done.exit_code == 2
        assert ONLY_MARKER in done.stderr
    assert CliRunner().invoke(cli, ["reindex", str(folder)]).exit_code == 0, "what the hint says"
    found = empty()
    holdfast.load(found, folder)
    assert same(found, state())


def test_a_marker_that_can_not_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a" / ".metadata").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "holdfast"):
        report = dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a")
    assert report.tensors == 1
    (said,) = [record.getMessage() for record in caplog.records if record.name == "holdfast"]
    assert f"{tmp_path / 'a'} is committed, but tools of torch DCP won't find it" in said
    found = {"w": torch.zeros(3)}
    dcp.load(found, checkpoint_id=tmp_path / "a")
    assert torch.equal(found["w"], torch.ones(3))


def test_a_save_without_the_names_of_dcp_writes_none(tmp_path: Path) -> None:
    holdfast.save(state(), tmp_path / "a")
    assert not (tmp_path / "a" / ".metadata").exists()
