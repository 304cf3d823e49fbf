"""A rank that follows another one out of a session ends after the other one's process, and its launcher, which
polls, sees that order."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import msgspec
import pytest

from holdfast._core.roster.presence import Vitals
from holdfast._core.roster.process import stat, this_process
from holdfast._groups.session.shutdown import NOTICED, see_off

LASTS = 0.4


def process(seconds: float) -> Iterator[tuple[subprocess.Popen[bytes], Vitals]]:
    with subprocess.Popen(["sleep", str(seconds)]) as child:
        entry = stat(child.pid)
        assert entry is not None
        who = msgspec.structs.replace(this_process(1), pid=child.pid, started=entry.started)
        yield child, Vitals(who)
        child.kill()


@pytest.fixture
def ending() -> Iterator[tuple[subprocess.Popen[bytes], Vitals]]:
    yield from process(LASTS)


@pytest.fixture
def staying() -> Iterator[tuple[subprocess.Popen[bytes], Vitals]]:
    yield from process(600.0)


def test_the_launcher_has_time_to_notice_the_first_end(
    ending: tuple[subprocess.Popen[bytes], Vitals],
) -> None:
    begun = time.monotonic()
    child, vitals = ending
    see_off(vitals, begun + 60.0)
    assert child.poll() == 0
    assert time.monotonic() - begun > NOTICED + LASTS / 2  # the child began a little earlier


def test_a_process_that_does_not_end_is_not_waited_for(
    staying: tuple[subprocess.Popen[bytes], Vitals],
) -> None:
    child, vitals = staying
    see_off(vitals, time.monotonic() + 0.1)
    assert child.poll() is None


def test_of_another_machine_nothing_is_waited_for(staying: tuple[subprocess.Popen[bytes], Vitals]) -> None:
    _, vitals = staying
    elsewhere = Vitals(msgspec.structs.replace(vitals.who, machine="other"))
    see_off(elsewhere, time.monotonic() + 600.0)
    see_off(None, time.monotonic() + 600.0)
