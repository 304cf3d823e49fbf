"""Tasks of all ranks at the end of their process."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading, time
from holdfast._core.protocol.call import begin_call
from holdfast._core.protocol.task import CollectiveTask
from holdfast.errors import HoldfastError
import holdfast

class Task(CollectiveTask):
    def execute(self, answer):
        if sys.argv[1] == "is stuck":
            time.sleep(600)
        return {}

class Slow(threading.Event):
    def set(self):
        super().set()
        time.sleep(600)  # as a thread does that gets no time on a busy machine

task = Task("a task", "place", begin_call(holdfast.Job(no_dist=True, timeout=3.0)))
task._over = Slow()
try:
    task.run()
    print("is done")
except HoldfastError:
    print("is given up")
"""


@pytest.mark.parametrize(("how", "said", "code"), [("works", "is done", 0), ("is stuck", "is given up", 1)])
def test_a_process_ends_well_unless_a_task_is_stuck(how: str, said: str, code: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=100, check=False
    )
    assert (ended.stdout, ended.returncode) == (f"{said}\n", code), ended.stderr
