"""What people see of a save or load that takes long."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import events
from holdfast._protocol import operation

ALONE = holdfast.Job(no_dist=True)


def test_a_log_says_what_a_save_and_a_load_took(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    state = {"w": torch.ones(1 << 20)}
    holdfast.save(state, tmp_path / "it", job=ALONE)
    holdfast.load(state, tmp_path / "it", job=ALONE)
    lines = [record.getMessage() for record in caplog.records if "has moved" in record.getMessage()]
    assert [line.partition(" of ")[0] for line in lines] == ["save", "load"]
    assert all("rank 0 has moved 4 MiB of 4 MiB in " in line for line in lines)


def test_a_long_one_says_how_far_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    monkeypatch.setattr(operation, "TELL_EVERY", 0.0)
    holdfast.save({"w": torch.ones(4, 1 << 20)}, tmp_path / "it", job=ALONE)
    moved = [record.getMessage().partition("has moved ")[2].split(" of ")[0] for record in caplog.records]
    moved = [one for one in moved if one]
    assert len(moved) > 3
    assert moved[-1] == "16 MiB"
    assert moved[0] != moved[-1]


def test_the_event_of_the_commit_has_seconds_and_bytes(tmp_path: Path) -> None:
    seen: list[events.Event] = []
    stop = events.subscribe(seen.append)
    try:
        holdfast.save({"w": torch.ones(1 << 20)}, tmp_path / "it", job=ALONE)
    finally:
        stop()
    [committed] = [event for event in seen if event.name == "save.committed"]
    assert 4 << 20 <= committed.fields["bytes"] < 5 << 20
    assert committed.fields["seconds"] > 0
