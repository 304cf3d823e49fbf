"""`holdfast latest` and `holdfast inspect`."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import save_file

import holdfast
from holdfast import dcp
from holdfast._core.base.values import age_text
from tests.cli.conftest import Run, data_files, flip

Json = Callable[..., tuple[Any, int]]


@pytest.fixture
def steps(kept: Path, tmp_path: Path) -> Path:
    """A run of two committed steps, one begun and one damaged."""
    for step in (3, 12, 20):
        shutil.copytree(kept, tmp_path / f"step-{step:08d}")
    (tmp_path / "step-00000015" / "data").mkdir(parents=True)
    (tmp_path / "step-00000015" / "data" / "abcdef012345-r00000.safetensors").write_bytes(b"x" * 10)
    (tmp_path / "step-00000020" / "index.safetensors").unlink()
    return tmp_path


def test_latest_is_the_newest_that_is_committed(steps: Path, run: Run, run_json: Json) -> None:
    path = str(steps / "step-00000012")
    assert run("latest", steps).stdout == path + "\n"
    assert run_json("latest", steps) == ({"run": str(steps), "path": path}, 0)


@pytest.mark.parametrize("place", [".", "missing"])
def test_latest_of_nothing_is_exit_1_and_a_sentence(
    place: str, tmp_path: Path, run: Run, run_json: Json
) -> None:
    result = run("latest", tmp_path / place)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"holdfast: {tmp_path / place} has no committed step.\n"
    document, code = run_json("latest", tmp_path / place)
    assert (document["path"], code) == (None, 1)


def test_latest_knows_other_formats_and_spellings(kept: Path, tmp_path: Path, run: Run) -> None:
    shutil.copytree(kept, tmp_path / "step-9")
    assert run("latest", tmp_path).stdout == f"{tmp_path}/step-9\n"
    (tmp_path / "iter_0000010").mkdir()
    (tmp_path / "iter_0000010" / ".metadata").write_bytes(b"x")
    assert run("latest", tmp_path).stdout == f"{tmp_path}/iter_0000010\n"


def test_latest_of_what_is_no_run_is_trouble_and_a_sentence(kept: Path, tmp_path: Path, run: Run) -> None:
    shutil.copytree(kept, tmp_path / "run" / "global_step_10")
    for place, words in (
        (kept, "is a checkpoint, not a run folder"),
        (tmp_path / "run", "'global_step_10' in it is one"),
        (kept / "index.safetensors", "is a file, not a folder"),
    ):
        result = run("latest", place)
        assert (result.exit_code, result.stdout) == (2, "")
        assert words in result.stderr


def test_inspect_of_a_run_with_other_formats_and_links_in_a_circle(
    kept: Path, tmp_path: Path, run: Run, run_json: Json
) -> None:
    shutil.copytree(kept, tmp_path / "step-7")
    (tmp_path / "iter_10").mkdir()
    (tmp_path / "iter_10" / ".metadata").write_bytes(b"12345")
    (tmp_path / "iter_10" / "__0_0.distcp").write_bytes(b"1" * 100)
    (tmp_path / "step-11").symlink_to("step-11")
    (tmp_path / "step-7" / "loop").symlink_to("loop")
    found, code = run_json("inspect", tmp_path)
    assert code == 0
    assert [(step["step"], step["committed"]) for step in found["steps"]] == [(7, True), (10, True)]
    assert found["steps"][1]["bytes"] == 105
    assert found["steps"][1]["created"] > 1e9


def test_inspect_says_what_is_there(kept: Path, run_json: Json) -> None:
    found, code = run_json("inspect", kept)
    assert code == 0
    assert (found["step"], found["ranks"], found["tensors"], found["objects"]) == (7, 2, 7, 3)
    assert found["versions"]["holdfast"]
    on_disk = {f"data/{path.name}": path.stat().st_size for path in data_files(kept)}
    assert {file["name"]: file["size"] for file in found["files"]} == on_disk
    assert found["bytes"] == sum(on_disk.values()) + (kept / "index.safetensors").stat().st_size
    shown = {tensor["name"]: tensor for tensor in found["shown"]}
    wide = shown["wide"]
    assert (wide["dtype"], wide["shape"], wide["bytes"]) == ("float32", [512, 1024], 512 * 1024 * 4)
    assert (wide["chunks"], wide["writers"]) == (2, [0, 1])
    assert shown["scalar"]["shape"] == []
    assert shown["empty"]["bytes"] == 0
    assert shown["args.a"]["value"] == "[1, 'x[bold]y']"
    assert shown["lr"]["value"] == "0.25"
    assert shown["lr"]["dtype"] == ""


def test_inspect_as_text(kept: Path, run: Run) -> None:
    shown = run("inspect", kept).stdout
    for piece in ("step      7", "7 tensors, 3 objects", "[512, 1024]", "bfloat16", "[1, 'x[bold]y']"):
        assert piece in shown


def test_inspect_sums_by_module_and_dtype_in_natural_order(tmp_path: Path, run: Run, run_json: Json) -> None:
    layers = {
        str(n): {"w": torch.zeros(4, 5), "scale": torch.zeros(3, dtype=torch.bfloat16)} for n in (9, 10, 100)
    }
    state = {"model": {"layers": layers, "head": {"w": torch.zeros(2)}}, "lr": 0.5, "top": torch.zeros(7)}
    holdfast.save(state, tmp_path / "c", job=holdfast.Job(no_dist=True))
    found, _ = run_json("inspect", tmp_path / "c")
    rows = [
        (row["module"], row["dtype"], row["tensors"], row["elements"], row["bytes"])
        for row in found["totals"]
    ]
    assert rows == [
        ("", "float32", 1, 7, 28),
        ("model.head", "float32", 1, 2, 8),
        ("model.layers", "bfloat16", 3, 9, 18),
        ("model.layers", "float32", 3, 60, 240),
    ]
    names = [tensor["name"] for tensor in found["shown"] if tensor["name"].endswith("scale")]
    assert names == [f"model.layers.{n}.scale" for n in (9, 10, 100)]
    limited, _ = run_json("inspect", tmp_path / "c", "--name", "model.layers", "--limit", "3")
    assert [tensor["name"] for tensor in limited["shown"]] == [
        f"model.layers.{name}" for name in ("9.scale", "9.w", "10.scale")
    ]
    assert [(tensor["dtype"], tensor["bytes"]) for tensor in limited["shown"]] == [
        ("bfloat16", 6),
        ("float32", 80),
        ("bfloat16", 6),
    ]
    assert [row["module"] for row in limited["totals"]] == ["model.layers"] * 2
    shown = run("inspect", tmp_path / "c").stdout.splitlines()
    assert any(line.split() == ["all", "8", "78", "294", "B"] for line in shown)


def test_times_have_their_zone_and_their_age(
    kept: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_folder = tmp_path / "run"
    shutil.copytree(kept, run_folder / "step-00000010")
    shutil.copytree(kept, run_folder / "step-00000009")
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        (_, _, *steps, total) = run("inspect", run_folder).stdout.splitlines()[1:]
        checkpoint = run("inspect", kept).stdout
    finally:
        monkeypatch.undo()
        time.tzset()
    assert [line.split()[0] for line in steps] == ["9", "10"]
    assert all(re.search(r"\d\d:\d\d:\d\d \+0530 +\d+ (s|min)$", line) for line in steps), steps
    assert re.search(r"created +\d{4}-\d\d-\d\d \S+ \+0530, \d+ (s|min) ago", checkpoint)
    assert total.endswith("in all.")


@pytest.mark.parametrize(
    ("passed", "text"),
    [(0, "0 s"), (119, "119 s"), (121, "2 min"), (7300, "2 h"), (3 * 86400, "3 days"), (-50, "0 s")],
)
def test_ages(passed: float, text: str) -> None:
    assert age_text(1e9 - passed, 1e9) == text


def test_inspect_filters_and_limits(kept: Path, run: Run, run_json: Json) -> None:
    found, _ = run_json("inspect", kept, "--name", "layer*")
    assert [tensor["name"] for tensor in found["shown"]] == ["layer0.weight", "layer1.weight"]
    found, _ = run_json("inspect", kept, "--name", "args")
    assert [tensor["name"] for tensor in found["shown"]] == ["args.a", "args.b"]
    found, _ = run_json("inspect", kept, "--limit", "2")
    assert (len(found["shown"]), found["matched"], found["tensors"]) == (2, 10, 7)
    assert "2 of 10 names" in run("inspect", kept, "--limit", "2").stdout
    assert run_json("inspect", kept, "--name", "nothing")[0]["shown"] == []
    assert run("inspect", kept, "--name", "nothing").stdout.endswith("\nNo name matches 'nothing'.\n")
    refused = run("inspect", kept.parent, "--name", "layer*")
    assert refused.exit_code == 2
    assert "--name is for one checkpoint" in refused.output


def test_inspect_shows_damage_of_an_object_and_the_rest(checkpoint: Path, run_json: Json) -> None:
    (part,) = run_json("explain", checkpoint, "lr")[0]["parts"]
    flip(checkpoint / part["file"], part["start"])
    found, code = run_json("inspect", checkpoint)
    shown = {tensor["name"]: tensor["value"] for tensor in found["shown"]}
    assert code == 0
    assert shown["lr"].startswith("<unreadable: ")
    assert shown["args.b"] == "2"


def test_inspect_of_a_damaged_index_is_a_sentence(checkpoint: Path, run: Run) -> None:
    flip(checkpoint / "index.safetensors", -100)
    result = run("inspect", checkpoint)
    assert result.exit_code == 2
    assert "damaged" in result.stderr


def test_inspect_of_a_run(steps: Path, run: Run, run_json: Json) -> None:
    (steps / "step-00000003" / "index.safetensors").write_bytes(b"short")
    found, code = run_json("inspect", steps)
    assert code == 0
    listed = {step["step"]: step for step in found["steps"]}
    assert [step for step in listed if listed[step]["committed"]] == [3, 12]
    assert "truncated" in listed[3]["problem"]
    assert listed[12]["problem"] is None
    assert listed[12]["created"] > 1e9
    assert listed[15]["bytes"] == 10
    shown = run("inspect", steps).stdout
    assert "not committed" in shown
    assert "damaged: " in shown


def test_inspect_of_a_run_does_not_take_a_marker_for_a_checkpoint(tmp_path: Path, run_json: Json) -> None:
    for step in (3, 12):
        dcp.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path / f"step-{step:08d}")
    (tmp_path / "step-00000012" / "index.safetensors").unlink()
    found, code = run_json("inspect", tmp_path)
    assert code == 0
    listed = [(step["step"], step["committed"], step["created"] is None) for step in found["steps"]]
    assert listed == [(3, True, False), (12, False, True)]


def test_inspect_opens_what_a_load_opens(tmp_path: Path, run: Run, run_json: Json) -> None:
    """torch DCP, megatron-core's torch_dist, and a model of safetensors, such as a Trainer's checkpoint."""
    state = {"m": {"w": torch.ones(4, 6), "b": torch.ones(4, dtype=torch.bfloat16)}}
    torch_dcp.save({**state, "step": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    shutil.copytree(tmp_path / "dcp", tmp_path / "torch_dist")
    (tmp_path / "torch_dist" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    model = tmp_path / "run" / "checkpoint-8"
    model.mkdir(parents=True)
    save_file({f"m.{name}": value for name, value in state["m"].items()}, model / "model.safetensors")
    (model / "trainer_state.json").write_text("{}")
    for place, objects, said in (
        (tmp_path / "dcp", 1, "torch DCP or megatron-core (torch_dist)"),
        (tmp_path / "torch_dist", 1, "torch DCP or megatron-core (torch_dist)"),
        (model, 0, "safetensors of Hugging Face"),
    ):
        text = run("inspect", place).stdout
        assert f"format    {said}" in text
        assert "m.w" in text
        assert "[4, 6]" in text
        found, code = run_json("inspect", place, "--name", "m.*")
        assert code == 0
        assert (found["format"], found["tensors"], found["objects"], found["matched"]) == (
            said,
            2,
            objects,
            2,
        )
        assert {row["name"]: (row["dtype"], row["shape"], row["bytes"]) for row in found["shown"]} == {
            "m.b": ("bfloat16", [4], 8),
            "m.w": ("float32", [4, 6], 96),
        }
        assert {total["dtype"]: total["bytes"] for total in found["totals"]} == {"bfloat16": 8, "float32": 96}
        on_disk = sum((place / file["name"]).stat().st_size for file in found["files"])
        assert found["bytes"] == on_disk > 0
    assert "<" in run_json("inspect", tmp_path / "dcp", "--name", "step")[0]["shown"][0]["value"]
    assert len(run_json("inspect", model, "--limit", "1")[0]["shown"]) == 1


def test_inspect_of_torch_dcp_with_damaged_metadata_is_a_sentence(tmp_path: Path, run: Run) -> None:
    torch_dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = tmp_path / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:50])
    said = run("inspect", tmp_path)
    assert said.exit_code == 2
    assert "can't be read as the metadata of a torch_dist checkpoint" in said.stderr


def test_inspect_executes_nothing_of_a_checkpoint(tmp_path: Path, run: Run) -> None:
    """Of torch's own pickle, which loading would run."""

    class Bad:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "executed"),)

    (tmp_path / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {"w": Bad()}}))
    assert run("inspect", tmp_path).exit_code == 2
    assert not (tmp_path / "executed").exists()
