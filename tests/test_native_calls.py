"""The end of a process whose threads are in calls into torch's C++."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.groups.session.launch import Ended, Forks

PROGRAM = """
    import sys, threading
    from contextlib import nullcontext
    from datetime import timedelta
    from torch.distributed import TCPStore
    from holdfast._core.process.native_calls import native_call

    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store.set("a", "")
    begun = threading.Event()

    def ask():
        while True:
            with CALL:
                begun.set()
                store.wait(["KEY"], timedelta(days=1))

    for _ in range(8):
        threading.Thread(target=ask, daemon=True).start()
    begun.wait()
"""
SET, NEVER_SET = "a", "b"


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("tests.support.run_code") as made:
        yield made


def end(forks: Forks, terminal: Path, key: str, last: str, call: str = "native_call()") -> Ended:
    program = textwrap.dedent(PROGRAM).replace("CALL", call).replace("KEY", key) + last
    return forks.run([program], [0], 1, terminal, 60.0)


def test_what_it_is_about(forks: Forks, tmp_path: Path) -> None:
    """Without our own end, such a process aborts; if this fails, torch or Python has mended it."""
    said = [end(forks, tmp_path / str(number), SET, "", call="nullcontext()") for number in range(5)]
    assert [-6] in [ended.codes for ended in said], said


@pytest.mark.parametrize("key", [SET, NEVER_SET], ids=["they come back", "they never come back"])
@pytest.mark.parametrize(
    ("last", "code", "words"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise SystemExit('no data')", 1, "no data"),
        ("raise ValueError('no data')", 1, "ValueError: no data"),
    ],
    ids=["end", "exit", "words", "error"],
)
def test_the_exit_code_is_that_of_the_program(
    key: str, last: str, code: int, words: str, forks: Forks, tmp_path: Path
) -> None:
    ended = end(forks, tmp_path / "terminal", key, last)
    assert ended.codes == [code], ended.said
    assert words in ended.said
    assert "terminate called" not in ended.said


def test_files_and_handlers_of_others_are_served(forks: Forks, tmp_path: Path) -> None:
    last = "import atexit; atexit.register(print, 'served'); atexit.register(sys.stdout.write, 'held ')"
    ended = end(forks, tmp_path / "terminal", NEVER_SET, last)
    assert (ended.codes, ended.said) == ([0], "held served\n")


FREES = """
    import threading, time, holdfast
    from holdfast._core.base.threads import start_thread
    from holdfast._core.process import native_calls

    native_calls.LONGEST = 30.0

    class Tensors:
        def __del__(self):
            time.sleep(0.3)
            print("freed", flush=True)

    begun = threading.Event()
    thread = start_thread(lambda held=Tensors(): begun.wait(), "last")
    begun.set()
    while not thread.over:
        time.sleep(0.001)
"""


def test_a_thread_frees_its_objects_before_the_end(forks: Forks, tmp_path: Path) -> None:
    ended = forks.run([textwrap.dedent(FREES)], [0], 1, tmp_path / "terminal", 60.0)
    assert (ended.codes, ended.said) == ([0], "freed\n")


CALLS_BACK = """
    import sys, time, torch, holdfast
    from holdfast._core.background import queue

    def called(save):
        time.sleep(0.3)
        print("called", flush=True)

    queue.LONGEST = 30.0
    holdfast.async_save({"w": torch.ones(3)}, sys.argv[1]).add_done_callback(called)
"""


def test_a_save_has_called_its_callbacks_before_the_end(forks: Forks, tmp_path: Path) -> None:
    """They may free what the save has copied."""
    words = [textwrap.dedent(CALLS_BACK), str(tmp_path / "save")]
    ended = forks.run(words, [0], 1, tmp_path / "terminal", 60.0)
    assert (ended.codes, ended.said) == ([0], "called\n")
