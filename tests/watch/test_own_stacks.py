"""A look at a program's threads changes nothing in it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import torch

import holdfast
from holdfast._core.roster import memory
from holdfast._watch.evidence import OPERATION, Stack
from holdfast._watch.own_stacks import stacks_here
from holdfast._watch.positions import position_among
from holdfast.testing import Board, MemoryRoster


def looked_at(seen: list[Stack]) -> None:
    """Have another thread look at this one."""
    look = threading.Thread(target=lambda: seen.extend(stacks_here()))
    look.start()
    look.join()


def frees_its_batch(seen: list[Stack]) -> bool:
    for _ in range(1):
        batch = torch.ones(4)
        freed = weakref.ref(batch)
        torch.nn.Linear(2, 2).eval()  # which is not Python's `eval`
        looked_at(seen)
        del batch
    return freed() is None


def test_tensors_of_a_function_are_freed_when_it_deletes_them() -> None:
    seen: list[Stack] = []
    assert frees_its_batch(seen)
    assert any(call.function == "frees_its_batch" for call in seen[0].calls)


def test_a_save_that_waits_for_a_rank_is_known_to_wait(tmp_path: Path) -> None:
    board, found = Board(), list[str]()

    def save(rank: int) -> None:
        job = holdfast.Job(roster=MemoryRoster(rank, 2, board), timeout=60)
        holdfast.save({"w": torch.ones(3)}, tmp_path / "a", job=job)

    def come_late() -> None:
        ends = time.monotonic() + 30
        while not found and time.monotonic() < ends:
            stacks = stacks_here()
            ours = [stack for stack in stacks if stack.thread == OPERATION]
            if any(call.file == memory.__file__ for stack in ours for call in stack.calls[:4]):
                found.append(position_among(stacks).does)
            time.sleep(0.01)
        save(1)

    late = threading.Thread(target=come_late)
    late.start()
    save(0)
    late.join()
    assert found == ["waits"]


AT_THE_END = """
import atexit, sys, threading
from holdfast._watch.evidence import AT_EXIT
from holdfast._watch.own_stacks import _raised, stacks_here
from holdfast._watch.positions import has_ended, is_in_its_program

def look(name):
    stack = stacks_here()[0]
    raised = [(one.what, one.is_cause) for one in _raised()]
    print(name, stack.calls[-1] == AT_EXIT, has_ended(stack), is_in_its_program(stack), raised)

looks = {name: (threading.Event(), threading.Event()) for name in ("program", "joins", "handler")}

def watch():
    for name, (asked, done) in looks.items():
        asked.wait()
        look(name)
        done.set()

def ask(name):
    asked, done = looks[name]
    asked.set()
    done.wait(60)

def outlives_the_program():
    threading.main_thread().join()
    ask("joins")

threading.Thread(target=watch, daemon=True).start()
atexit.register(ask, "handler")
ask("program")
threading.Thread(target=outlives_the_program).start()
raise ValueError("the batch is empty")
"""


def test_a_main_thread_at_its_exit_is_told_from_one_in_its_program() -> None:
    """In an `atexit` handler no Python call shows it. What has ended the program is told."""
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    raised = "[('ValueError: the batch is empty', True)]"
    assert done.stdout.splitlines() == [
        "program False False True []",
        f"joins False True False {raised}",
        f"handler True True False {raised}",
    ]
