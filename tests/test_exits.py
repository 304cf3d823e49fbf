"""How a process ends in which something failed that nobody has asked about: its exit code, its handlers, its
last words."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from tests.groups.session.launch import Ended, Forks

SCRIPT = """
import atexit, os, sys
file, fails, how = sys.argv[1:]
atexit.register(print, "a handler from before", flush=True)
from holdfast._core.process.exits import Failure, Stage, at_exit
kept = open(file, "w")
kept.write("what was not flushed")

def later():
    print("threads", flush=True)

def first():
    print("saves", flush=True)
    if fails == "fails":
        return Failure("OSError: the disk is full")

at_exit(Stage.THREADS, later)
at_exit(Stage.SAVES, first)
at_exit(Stage.SAVES, first)
atexit.register(print, "a handler from after", flush=True)
if how == "fork":
    kept.flush()
    if not os.fork():
        atexit.unregister(print)
        sys.exit(5)
    print("a fork ended with", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
elif how == "raise":
    raise ValueError("the loss is not a number")
elif how == "interrupt":
    raise KeyboardInterrupt
elif how == "bare":
    raise SystemExit(3)
elif how == "caught":
    try:
        sys.exit(3)
    except SystemExit as error:
        assert error.code == 3
elif how != "end":
    sys.exit(int(how) if how.isdigit() else how)
"""


def ending(folder: Path, fails: str, how: str) -> tuple[int, list[str], str]:
    """Exit code, what was done at the end, and the last line on the terminal."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder / "file"), fails, how],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (folder / "file").read_text() == "what was not flushed"
    return done.returncode, done.stdout.splitlines(), (done.stderr.rstrip().splitlines() or [""])[-1]


HANDLERS = ["a handler from after", "a handler from before"]


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("end", 1),
        ("0", 1),
        ("256", 1),  # which is 0 to who waits for the process
        ("3", 1),  # only a session knows the code
        ("the data is gone", 1),
        ("bare", 1),
        ("caught", 1),
        ("raise", 1),
        ("interrupt", -2),
    ],
)
def test_a_failure_that_nobody_has_asked_about_is_the_end_of_the_process(
    how: str, code: int, tmp_path: Path
) -> None:
    found, done, last = ending(tmp_path, "fails", how)
    assert found == code
    assert done == ["saves", "threads", *HANDLERS], "each once, Holdfast's first, by stage"
    assert last == "OSError: the disk is full"


@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("end", 0, ""),
        ("3", 3, ""),
        ("the data is gone", 1, "the data is gone"),
        ("bare", 3, ""),
        ("caught", 0, ""),
        ("raise", 1, "ValueError: the loss is not a number"),
        ("interrupt", -2, "KeyboardInterrupt"),
    ],
)
def test_where_nothing_failed_the_interpreter_ends_as_ever(
    how: str, code: int, last: str, tmp_path: Path
) -> None:
    assert ending(tmp_path, "goes well", how) == (code, ["saves", "threads", *HANDLERS], last)


@pytest.mark.parametrize(("fails", "code"), [("fails", 1), ("goes well", 0)])
def test_a_fork_has_nothing_of_it(fails: str, code: int, tmp_path: Path) -> None:
    found, done, _ = ending(tmp_path, fails, "fork")
    assert found == code
    assert done == ["a fork ended with 5", "saves", "threads", *HANDLERS]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("tests.support.run_code") as made:
        yield made


def script(forks: Forks, folder: Path, code: str, *args: object) -> Ended:
    """How a program ends whose first argument is a run folder."""
    words = [code, str(folder / "run"), *map(str, args)]
    return forks.run(words, [0], 1, folder / "terminal", 90.0)


def steps(folder: Path) -> list[int]:
    return holdfast.Checkpoints(folder / "run", job=holdfast.Job(no_dist=True)).steps()


AT_EXIT = """
import atexit, sys, torch, holdfast
checkpoints = holdfast.Checkpoints(sys.argv[1])
checkpoints.save(1, {"w": torch.ones(3)})
state, expected = {"w": torch.ones(int(sys.argv[2]))}, ["w", *sys.argv[3:]]
atexit.register(lambda: checkpoints.save(2, state, expected=expected))
"""


def test_a_save_that_an_atexit_handler_begins_is_committed(forks: Forks, tmp_path: Path) -> None:
    ended = script(forks, tmp_path, AT_EXIT, 5_000_000)
    assert (ended.codes, ended.said) == ([0], "")
    assert steps(tmp_path) == [1, 2]


def test_a_save_that_an_atexit_handler_begins_and_that_fails_is_told(forks: Forks, tmp_path: Path) -> None:
    ended = script(forks, tmp_path, AT_EXIT, 3, "gone")
    assert ended.codes == [1]
    assert "Vanished" in ended.said.strip().splitlines()[-1]
    assert steps(tmp_path) == [1]


LATE = """
import threading, torch, sys
def late():
    threading.main_thread().join()
    import holdfast
    holdfast.Checkpoints(sys.argv[1], asynchronous=False).save(1, {"w": torch.ones(1)})
threading.Thread(target=late).start()
"""


def test_the_first_use_may_come_after_the_main_thread_has_ended(forks: Forks, tmp_path: Path) -> None:
    ended = script(forks, tmp_path, LATE)
    assert steps(tmp_path) == [1], ended.said
