"""What the holders of a save in the background hear, on the rank that gives it up and on the others."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import events
from holdfast._core.background.pending import Pending
from holdfast._core.roster.memory import MemoryRoster
from holdfast._core.saving.job import SaveReport
from holdfast.errors import BadInput
from tests.support.threads import on_ranks


def test_a_save_that_one_rank_cancels_is_given_up_on_all(tmp_path: Path) -> None:
    """The others neither try it again nor count it as a failure that somebody should have seen."""
    entered: list[int] = []
    cancelled = threading.Event()

    def watch(event: events.Event) -> None:
        if event.name == "save.entered":
            entered.append(event.rank)
        if event.name == "save.writing" and event.rank == 1:
            cancelled.wait(60)  # it can't be committed before

    def job(roster: MemoryRoster) -> tuple[bool, str]:
        state = {f"own{roster.rank}": torch.ones(3)}
        pending = holdfast.async_save(
            state,
            tmp_path / "a",
            job=holdfast.Job(
                roster=roster, timeout=60, stall_timeout=30, options=holdfast.Options(retries=2)
            ),
        )
        if roster.rank == 0:
            assert pending.cancel()
            cancelled.set()
        pending.wait()
        return pending.failed_unseen(), str(pending.exception())

    stop = events.subscribe(watch)
    try:
        found = on_ranks(2, job)
    finally:
        stop()
    for unseen, said in found:
        assert "was cancelled on rank 0" in said
        assert not unseen
    assert sorted(entered) == [0, 1]


def test_a_save_that_is_tried_again_says_so_in_sentences(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a").write_text("a file, so the save fails")
    options = holdfast.Options(retries=1)
    pending = holdfast.async_save(
        {"w": torch.ones(3)}, tmp_path / "a", job=holdfast.Job(no_dist=True, options=options)
    )
    assert pending.exception(60) is not None
    said = next(record.getMessage() for record in caplog.records if "again" in record.getMessage())
    assert said.endswith("is a file, not a folder. It is tried again (1 left).")


def test_a_save_holds_nothing_once_its_result_is_there() -> None:
    """Its thread would free tensors; a process that ends at that moment is aborted by torch's C++."""
    report = SaveReport("a", None, 1, 4, 0.1, {})
    state, asked, held = torch.ones(3), threading.Event(), []

    def save(state: torch.Tensor) -> SaveReport:
        assert asked.wait(60)
        return report

    pending = Pending("a", None)
    known = weakref.ref(state)
    pending.start(partial(save, state))
    del state
    pending.add_done_callback(lambda _: held.append(known()))
    asked.set()
    assert pending.result(60) is report
    assert held == [None]


def test_a_wait_that_is_no_number_of_seconds_is_refused(tmp_path: Path) -> None:
    with holdfast.Checkpoints(tmp_path, job=holdfast.Job(no_dist=True)) as run:
        pending = run.save(1, {"w": torch.ones(3)})
        assert pending is not None
        ways = (
            pending.staged,
            pending.committed,
            pending.durable,
            pending.result,
            pending.exception,
            pending.wait,
        )
        timeouts: list[Any] = ["3", True, float("nan"), float("inf")]
        for wait, timeout in itertools.product((*ways, run.close), timeouts):
            with pytest.raises(BadInput, match=r"timeout must be a finite number of seconds, or None, not"):
                wait(timeout)
        assert pending.committed(60).step == 1


def test_it_is_a_future_of_its_report(tmp_path: Path) -> None:
    pending = holdfast.async_save({"w": torch.ones(3)}, tmp_path / "a", job=holdfast.Job(no_dist=True))
    assert isinstance(pending, concurrent.futures.Future)
    heard: list[object] = []
    pending.add_done_callback(heard.append)
    assert next(concurrent.futures.as_completed([pending], 60)) is pending
    assert pending.result(0).path == str(tmp_path / "a")
    assert pending.exception(0) is None
    assert (pending.done(), pending.cancelled(), pending.cancel()) == (True, False, False)
    assert heard == [pending]
    assert pending.upload_completion is pending


def test_a_wait_for_its_result_that_is_too_short_is_a_timeout(tmp_path: Path) -> None:
    stop = events.subscribe(lambda event: time.sleep(0.5) if event.name == "save.writing" else None)
    try:
        pending = holdfast.async_save({"w": torch.ones(3)}, tmp_path / "a", job=holdfast.Job(no_dist=True))
        with pytest.raises(TimeoutError):
            pending.result(0.01)
        with pytest.raises(TimeoutError):
            pending.exception(0.01)
        with pytest.raises(holdfast.errors.DeadlineExceeded, match="It goes on"):
            pending.committed(0.01)
        assert not pending.cancelled()
    finally:
        stop()
    pending.committed(60)


def test_notes_are_those_of_the_call_and_any_json(tmp_path: Path) -> None:
    """The index is made at the commit: a dict of notes that a loop goes on with was stored as it was by then."""
    notes: dict[str, Any] = {"step": 1, "losses": [0.5], "state of PCG64": 1 << 127, "odd": "\ud800"}
    pending = holdfast.async_save({"w": torch.zeros(1 << 20)}, tmp_path / "a", notes=notes)
    notes["step"] = 2
    notes["losses"].append(0.25)
    pending.result(60)
    with holdfast.open(tmp_path / "a") as opened:
        assert opened.notes == {"step": 1, "losses": [0.5], "state of PCG64": 1 << 127, "odd": "\ud800"}
