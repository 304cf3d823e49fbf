"""docs/dcp.md: the table of names, held against torch's package and ours."""

from __future__ import annotations

import importlib
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as theirs

import holdfast
import holdfast.dcp as ours
from holdfast import errors
from tests.docs.pages import table, text

ROWS = table(text("docs/dcp.md"), "calls")
IS = {name: row[1] for row in ROWS for name in re.findall(r"\w+", row[0])}


def kind(name: str) -> str:
    """Whose object has this name in our package."""
    if not hasattr(theirs, name):
        return "only here"
    return "torch's own" if getattr(ours, name) is getattr(theirs, name) else "ours"


@pytest.mark.parametrize("name", IS)
def test_a_name_is_whose_the_table_says(name: str) -> None:
    assert kind(name) == IS[name]


def test_every_public_name_of_torchs_package_is_in_the_table() -> None:
    known = {
        name
        for name, value in vars(theirs).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert known | set(ours.__all__) == set(IS)


@pytest.mark.parametrize("name", ["state_dict", "stateful", "format_utils", "staging"])
def test_a_submodule_is_torchs_although_torchs_package_has_not_imported_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"`dcp.{name}`" in text("docs/dcp.md")
    there = importlib.import_module(f"{theirs.__name__}.{name}")
    monkeypatch.delattr(theirs, name)
    assert getattr(ours, name) is there
    assert not hasattr(ours, f"{name}_of_nobody")


def test_a_url_without_a_store_is_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("fsspec")
    url = "memory://test_dcp/it"
    ours.save({"w": torch.ones(3)}, checkpoint_id=url, no_dist=True)
    assert "no store for memory:// places" in caplog.text
    blank = {"w": torch.zeros(3)}
    ours.load(blank, checkpoint_id=url, no_dist=True)
    assert torch.equal(blank["w"], torch.ones(3))


def test_what_is_said_to_be_passed_on_is_done_by_torch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Mine(theirs.DefaultSavePlanner): ...

    class Reader(theirs.FileSystemReader): ...

    class MyLoadPlanner(theirs.DefaultLoadPlanner): ...

    passed: list[tuple[Any, dict[str, object], str]] = [
        (ours.save, {"planner": Mine()}, "Mine"),
        (ours.load, {"storage_reader": Reader(tmp_path / "it")}, "Reader"),
        (ours.load, {"planner": MyLoadPlanner()}, "MyLoadPlanner"),
    ]
    for call, given, name in passed:
        state = {"w": torch.ones(3)}
        with pytest.raises(errors.BadInput, match=name) as raised:
            call(state, checkpoint_id=tmp_path / "it", job=holdfast.Job(no_dist=True), **given)
        assert isinstance(raised.value, theirs.CheckpointException)
        caplog.clear()
        call(state, checkpoint_id=tmp_path / "it", no_dist=True, **given)
        assert name in caplog.text
        assert "does this call, with collectives" in caplog.text
    assert (tmp_path / "it" / "__0_0.distcp").exists()
