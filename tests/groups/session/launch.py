"""Jobs of processes that are real to their last exit code: what each ended with, and what they wrote on one
terminal."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
WORLD = 4


class Ended(NamedTuple):
    codes: list[int]
    seconds: float
    """From the start of the first process to the end of the last."""
    said: str
    """By all of them, as on one terminal."""


@contextmanager
def fork_server() -> Iterator[None]:
    """What starts the ranks; torch is imported once."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.groups.session.fork"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    ) as process:
        _forks.append(process)
        yield
        _forks.clear()
        process.kill()


_forks: list[subprocess.Popen[str]] = []


def launch(
    mode: str, folder: Path, how: str = "block", limit: float = 150.0, absent: int = -1, world: int = WORLD
) -> Ended:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    terminal = folder / "terminal"
    terminal.touch()
    ranks = [rank for rank in range(world) if rank != absent]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    job = {"env": env, "args": [mode, str(folder / "run"), how], "terminal": str(terminal), "ranks": ranks}
    forks = _forks[0]
    assert forks.stdin is not None
    assert forks.stdout is not None
    begun = time.monotonic()
    print(json.dumps(job), file=forks.stdin, flush=True)
    pids: dict[str, int] = json.loads(forks.stdout.readline())
    stuck = threading.Timer(
        limit,
        lambda: [os.kill(pid, signal.SIGKILL) for pid in pids.values() if Path(f"/proc/{pid}").exists()],
    )
    stuck.start()
    codes: dict[int, int] = {}
    while len(codes) < len(ranks):
        rank, code = json.loads(forks.stdout.readline())
        codes[rank] = code
    seconds = time.monotonic() - begun
    stuck.cancel()
    said = terminal.read_text()
    assert seconds < limit, f"ranks were still there after {limit} s\n{said}"
    return Ended([codes[rank] for rank in ranks], seconds, said)
