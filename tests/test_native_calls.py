"""The end of a process whose threads are in calls into torch's C++."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import sys, threading
    from torch.distributed import TCPStore
    from holdfast.roster.torch_store import TorchRoster

    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    roster = TorchRoster(store, 0, 1)
    roster.put("a", {})
    begun = threading.Event()

    def ask():
        while True:
            CALL
            begun.set()

    for _ in range(8):
        threading.Thread(target=ask, daemon=True).start()
    begun.wait()
"""
ASK, ASK_TORCH, ASK_FOR_EVER = 'roster.get(["a"])', 'store.check(["a"])', 'begun.set(); roster.wait_long("b")'


def end(call: str, last: str) -> subprocess.CompletedProcess[str]:
    program = textwrap.dedent(PROGRAM).replace("CALL", call) + last
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )


def test_what_it_is_about() -> None:
    """Without our own end, such a process aborts; if this fails, torch or Python has mended it."""
    said = [end(ASK_TORCH, "") for _ in range(5)]
    assert -6 in [ended.returncode for ended in said], said


@pytest.mark.parametrize("call", [ASK, ASK_FOR_EVER], ids=["they come back", "they never come back"])
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
def test_the_exit_code_is_that_of_the_program(call: str, last: str, code: int, words: str) -> None:
    ended = end(call, last)
    assert ended.returncode == code, ended.stderr
    assert words in ended.stderr
    assert "terminate called" not in ended.stderr


def test_files_and_handlers_of_others_are_served() -> None:
    last = "import atexit; atexit.register(print, 'served'); atexit.register(sys.stdout.write, 'held ')"
    ended = end(ASK_FOR_EVER, last)
    assert (ended.returncode, ended.stdout) == (0, "held served\n"), ended.stderr
