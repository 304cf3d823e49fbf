"""Formats of sources that the core does not know."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast._core import io
from holdfast._core.format.index import Index
from holdfast._core.io.source import Source
from holdfast._core.store.base import Store
from holdfast.errors import NotCommitted


def test_a_registered_format_is_asked_where_the_core_finds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Index | None]] = []

    def look(store: Store, index: Index | None) -> Source | None:
        asked.append((store.url, index))
        return None

    monkeypatch.setattr(io, "_importers", [])
    io.register_format(lambda: look)
    holdfast.save({"w": torch.ones(2)}, tmp_path / "there", job=holdfast.Job(no_dist=True))
    assert list(holdfast.open(tmp_path / "there")) == ["w"]
    assert asked == []
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotCommitted, match="it is an empty folder"):
        holdfast.open(tmp_path / "empty")
    assert asked == [(str(tmp_path / "empty"), None)]


def test_published_models_are_registered_and_not_imported_before_a_folder_may_have_one() -> None:
    code = """
import sys
import holdfast
from holdfast._core.io import registered_openers
before = [name for name in sys.modules if name.startswith("holdfast._models")]
[opener] = registered_openers()
print(before, opener.__module__)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[] holdfast._models.views.sources\n"
