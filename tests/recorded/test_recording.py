"""The event log of a rank: what it holds, what it costs, and that nothing waits for it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import events
from holdfast._core.base.options import roll_call_folder
from holdfast._core.base.shared_folder import SharedFolder
from holdfast._core.process import recording as _recording
from holdfast._core.process.recording import BEGUN, ENDED, LOST, EventLine
from holdfast._tools.recorded.event_log import read_events
from holdfast.errors import BadInput
from tests.support.waiting import wait_until

ALONE = holdfast.Job(no_dist=True)


def lines(run: Path) -> list[EventLine]:
    logs = read_events(str(run))
    assert logs.skipped == 0
    return logs.ranks.get(0, [])


def test_a_save_and_phases_are_recorded_in_order(tmp_path: Path) -> None:
    end = events.record(tmp_path)
    with events.phase("outer"), events.phase("inner"):
        holdfast.save({"w": torch.ones(1 << 18)}, tmp_path / "step-00000001", step=1, job=ALONE)
        time.sleep(0.15)
    end()
    found = lines(tmp_path)
    names = [line.name for line in found if "bytes_done" not in line.fields]
    save = [f"save.{phase}" for phase in ("entered", "writing", "written", "committing", "committed")]
    assert names == [BEGUN, "phase.entered", "phase.entered", *save, "phase.left", "phase.left", ENDED]
    assert found[0].fields == {"world": 1, "host": os.uname().nodename, "pid": os.getpid()}
    assert {line.step for line in found if line.name.startswith("save.")} == {1}
    assert next(line for line in found if line.name == "save.committed").fields["bytes"] >= 1 << 20
    inner, outer = (line.fields for line in found if line.name == "phase.left")
    assert (inner["phase"], outer["phase"]) == ("inner", "outer")
    assert outer["seconds"] >= inner["seconds"] >= 0.15


@pytest.mark.parametrize("place", ["s3://bucket/run", 3, None])
def test_a_place_that_is_no_folder_is_refused(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=f"Events are recorded in files: '{place}' is no path"):
        events.record(place)
    assert list(tmp_path.iterdir()) == []


def test_a_url_in_the_environment_is_told_and_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_EVENTS", "s3://bucket/run")
    monkeypatch.setenv("HOLDFAST_ROLL_CALLS", "s3://bucket/calls")
    holdfast.install("torch-dcp", session=False)
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
    finally:
        holdfast.uninstall()
    assert "HOLDFAST_EVENTS: Events are recorded in files: 's3://bucket/run' is no path." in caplog.text
    assert "HOLDFAST_ROLL_CALLS names no folder" in caplog.text
    assert roll_call_folder() == ""
    assert list(tmp_path.iterdir()) == []


def test_short_phases_are_left_out_and_a_long_one_is_written_while_it_lasts(tmp_path: Path) -> None:
    end = events.record(tmp_path)
    for _ in range(1000):
        with events.phase("step"):
            pass
    with events.phase("eval"):
        wait_until(lambda: any(line.fields.get("phase") == "eval" for line in lines(tmp_path)))
    end()
    assert [line.name for line in lines(tmp_path) if line.fields.get("phase")] == [
        "phase.entered",
        "phase.left",
    ]


def test_the_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest events stay; those beyond the queue of one second are counted."""
    monkeypatch.setattr(_recording, "LIMIT", 10_000)
    monkeypatch.setattr(_recording, "QUEUED", 100)
    end = events.record(tmp_path)
    for part in range(4):
        for step in range(50):
            events.emit("save.entered", step=100 * part + step, path="x" * 100)
        wait_until(lambda part=part: any(line.step == 100 * part + 49 for line in lines(tmp_path)))  # type: ignore[misc]
    for step in range(150):
        events.emit("save.entered", step=5000 + step)
    end()
    sizes = [path.stat().st_size for path in (tmp_path / "events").iterdir()]
    assert sum(sizes) < 2 * 10_000 + 50 * 200
    found = lines(tmp_path)
    assert found[0].step is not None
    assert found[0].step > 0
    assert sum(line.fields["events"] for line in found if line.name == LOST) == 50


def test_storage_that_hangs_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, append = threading.Event(), SharedFolder.append

    def when_it_answers(folder: SharedFolder, name: str, data: bytes) -> int:
        answers.wait(60)
        return append(folder, name, data)

    monkeypatch.setattr(SharedFolder, "append", when_it_answers)
    end = events.record(tmp_path)
    try:
        wait_until(lambda: any(thread.name == "holdfast-events" for thread in threading.enumerate()))
        began = time.monotonic()
        holdfast.save({"w": torch.ones(4)}, tmp_path / "a", job=ALONE)
        for _ in range(10_000):
            events.emit("save.entered")
        assert time.monotonic() - began < 10
        began = time.monotonic()
        end()
        assert time.monotonic() - began < 5
    finally:
        answers.set()
        wait_until(lambda: not any(thread.name == "holdfast-events" for thread in threading.enumerate()))
    assert read_events(str(tmp_path)).ranks[0]


def test_a_folder_that_can_not_be_written_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "events").write_text("a file")
    end = events.record(tmp_path)
    wait_until(lambda: "Events can't be recorded in" in caplog.text)
    events.emit("save.entered")
    end()
    assert caplog.text.count("Events can't be recorded in") == 1


def test_a_phase_costs_the_program_few_microseconds(tmp_path: Path) -> None:
    """docs/report.md says less than 50."""

    def phases() -> float:
        began = time.thread_time()
        for _ in range(200):
            with events.phase("step"):
                pass
        return (time.thread_time() - began) / 200

    # Many short looks: other tests share the caches of this machine for much of the time.
    without = min(phases() for _ in range(50))
    end = events.record(tmp_path)
    recorded = min(phases() for _ in range(50))
    end()
    print(f"a phase takes {1e6 * without:.1f} us, {1e6 * recorded:.1f} us recorded")
    assert recorded - without < 50e-6
