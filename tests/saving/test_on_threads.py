"""Work that several threads share: results, errors, a limit of threads, and the end of the main thread."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast._core.io.on_threads import on_threads

AT_EXIT = """
import atexit, sys, torch, holdfast
from holdfast._tools.checkpoints.verify import verify

def save_and_load(threads):
    folder = f"{sys.argv[1]}-{threads}"
    state = {name: torch.full((300, 1000), float(number)) for number, name in enumerate("abcdefgh")}
    options = holdfast.Options(writer_threads=threads)
    job = holdfast.Job(no_dist=True, options=options)
    holdfast.save(state, folder, job=job)
    found = {name: torch.zeros(300, 1000) for name in state}
    holdfast.load(found, folder, job=job)
    assert all(torch.equal(found[name], state[name]) for name in state)
    print(f"{threads} whole:", verify(folder, threads=2).whole)

atexit.register(save_and_load, 2)
atexit.register(save_and_load, 1)
"""


def test_an_atexit_handler_saves_loads_and_verifies(tmp_path: Path) -> None:
    """With one thread, and with two."""
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, str(tmp_path / "step")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.returncode) == ("1 whole: True\n2 whole: True\n", 0), done.stderr


@pytest.mark.parametrize("threads", [0, 1, 3, 50])
def test_results_come_in_the_order_of_the_tasks(threads: int) -> None:
    seen: set[int] = set()

    def work(number: int) -> int:
        seen.add(threading.get_ident())
        time.sleep(0.002)
        return number * number

    assert on_threads(threads, "some", work, iter(range(20))) == [number * number for number in range(20)]
    assert len(seen) > 1 or threads < 2
    assert not [thread for thread in threading.enumerate() if thread.name == "some"]


def test_an_error_ends_all_threads_before_it_is_raised() -> None:
    done: list[int] = []

    def work(number: int) -> None:
        if number == 3:
            raise OSError("no more")
        time.sleep(0.002)
        done.append(number)

    with pytest.raises(OSError, match="no more"):
        on_threads(2, "some", work, range(1000))
    assert len(done) < 20
    assert not [thread for thread in threading.enumerate() if thread.name == "some"]


def test_an_interrupt_waits_for_the_tasks_that_have_begun() -> None:
    """The caller has no task left and waits for the other thread."""
    begun, done = threading.Event(), list[int]()

    def work(number: int) -> None:
        if threading.current_thread() is threading.main_thread():
            assert begun.wait(60)
            return
        begun.set()
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        time.sleep(0.5)
        done.append(number)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            on_threads(2, "some", work, range(2))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(done) == 1


@pytest.mark.parametrize("allowed", [0, 2])
def test_a_limit_of_threads_costs_time_only(monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    real, left = threading.Thread.start, [allowed]

    def start(thread: threading.Thread, *rest: Any) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        real(thread, *rest)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert on_threads(8, "some", abs, range(-50, 0)) == list(range(50, 0, -1))
