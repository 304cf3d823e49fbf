"""Signals that come in a flood, also while their handler runs and while watching ends."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, signal, threading, time
import holdfast
from holdfast.roster.memory import MemoryRoster

signal.signal(signal.SIGTERM, lambda number, frame: None)  # what is put back, so that none ends the process
stop = threading.Event()

def flood():
    while not stop.is_set():
        os.kill(os.getpid(), signal.SIGTERM)

for thread in [threading.Thread(target=flood) for _ in range(3)]:
    thread.start()
try:
    for _ in range(40):
        with holdfast.Preemption(budget=20, roster=MemoryRoster()) as preemption:
            ends = time.monotonic() + 20
            while not preemption.should_stop() and time.monotonic() < ends:
                pass
            assert preemption.reason == "SIGTERM on rank 0", preemption.reason
finally:
    stop.set()
print("through")
"""


def test_a_flood_of_signals_stops_the_loop_and_nothing_else() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "through\n"), ended.stderr
