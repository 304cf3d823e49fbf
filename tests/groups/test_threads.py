"""Ranks that can start no more threads, as at a limit of processes: all others hear which, and nobody waits
for its timeout."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from holdfast._core.base.threads import within
from holdfast._core.process.heart import Heart
from holdfast._groups.audit import doctor
from holdfast._groups.audit.doctor import ask, serve
from holdfast._groups.audit.hazards import ProcessFacts
from holdfast.errors import HoldfastError
from tests.groups import thread_jobs as jobs
from tests.support.processes import ProcessWorld
from tests.support.threads import no_more_threads as refused


@pytest.fixture
def no_more_threads() -> Iterator[None]:
    with refused():
        yield


@pytest.mark.parametrize("where", ["its part", "its watch", "its end"])
def test_a_rank_without_threads_is_named_on_all_ranks(where: str) -> None:
    with ProcessWorld(3) as world:
        for rank, (said, seconds) in enumerate(world.run(jobs.HOW[where], 1, timeout=60)):
            assert jobs.SAID[where] in said, (rank, said)
            assert "rank 1" in said.lower() or rank == 1, said
            assert seconds < jobs.STALL, (rank, said)


def test_what_may_block_is_refused_in_one_sentence(no_more_threads: None) -> None:
    with pytest.raises(
        HoldfastError, match=r"'holdfast-look' could not be started in this process.*pids\.max"
    ):
        within(1.0, "nothing", lambda: None)


def test_a_process_without_threads_goes_on_without_its_doctor(
    no_more_threads: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor.stop()  # other tests may have let one serve
    monkeypatch.setattr(doctor, "heart", Heart())  # that of this process may have its thread already
    serve(lambda: ProcessFacts(os.getpid(), None, None, "", False, (), {}))
    assert ask(os.getpid()) is None
    assert "`holdfast doctor` can't be answered" in caplog.text
