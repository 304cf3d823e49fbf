"""docs/dcp.md: the table of names, held against torch's package and ours."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as theirs

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


def test_what_is_said_to_be_refused_is_refused(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}

    class Mine(theirs.DefaultSavePlanner): ...

    class Reader(theirs.FileSystemReader): ...

    refused: list[tuple[Any, dict[str, object]]] = [
        (ours.save, {"planner": Mine()}),
        (ours.load, {"storage_reader": Reader(tmp_path / "a")}),
        (ours.save, {"storage_writer": theirs.HuggingFaceStorageWriter(str(tmp_path / "b"))}),
        (ours.load, {"storage_reader": theirs.HuggingFaceStorageReader(str(tmp_path / "b"))}),
    ]
    for call, given in refused:
        with pytest.raises(errors.BadInput, match="takes no") as raised:
            call(state, checkpoint_id=tmp_path / "c", no_dist=True, **given)
        assert isinstance(raised.value, theirs.CheckpointException)
