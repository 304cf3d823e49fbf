"""Jobs under torchrun, as the reporters start theirs: what it says, whom it names, and how all processes end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from drill.agent import JOB, SOCKET, TERMINAL, Child, ask

ROOT = Path(__file__).parents[1]
START_S = 120.0
"""Seconds that the imports of the nursery may take."""
MODULES = ("torch.distributed.run", "tests.frameworks.megatron.preload")


class Ended(NamedTuple):
    """How a job ended."""

    code: int
    """Of torchrun; -9 if the drill killed the job."""
    codes: dict[int, int]
    """Of the ranks."""
    seconds: float
    """From the start of torchrun to its end."""
    said: str
    """By all of them, as on one terminal."""
    stuck: tuple[int, ...]
    """Ranks that were still there when the drill's patience was over."""

    @property
    def blamed(self) -> int | None:
        """The rank that torchrun names as the first that failed."""
        found = re.search(r"Root Cause.*?rank +: (\d+) ", self.said, re.DOTALL)
        return int(found[1]) if found else None


class Launcher:
    """Starts jobs; several may run at a time."""

    def __init__(self, place: str) -> None:
        self._place = place

    def run(self, program: str, args: Sequence[str], world: int, folder: Path, limit: float) -> Ended:
        """Run a program under torchrun. What is still there after `limit` s is killed."""
        terminal = folder / "terminal"
        terminal.touch()
        env = _environment() | {SOCKET: self._place, JOB: str(folder), TERMINAL: str(terminal)}
        begun = time.monotonic()
        agent = Child(["drill.agent", *_words(program, args, world)], env)
        stuck: tuple[int, ...] = ()
        try:
            code = agent.wait(limit)
        except subprocess.TimeoutExpired:
            before = self._codes(folder)
            after = self._codes(folder, kill=True)
            code = agent.wait(START_S)
            stuck = tuple(sorted(rank for rank in after if rank not in before and rank >= 0))
        seconds = time.monotonic() - begun
        codes = {rank: one for rank, one in self._codes(folder).items() if rank >= 0}
        return Ended(code, codes, seconds, terminal.read_text(errors="replace"), stuck)

    def command(
        self,
        program: str,
        args: Sequence[str],
        world: int,
        folder: Path,
        limit: float,
        options: Sequence[str] | None,
    ) -> Ended:
        """The same by the commands themselves: torchrun, or `holdfast run` of it with these options."""
        words = [sys.executable, "-m", "torch.distributed.run", *_words(program, args, world)]
        if options is not None:
            words = [
                sys.executable,
                "-c",
                "from holdfast._tools.cli import main; main()",
                "run",
                *options,
                "--",
                *words,
            ]
        terminal = folder / "terminal"
        begun = time.monotonic()
        with terminal.open("w") as file:
            job = subprocess.Popen(words, stdout=file, stderr=file, cwd=ROOT, env=_environment())
            try:
                code = job.wait(limit)
            except subprocess.TimeoutExpired:
                job.terminate()  # torchrun ends its workers, within 30 s
                with suppress(subprocess.TimeoutExpired):
                    job.wait(40.0)
                job.kill()
                job.wait()
                code = -9
        return Ended(code, {}, time.monotonic() - begun, terminal.read_text(errors="replace"), ())

    def _codes(self, folder: Path, kill: bool = False) -> dict[int, int]:
        with (
            ask(self._place, {"job": str(folder), "kill": kill}) as connection,
            connection.makefile() as answer,
        ):
            found = json.loads(answer.readline())
        return {int(rank or -1): code for rank, code in found.items()}


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def _words(program: str, args: Sequence[str], world: int) -> list[str]:
    """As torchrun is given them on one host, with a port that the kernel chooses."""
    return ["--standalone", f"--nproc-per-node={world}", "-m", program, *args]


@contextmanager
def launcher() -> Iterator[Launcher]:
    with TemporaryDirectory(prefix="holdfast-nursery-") as folder:
        place = f"{folder}/socket"
        nursery = subprocess.Popen(
            [sys.executable, "-m", "drill.nursery", place, *MODULES], stdin=subprocess.PIPE, cwd=ROOT
        )
        try:
            _await(nursery, place)
            yield Launcher(place)
        finally:
            assert nursery.stdin is not None
            nursery.stdin.close()  # it kills what is left, and ends
            with suppress(subprocess.TimeoutExpired):
                nursery.wait(10.0)
            nursery.kill()
            nursery.wait()


def _await(nursery: subprocess.Popen[bytes], place: str) -> None:
    ends = time.monotonic() + START_S
    while time.monotonic() < ends and nursery.poll() is None:
        with suppress(OSError):
            ask(place, {"job": "", "kill": False}).close()
            return
        time.sleep(0.05)
    raise RuntimeError("the processes of the drill can't be started")
