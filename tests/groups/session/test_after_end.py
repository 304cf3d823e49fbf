"""Processes that do not end after their session, and those that only seem not to; forks of a rank."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import BadInput
from tests.groups.session.launch import launch

pytestmark = pytest.mark.usefixtures("forks")

HELD = {
    "thread": "threads that are no daemons: 'uploader'",
    "pool": "threads that are no daemons: 'loader_0'",
    "handler": "its main thread is in no Python code",
    "child": "child processes: ",
    "in a child of multiprocessing": "child processes: ",
}
"""What keeps a process, and how it is named."""
BEYOND_PYTHON = ("finalisation", "C exit handler", "GIL")
HEALTHY = (
    "ends",
    "computes",
    "writes a file",
    "uploads",
    "a child computes",
    *(("goes on in a thread",) if sys.version_info[:2] != (3, 12) else ()),  # which starts no thread so late
    "is long in its finalisation",
    "save",
    "an exit handler rings",
    "an exit handler executes",
)
ALL = (*HELD, *BEYOND_PYTHON, *HEALTHY)
SOME = ("thread", "handler", "child", "finalisation", "ends", "computes", "uploads", "save")


@pytest.mark.parametrize("modes", [SOME, pytest.param(ALL, marks=pytest.mark.wide)], ids=["some", "all"])
def test_what_keeps_a_process_after_its_session_is_ended_with_it_and_named(
    modes: tuple[str, ...], tmp_path: Path
) -> None:
    ended = launch(",".join(modes), tmp_path, "after", world=len(modes))
    codes = dict(zip(modes, ended.codes, strict=True))
    # Where no Python thread runs any more, a thread of faulthandler's ends the process, or the kernel.
    assert {codes.pop(mode) for mode in BEYOND_PYTHON if mode in modes} <= {1, -signal.SIGALRM}, ended.said
    assert codes == {mode: 87 if mode in HELD else 0 for mode in codes}, ended.said
    held = [mode for mode in modes if mode in HELD]
    for mode in held:
        rank, holder = modes.index(mode), HELD[mode]
        (line,) = re.findall(f"rank {rank} ends with (.*)", ended.said)
        assert line.startswith("exit code 87: its process was still there 1.5 s after the end of its"), line
        assert holder in line, (mode, line)
    assert ended.said.count("most recent call first") >= len(held), "stacks are written"
    assert "Timeout (" in ended.said, "also where no Python thread runs any more"
    assert ("the program went on" in ended.said) == ("goes on in a thread" in modes)
    assert (tmp_path / "run" / "after" / "index.safetensors").exists()


def test_what_keeps_a_process_is_told_and_not_ended(tmp_path: Path) -> None:
    """Without `after_end`, a process lasts as long as it would have without Holdfast."""
    modes = ["thread", "handler", "child", "computes"]
    ended = launch(",".join(f"unbounded {mode}" for mode in modes), tmp_path, "after", world=len(modes))
    assert ended.codes == [0] * len(modes), ended.said
    for rank, mode in enumerate(modes):
        # Its main thread may be in a handler: so it has not ended.
        told = f"rank {rank}: its main thread has come to the end of the program, and its process has done nothing for . s; (.*)"
        lines = re.findall(told, ended.said)
        assert len(lines) == (mode in HELD), (mode, ended.said)
        assert all(HELD[mode] in line and line.endswith("It is not ended.") for line in lines)
    assert ended.said.count("most recent call first") >= 3, "stacks are written"


def test_a_session_that_fails_and_is_caught_ends_no_later_life(tmp_path: Path) -> None:
    ended = launch("caught", tmp_path, "caught", world=3)
    assert ended.codes == [0] * 3, ended.said
    assert ended.said.count("is through") == 3, ended.said


def test_a_session_without_a_block_is_waited_for_at_the_end_beyond_the_bound(tmp_path: Path) -> None:
    ended = launch("late", tmp_path, "to the end", world=2)
    assert ended.codes == [0] * 2, ended.said


def test_the_beat_of_a_session_without_a_block_is_no_work_of_the_program(tmp_path: Path) -> None:
    ended = launch("thread", tmp_path, "to the end", limit=60.0, world=2)
    assert ended.codes[1] == 87, ended.said
    assert "threads that are no daemons: 'uploader'" in ended.said


@pytest.mark.parametrize("how", ["block", pytest.param("to the end", marks=pytest.mark.wide)])
def test_a_fork_of_a_rank_leaves_the_job_alone_however_it_ends(how: str, tmp_path: Path) -> None:
    ended = launch("fork", tmp_path, how, world=2)
    assert ended.codes == [0] * 2, ended.said
    for rank in range(2):
        for code in (0, 1, 3):
            assert f"a child of rank {rank} ended with {code}" in ended.said, ended.said
    assert "ends:" not in ended.said, ended.said


def test_seconds_that_are_none_are_refused_and_no_bound_is_a_choice() -> None:
    holdfast.session(after_end=None)
    with pytest.raises(BadInput, match="after_end must be a positive, finite number of seconds, not 0"):
        holdfast.session(after_end=0)
