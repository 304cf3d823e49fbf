"""`holdfast import` and `holdfast export`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import holdfast
from tests.cli.conftest import Run
from tests.frameworks.torch_dcp.test_torch_dist import empty, same, state

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP's own


def test_there_and_back(tmp_path: Path, run: Run) -> None:
    old, new, back = (tmp_path / name for name in ("old", "new", "back"))
    dcp.save(state(), checkpoint_id=old, no_dist=True)
    told = json.loads(run("import", "torch_dist", old, new, "--step", "12", "--json").stdout)
    assert told["step"] == 12
    assert told["tensors"] == 10
    found = empty()
    report = holdfast.load(found, new)
    assert same(found, state())
    assert report.step == 12
    assert run("verify", new).exit_code == 0

    assert str(back) in run("export", "torch_dist", new, back).stdout
    found = empty() | {"step": 0, "notes": {"lr": 0.0, "names": ["", ""]}}
    dcp.load(found, checkpoint_id=back, no_dist=True)
    assert same(found, state())


def test_a_damaged_chunk_is_not_imported(tmp_path: Path, run: Run) -> None:
    old = tmp_path / "old"
    dcp.save({"w": torch.arange(5000.0)}, checkpoint_id=old, no_dist=True)
    (data,) = old.glob("*.distcp")
    content = bytearray(data.read_bytes())
    at = content.index(torch.arange(2000.0, 2010.0).numpy().tobytes())
    content[at] ^= 1
    data.write_bytes(content)
    done = run("import", "torch_dist", old, tmp_path / "new")
    assert done.exit_code == 2
    assert "'w' is damaged" in done.stderr
    assert run("latest", tmp_path / "new").exit_code == 1


def test_no_export_into_what_is_there(tmp_path: Path, run: Run) -> None:
    holdfast.save({"w": torch.zeros(3)}, tmp_path / "new")
    done = run("export", "torch_dist", tmp_path / "new", tmp_path / "new")
    assert done.exit_code == 2
    assert "holds 'index.safetensors'; an export goes into a new folder" in done.stderr


def test_no_import_into_what_is_there(tmp_path: Path, run: Run) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=old, no_dist=True)
    holdfast.save({"w": torch.ones(3)}, new)
    (tmp_path / "file").write_bytes(b"x")
    for out, words in ((new, "holds "), (old, "holds '"), (tmp_path / "file", "is a file; ")):
        for done in (run("import", "torch_dist", old, out), run("export", "torch_dist", new, out)):
            assert (done.exit_code, done.stdout) == (2, "")
            assert f"{out} {words}" in done.stderr
            assert "goes into a new folder" in done.stderr
    found = {"w": torch.zeros(3)}
    holdfast.load(found, new)
    assert torch.equal(found["w"], torch.ones(3))


def test_an_import_that_failed_can_be_tried_again(tmp_path: Path, run: Run) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    dcp.save({"w": torch.arange(5000.0)}, checkpoint_id=old, no_dist=True)
    (data,) = old.glob("*.distcp")
    good = data.read_bytes()
    data.write_bytes(good[:-1000])
    assert run("import", "torch_dist", old, new).exit_code == 2
    data.write_bytes(good)
    assert run("import", "torch_dist", old, new).exit_code == 0


def test_archives_without_checksums_are_imported(tmp_path: Path, run: Run) -> None:
    """`torch.serialization.set_crc32_options(False)` leaves them at 0."""
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save(state(), checkpoint_id=tmp_path / "old", no_dist=True)
    finally:
        torch.serialization.set_crc32_options(True)
    assert run("import", "torch_dist", tmp_path / "old", tmp_path / "new").exit_code == 0
    found = empty()
    holdfast.load(found, tmp_path / "new")
    assert same(found, state())


def test_what_is_no_checkpoint_is_not_imported(tmp_path: Path, run: Run) -> None:
    holdfast.save({"w": torch.zeros(3)}, tmp_path / "new")
    assert (
        "is a Holdfast checkpoint already"
        in run("import", "torch_dist", tmp_path / "new", tmp_path / "b").stderr
    )
    (tmp_path / "model").mkdir()
    save_file({"w": torch.zeros(3)}, tmp_path / "model" / "model.safetensors")
    assert (
        "model is no checkpoint of torch DCP or megatron-core: there is no .metadata."
        in run("import", "torch_dist", tmp_path / "model", tmp_path / "b").stderr
    )
    assert (
        "no committed checkpoint" in run("import", "torch_dist", tmp_path / "nothing", tmp_path / "b").stderr
    )
