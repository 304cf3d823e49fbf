"""Jobs of processes that are real to their last exit code: what each ended with, and what they wrote on one
terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from tests.support.ports import held_port

ROOT = Path(__file__).parents[3]
WORLD = 4


class Ended(NamedTuple):
    codes: list[int]
    seconds: float
    """From the start of the first process to the end of the last."""
    said: str
    """By all of them, as on one terminal."""


class Forks:
    """A process that starts ranks of one program; torch is imported once."""

    def __init__(self, program: str, modules: tuple[str, ...] = ()) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.groups.session.fork", program, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )

    def run(self, args: list[str], ranks: list[int], world: int, terminal: Path, limit: float) -> Ended:
        """Run the program with these arguments on some ranks; who is still there after `limit` s is killed."""
        with held_port() as port:
            terminal.touch()
            env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
            job = {"env": env, "args": args, "terminal": str(terminal), "ranks": ranks}
            orders, answers = self._process.stdin, self._process.stdout
            assert orders is not None
            assert answers is not None
            begun = time.monotonic()
            print(json.dumps(job), file=orders, flush=True)
            pids: dict[str, int] = json.loads(answers.readline())
            stuck = threading.Timer(
                limit,
                lambda: [
                    os.kill(pid, signal.SIGKILL) for pid in pids.values() if Path(f"/proc/{pid}").exists()
                ],
            )
            stuck.start()
            codes: dict[int, int] = {}
            while len(codes) < len(ranks):
                rank, code = json.loads(answers.readline())
                codes[rank] = code
            seconds = time.monotonic() - begun
            stuck.cancel()
            return Ended([codes[rank] for rank in ranks], seconds, terminal.read_text())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def fork_server() -> Iterator[None]:
    """What starts the ranks of `launch`."""
    with Forks("tests.groups.session.exits") as forks:
        _forks.append(forks)
        yield
        _forks.clear()


_forks: list[Forks] = []


def launch(
    mode: str, folder: Path, how: str = "block", limit: float = 150.0, absent: int = -1, world: int = WORLD
) -> Ended:
    ranks = [rank for rank in range(world) if rank != absent]
    ended = _forks[0].run([mode, str(folder / "run"), how], ranks, world, folder / "terminal", limit)
    assert ended.seconds < limit, f"ranks were still there after {limit} s\n{ended.said}"
    return ended
