"""Signals that come in a flood, also while their handler runs and while watching ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import holdfast
from holdfast._core.roster.memory import MemoryRoster
from holdfast.errors import BadInput

PROGRAM = """
import os, signal, sys, threading, time
import holdfast
from holdfast._core.roster.memory import MemoryRoster

signal.signal(signal.SIGTERM, lambda number, frame: None)  # what is put back, so that none ends the process
Preemption, Job = holdfast.Preemption, holdfast.Job  # in a flood, their imports would take most of the test
stop = threading.Event()

def flood():
    while not stop.is_set():
        os.kill(os.getpid(), signal.SIGTERM)

for thread in [threading.Thread(target=flood) for _ in range(3)]:
    thread.start()
try:
    for _ in range(int(sys.argv[1])):
        with Preemption(budget=20, job=Job(roster=MemoryRoster())) as preemption:
            ends = time.monotonic() + 20
            while not preemption.should_stop() and time.monotonic() < ends:
                pass
            assert preemption.reason == "SIGTERM on rank 0", preemption.reason
finally:
    stop.set()
print("through")
"""


def flood(loops: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(loops)],
        capture_output=True,
        text=True,
        timeout=60.0 + 6.0 * loops,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "through\n"), ended.stderr


def test_a_flood_of_signals_stops_the_loop_and_nothing_else() -> None:
    flood(2)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_long_flood_of_signals_stops_the_loop_and_nothing_else() -> None:
    flood(120)


def test_a_signal_that_can_not_be_watched_leaves_the_others_as_they_were() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    job = holdfast.Job(roster=MemoryRoster())
    for odd in (signal.SIGKILL, "SIGTERM", 999):
        with pytest.raises(BadInput, match=r"^signals: .* can't be handled: "):
            holdfast.Preemption(signals=(signal.SIGUSR2, odd), job=job)  # type: ignore[arg-type]
        assert signal.getsignal(signal.SIGUSR2) is before


def test_a_budget_and_signals_of_the_wrong_type_are_one_sentence() -> None:
    job = holdfast.Job(roster=MemoryRoster())
    for budget in (0, "60", None):
        with pytest.raises(BadInput, match=r"^budget must be a positive, finite number of seconds"):
            holdfast.Preemption(budget=budget, job=job)  # type: ignore[arg-type]
    for signals in (signal.SIGTERM, "SIGTERM"):
        with pytest.raises(BadInput, match=r"^signals must be a list such as"):
            holdfast.Preemption(signals=signals, job=job)  # type: ignore[arg-type]


def test_on_another_thread_the_error_says_what_to_give() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(BadInput, match=r"main thread.*give signals=\(\)"):
        pool.submit(holdfast.Preemption, job=holdfast.Job(roster=MemoryRoster())).result()


def test_a_handler_that_python_did_not_install_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """`signal.signal` answers None for a handler from C."""
    install = signal.signal
    monkeypatch.setattr(signal, "signal", lambda number, handler: install(number, handler) and None)
    preemption = holdfast.Preemption(signals=(signal.SIGUSR2,), job=holdfast.Job(roster=MemoryRoster()))
    monkeypatch.undo()
    preemption.close()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
