"""How processes end: exit codes, how long it takes, and what is on the terminal, last of all."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest

import holdfast
from tests.groups.session import jobs
from tests.groups.session.launch import WORLD, launch
from tests.support.processes import ProcessWorld
from tests.support.waiting import SLACK, wait_until

pytestmark = pytest.mark.usefixtures("forks")


def test_a_normal_end(tmp_path: Path) -> None:
    ended = launch("normal", tmp_path)
    assert ended.codes == [0] * WORLD, ended.said
    assert ended.said.count("is through") == WORLD
    assert "Error" not in ended.said
    assert "Warning" not in ended.said


def test_a_rank_that_is_busy_at_the_end_is_waited_for_however_quiet(tmp_path: Path) -> None:
    ended = launch("busy", tmp_path, world=2)  # 8 s, and others give up who is silent for 5
    assert ended.codes == [0] * 2, ended.said


def test_a_save_that_is_pending_at_the_end_is_committed(tmp_path: Path) -> None:
    ended = launch("save", tmp_path, world=2)
    assert ended.codes == [0] * 2, ended.said
    assert holdfast.Checkpoints(tmp_path / "run").latest() == 1


@pytest.mark.parametrize(
    ("mode", "first", "said"),
    [
        ("raise on 0", 0, "ValueError: the loss of rank 0 is not a number"),
        pytest.param(
            "raise on 2", 2, "ValueError: the loss of rank 2 is not a number", marks=pytest.mark.wide
        ),
        ("raise while others compute", 2, "ValueError: the loss is not a number"),
        ("save and raise", 2, "ValueError: the loss is not a number"),
    ],
)
def test_the_first_error_is_the_last_on_the_terminal(
    mode: str, first: int, said: str, tmp_path: Path
) -> None:
    ended = launch(mode, tmp_path)
    assert ended.codes[first] == 1, ended.said
    # One that waits in a collective for another that waits likewise is not freed by any error: it is ended.
    assert set(ended.codes) <= ({1} if mode == "raise while others compute" else {1, 86}), ended.said
    assert ended.said.rstrip(".\n").endswith(said), (
        ended.said
    )  # quoted by what is said after it, if anything is
    assert ended.said.count("Traceback") == 1, ended.said
    for rank in set(range(WORLD)) - {first}:
        assert f"rank {rank} ends: The session ended because rank {first} " in ended.said, ended.said


def test_an_error_on_all_ranks(tmp_path: Path) -> None:
    ended = launch("raise on all", tmp_path)
    assert ended.codes == [1] * WORLD, ended.said
    last = ended.said.rstrip().splitlines()[-1]
    assert "ValueError: the loss of rank " in last, ended.said
    first = last.split(" of rank ")[1].split()[0]
    assert f"because rank {first} " in ended.said
    for rank in range(WORLD):
        assert ended.said.count(f"ValueError: the loss of rank {rank} is not a number\n") == 1, ended.said


@pytest.mark.parametrize("how", ["block", "to the end"])
def test_a_failed_session_serves_the_handlers_of_others(how: str, tmp_path: Path) -> None:
    ended = launch("raise with handlers", tmp_path, how)
    assert ended.codes[2] == 1, ended.said
    for rank, code in enumerate(ended.codes):
        assert code in (1, 86), ended.said
        assert ended.said.count(f"the handler of rank {rank}\n") == (code == 1), ended.said


def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path) -> None:
    ended = launch("kill", tmp_path)
    assert ended.codes[2] == -9, ended.said
    # One that waits in a collective for another that waits likewise is not freed by any error: it is ended.
    assert set(ended.codes[:2] + ended.codes[3:]) <= {1, 86}, ended.said
    for rank in (0, 1, 3):
        assert re.search(f"rank {rank} ends: .*its process (has ended|was killed)", ended.said), ended.said
    assert "Traceback" not in ended.said


def test_sys_exit_on_one_rank_keeps_its_code(tmp_path: Path) -> None:
    ended = launch("exit", tmp_path, world=2)
    assert ended.codes[1] == 3, ended.said
    assert ended.codes[0] in (1, 86), ended.said
    assert re.search(r"exited with code 3 \(SystemExit\) at .*jobs.py:\d+ leave\.", ended.said), ended.said


def test_ranks_that_are_stuck_in_a_call_exit_with_a_code_of_their_own(tmp_path: Path) -> None:
    ended = launch("hang", tmp_path)
    assert ended.codes == [86, 86, 86, 1], ended.said
    for rank in range(3):
        (last,) = re.findall(rf"^rank {rank} ends with exit code 86: .*", ended.said, re.MULTILINE)
        assert re.search(r"it is at .*jobs.py:\d+ end_with\. The session ended because rank 3 ", last)
        assert re.search(r"at .*jobs.py:\d+ end_with raised ValueError: the loss is not a number", last)


def test_a_rank_that_never_starts_is_named(tmp_path: Path) -> None:
    ended = launch("normal", tmp_path, absent=3)
    assert ended.codes == [1] * 3, ended.said
    assert "rank 3, which has not been heard of" in ended.said


def test_a_store_that_stops_answering_ends_nothing_and_is_told() -> None:
    with ProcessWorld(3, store_host="rank 0") as world:
        world.start(jobs.stopped_store_host)
        wait_until(lambda: psutil.Process(world.pid(0)).status() == psutil.STATUS_STOPPED)
        assert not world.collect_some(12), "the end of a block needs all ranks"
        world.signal(0, signal.SIGCONT)
        for result in world.collect(60):
            seconds, said = result.get()
            if result.rank:
                assert 8.0 <= seconds < 8.0 + SLACK, "the body was not disturbed"
                (line,) = [line for line in said if "has not answered" in line]
                assert re.search(
                    r"in the process of rank 0 \(pid \d+ on host .+\): it is stopped by a signal \(state T\)\.",
                    line,
                )
                assert any("answers again" in line for line in said), said


def test_the_end_of_the_process_that_has_the_store_ends_the_others() -> None:
    with ProcessWorld(3, store_host="rank 0") as world:
        world.start(jobs.killed_store_host)
        results = {result.rank: result for result in world.collect(60)}
        assert results[0].died == -signal.SIGKILL
        for rank in (1, 2):
            said = results[rank].get()
            assert said.startswith("RankFailed: The session ended because of rank 0 "), said
            assert f"pid {world.pid(0)}" in said
            assert results[rank].seconds < SLACK


def test_sessions_one_after_another_are_strangers() -> None:
    with ProcessWorld(3) as world:
        world.start(jobs.two_sessions)
        results = {result.rank: result for result in world.collect(60)}
    assert results[2].died == -9
    for rank in (0, 1):
        said, missing = results[rank].get()
        assert said == [
            "the loss is not a number" if rank == 1 else "RankFailed 1",
            "through",
            "RankFailed 2",
        ]
        assert missing == [2]


def test_python_can_be_profiled_after_sessions() -> None:
    """What makes a profiler hang in Python 3.11 makes all code slower in 3.12."""
    with ProcessWorld(2) as world:
        for counts in world.run(jobs.profiled, timeout=60):
            assert len(set(counts)) == 1, counts


@pytest.mark.parametrize("how", ["to the end", "destroys"])
def test_a_session_without_a_block_closes_at_the_end_of_the_process(how: str, tmp_path: Path) -> None:
    ended = launch("save", tmp_path, how, world=2)
    assert ended.codes == [0] * 2, ended.said
    assert ended.said.count("is through") == 2
    assert "Warning" not in ended.said
    assert "Error" not in ended.said
    assert holdfast.Checkpoints(tmp_path / "run").latest() == 1


def test_an_error_that_nobody_catches_ends_a_session_without_a_block(tmp_path: Path) -> None:
    ended = launch("raise on 2", tmp_path, "to the end")
    assert ended.codes[2] == 1, ended.said
    assert set(ended.codes) <= {1, 86}, ended.said
    assert ended.said.rstrip(".\n").endswith("ValueError: the loss of rank 2 is not a number"), ended.said
    assert ended.said.count("Traceback") == 1, ended.said


@pytest.mark.parametrize(
    ("mode", "code", "said"),
    [
        ("exit", 3, r"exited with code 3 \(SystemExit\) at .*jobs.py:\d+ leave\."),
        pytest.param(
            "bare exit",
            3,
            r"exited with code 3 \(SystemExit\) at .*jobs.py:\d+ leave\.",
            marks=pytest.mark.wide,
        ),
        ("exit with words", 1, r"exited with 'the data is gone' \(SystemExit\) at .*jobs.py:\d+ leave\."),
        ("os._exit", 3, r": its process has ended( with exit code 3)?\."),
        ("interrupt", -2, r"at .*jobs.py:\d+ leave raised KeyboardInterrupt\."),
    ],
)
def test_a_program_that_ends_in_the_middle_keeps_its_code_and_is_told_as_what_it_is(
    mode: str, code: int, said: str, tmp_path: Path
) -> None:
    ended = launch(mode, tmp_path, "to the end", world=2)
    assert ended.codes == [1, code], ended.said
    assert re.search(
        rf"^rank 0 ends: The session ended because (of )?rank 1 .*{said}", ended.said, re.MULTILINE
    )
    assert "because rank 0" not in ended.said
    assert ended.seconds < 30


@pytest.mark.parametrize(
    ("mode", "where"),
    [
        ("dawdle", r"its main thread is at .* > jobs.py:\d+ dawdle\."),
        ("early good exit", r"its program exited with code 0 \(SystemExit\) at .* > jobs.py:\d+ leave\."),
    ],
)
def test_a_rank_that_does_not_come_to_a_collective_is_named_with_the_place_of_its_code(
    mode: str, where: str, tmp_path: Path
) -> None:
    ended = launch(mode, tmp_path, "to the end", world=3)
    assert (ended.codes[0], ended.codes[2]) == (1, 1), ended.said
    # In the words of the first rank whose collective timed out, below its traceback, and in those of the absent
    # one, if that is still there. The other rank of the collective has left it by the same timeout.
    named = rf"not in that collective: rank 1 \(host [^;\n]*{where}"
    assert re.search(rf"^\[rank[02]\]: holdfast: {named}$", ended.said, re.MULTILINE), ended.said
    said = re.search(
        rf"^rank 1 ends: .* all_reduce raised RuntimeError: .*; {named}$", ended.said, re.MULTILINE
    )
    assert ended.codes[1] == (1 if said else 0), ended.said
    assert said or mode == "early good exit"


def test_a_save_that_failed_unseen_fails_a_session_without_a_block(tmp_path: Path) -> None:
    ended = launch("save fails", tmp_path, "to the end", world=2)
    assert ended.codes == [1] * 2, ended.said
    assert ended.said.rstrip().splitlines()[-1].startswith("holdfast.errors.BadInput: "), ended.said


def test_an_error_that_nobody_catches_ends_all_open_sessions() -> None:
    with ProcessWorld(1) as world:
        ((left, ended, printed),) = world.run(jobs.two_to_the_end)
    assert (left, ended) == (0, 2)
    assert printed.count("ValueError: the loss is not a number") == 1
