"""The one standing thread: duties, failures, descriptors, forks, and the end of a process."""

from __future__ import annotations

import io
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast._core.process import heart as _heart
from holdfast._core.process.exits import say
from holdfast._core.process.heart import HASTE, NAME, Heart, heart
from holdfast.errors import HoldfastError
from tests.support.threads import in_a_fork, no_more_threads
from tests.support.waiting import wait_until


class Counts:
    """A duty that notes when it is done, and on which thread."""

    def __init__(self, interval: float = 0.02, does: Callable[[], None] = lambda: None) -> None:
        self.interval, self.does = interval, does
        self.at: list[float] = []
        self.closed = 0
        self.threads: set[str] = set()

    def beat(self) -> None:
        self.at.append(time.monotonic())
        self.threads.add(threading.current_thread().name)
        self.does()

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def own() -> Iterator[Heart]:
    """A heart of the test's own; its thread and descriptors must be gone at the end."""
    before = len(os.listdir("/proc/self/fd"))
    made = Heart()
    yield made
    for duty in list(made._duties):
        made.end(duty)
    # It closes them just after it says that it has no thread.
    wait_until(lambda: made._thread is None and len(os.listdir("/proc/self/fd")) <= before)


def hearts() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def test_a_duty_that_has_ended_is_not_held_until_the_next_one_is_done(own: Heart) -> None:
    """What it holds, such as a session's groups with their threads and sockets, would stay for as long."""
    seldom, often = Counts(600.0), [Counts(0.02)]
    own.begin(seldom)
    own.begin(often[0])
    wait_until(lambda: len(often[0].at) >= 2)
    own.end(often[0])
    wait_until(lambda: often[0].closed)
    left = weakref.ref(often.pop())
    wait_until(lambda: left() is None, 5.0)
    assert not seldom.at


def test_duties_are_done_at_their_intervals_on_one_thread(own: Heart) -> None:
    often, seldom = Counts(0.02), Counts(0.2)
    before = len(hearts())
    own.begin(often)
    own.begin(seldom, delay=0.0)
    wait_until(lambda: len(seldom.at) >= 4)
    assert len(hearts()) == before + 1
    assert often.threads == seldom.threads == {NAME}
    assert len(often.at) > len(seldom.at)
    gaps = [later - sooner for sooner, later in zip(seldom.at, seldom.at[1:], strict=False)]
    assert min(gaps) > 0.1
    own.end(often)
    wait_until(lambda: often.closed)
    done = len(often.at)
    more = len(seldom.at)
    wait_until(lambda: len(seldom.at) > more + 1)
    assert len(often.at) == done
    assert not seldom.closed


def test_a_duty_that_fails_stops_no_other(own: Heart, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("no such rank")

    bad, good = Counts(0.02, fail), Counts(0.02)
    with caplog.at_level(logging.WARNING, "holdfast"):
        own.begin(bad)
        own.begin(good)
        wait_until(lambda: len(bad.at) > 3 and len(good.at) > 3)
    assert "fail" in caplog.text
    assert "ValueError: no such rank" in caplog.text


def test_a_duty_that_fails_to_close_stops_no_other(own: Heart) -> None:
    bad, good = Counts(), Counts()
    bad.close = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    for duty in (bad, good):
        own.begin(duty)
    own.end(bad)
    done = len(good.at)
    wait_until(lambda: len(good.at) > done)


def test_it_ends_with_the_last_duty_and_begins_again(own: Heart) -> None:
    before = len(hearts())
    for _ in range(20):
        duty = Counts()
        own.begin(duty)
        own.end(duty)
        wait_until(lambda duty=duty: duty.closed == 1)
        own.end(duty)
    wait_until(lambda: len(hearts()) == before)
    assert duty.closed == 1, "closed once"


def test_many_threads_may_begin_and_end_duties_at_once(own: Heart) -> None:
    duties = [Counts(0.001) for _ in range(8)]
    before = len(hearts())
    most: list[int] = []

    def churn(duty: Counts) -> None:
        for _ in range(50):
            own.begin(duty)
            own.hurry(duty)
            most.append(len(hearts()))
            own.end(duty)

    threads = [threading.Thread(target=churn, args=(duty,)) for duty in duties]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    wait_until(lambda: len(hearts()) == before)
    # One that ends may still be there when the next begins.
    assert max(most) <= before + 2
    assert all(duty.closed for duty in duties)


def test_hurry_is_soon_but_never_a_flood(own: Heart) -> None:
    duty = Counts(60.0)
    own.begin(duty, delay=0.0)
    wait_until(lambda: duty.at)
    ends = time.monotonic() + 1.0
    while time.monotonic() < ends:  # as when strangers knock without end
        own.hurry(duty)
        time.sleep(0.001)
    assert 2 <= len(duty.at) <= 1.0 / HASTE + 2
    own.hurry(Counts())  # of no duty: nothing


def test_files_are_looked_at_until_they_are_forgotten(own: Heart) -> None:
    ours, theirs = socket.socketpair()
    heard: list[bytes] = []
    with ours, theirs:
        duty = Counts(60.0, lambda: own.on_readable(ours, lambda: heard.append(ours.recv(10))))
        own.begin(duty, delay=0.0)
        wait_until(lambda: duty.at)
        theirs.send(b"a")
        wait_until(lambda: heard == [b"a"])
        own.forget(ours)
        own.forget(ours)
        theirs.send(b"b")
        time.sleep(0.1)
        assert heard == [b"a"]
        own.end(duty)


def test_a_file_whose_action_fails_rests_and_is_looked_at_again(
    own: Heart, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a connection that waits while the process has no descriptor left."""
    monkeypatch.setattr(_heart, "REST", 0.2)
    here, there = socket.socketpair()
    calls, failing = [], [True]

    def answer() -> None:
        calls.append(time.monotonic())
        if failing[0]:
            raise OSError("no descriptors")
        here.recv(16)

    class Answers:
        interval = 60.0
        begun = False

        def beat(self) -> None:
            own.on_readable(here, answer)

        def close(self) -> None:
            own.forget(here)
            here.close()

    duty, began = Answers(), time.process_time()
    own.begin(duty, 0.0)
    there.send(b"!")
    wait_until(lambda: len(calls) >= 3)
    gaps = [later - sooner for sooner, later in pairwise(calls)]
    assert gaps[0] >= 0.19
    assert gaps[1] >= 0.39
    assert time.process_time() - began < 0.5
    assert caplog.text.count("no descriptors") == 1
    failing[0] = False
    wait_until(lambda: len(calls) >= 4)
    there.send(b"!")  # at once, as it has succeeded
    wait_until(lambda: len(calls) >= 5)
    failing[0] = True
    there.send(b"!")
    wait_until(lambda: len(calls) >= 6)
    wait_until(lambda: caplog.text.count("no descriptors") == 2)
    own.end(duty)
    there.close()


def test_where_no_thread_can_be_started_it_says_so_and_keeps_nothing(own: Heart) -> None:
    with no_more_threads(), pytest.raises(HoldfastError, match="could not be started"):
        own.begin(Counts())
    assert not own._duties
    duty = Counts()
    own.begin(duty)
    wait_until(lambda: duty.at)


def test_a_fork_has_none_of_its_parents_duties_and_descriptors_and_a_heart_of_its_own() -> None:
    ours, theirs = socket.socketpair()
    duty = Counts(0.02)
    first = Counts(60.0, lambda: heart.on_readable(ours, lambda: None))
    heart.begin(first, delay=0.0)
    heart.begin(duty)
    wait_until(lambda: duty.at and first.at)

    def child() -> None:
        assert ours.fileno() == -1, "else it would keep the connection of its parent open"
        before = len(duty.at)
        time.sleep(0.2)
        assert len(duty.at) == before
        mine = Counts()
        heart.begin(mine)
        wait_until(lambda: mine.at)
        heart.end(mine)

    in_a_fork(child)
    done = len(duty.at)
    wait_until(lambda: len(duty.at) > done + 3)
    assert ours.fileno() >= 0
    heart.end(duty)
    heart.end(first)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("ends", ["", "sys.exit(3)", "raise SystemExit(3)", "os._exit(3)", "1 / 0"])
def test_a_process_ends_as_promptly_as_without_it(ends: str) -> None:
    """Also while the heart is in the middle of a beat."""
    program = (
        "import os, sys, time\nfrom holdfast._core.process.heart import heart\n"
        "class Slow:\n interval = 0.01\n def beat(self): time.sleep(20)\n def close(self): pass\n"
        f"heart.begin(Slow()); time.sleep(0.3); print(time.monotonic(), flush=True)\n{ends}"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[1],
    )
    assert time.monotonic() - float(ended.stdout) < 5.0
    assert ended.returncode == {"": 0, "1 / 0": 1}.get(ends, 3), ended.stderr
    assert "Fatal" not in ended.stderr


@pytest.mark.parametrize("closed", [True, False])
def test_a_closed_terminal_ends_neither_the_heart_nor_the_program(
    closed: bool, own: Heart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without handlers, logging writes to `sys.stderr`, and raises if that is closed."""
    terminal = io.StringIO()
    terminal.close()
    monkeypatch.setattr(sys, "stderr", terminal if closed else None)
    monkeypatch.setattr(logging.getLogger("holdfast"), "propagate", False)

    def fail() -> None:
        raise ValueError("a failure that is logged")

    fails, goes_on = Counts(does=fail), Counts()
    own.begin(fails)
    own.begin(goes_on)
    wait_until(lambda: len(fails.at) > 1 and len(goes_on.at) > 1)
    logging.getLogger("holdfast").warning("a rank has waited")
    say("a rank ends")
