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
from tests.support.waiting import wait_until

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
    together = threading.Barrier(2 if threads > 1 else 1)

    def work(number: int) -> int:
        if number < 2:  # the first two are under way at once
            together.wait(60)
        return number * number

    assert on_threads(threads, "some", work, iter(range(20))) == [number * number for number in range(20)]
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


def test_an_interrupt_waits_for_the_tasks_that_have_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller has no task left and waits for the other thread."""
    main, begun, interrupted, done = (
        threading.main_thread(),
        threading.Event(),
        threading.Event(),
        list[int](),
    )

    def work(number: int) -> None:
        if threading.current_thread() is main:
            assert begun.wait(60)
            return
        begun.set()
        wait_until(lambda: in_join(main))
        signal.pthread_kill(main.ident or 0, signal.SIGUSR2)
        assert interrupted.wait(60)
        time.sleep(0.2)  # a caller that does not wait has returned by then
        done.append(number)

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast._core.io.on_threads.LAST_TASK", 60.0)
    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            on_threads(2, "some", work, range(2))
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert len(done) == 1


def in_join(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code.co_name != "join":
        frame = frame.f_back
    return frame is not None


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
