"""Run a project's tests with pytest, each file in a process of its own, and read how each test ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from strangers.plugin import reason
from strangers.projects import SWITCH, Project

ONE_TEST, ONE_FILE, GRACE = 300, 1800, 60
"""Seconds that a test, a file of tests, and their end after that may take."""
_HERE = Path(__file__).parent
_WORST = ("passed", "skipped", "began", "failed")


class Ended(NamedTuple):
    """How a test ended: passed, failed or skipped; why; whether Holdfast committed a save or completed
    a load."""

    how: str
    why: str = ""
    completed: bool = False


def run_tests(
    project: Project,
    tree: Path,
    suite: str,
    *,
    ours: bool,
    only: Collection[str] | None = None,
    limit: float = ONE_FILE,
) -> dict[str, Ended]:
    """Run a file of tests, or one test; return how each ended, by its name (`project/file::Class::test`).

    tree: a copy of the project. only: names of the tests to run; None: all. limit: seconds for all of them.
    """
    if only is not None and not only:
        return {}
    with tempfile.TemporaryDirectory() as told:
        names = Path(told, "names")
        names.write_text("\n".join(name.removeprefix(f"{project.name}/") for name in only or [suite]))
        command = [*_start(project, ours=ours), "-q", "-c", os.devnull, "--rootdir", "."]
        command += ["-p", "no:cacheprovider", "-p", "strangers.plugin", f"--timeout={ONE_TEST}"]
        command += [*project.options, f"@{names}"]
        with (
            (tree / "log").open("ab") as log,
            subprocess.Popen(
                command,
                cwd=tree / project.root,
                env=_environment(project, tree, told),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process,
        ):
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks, other groups
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        found = _read(project, Path(told))
    why = reason((tree / "log").read_text(errors="replace"))
    return found or {f"{project.name}/{suite}": Ended("failed", f"pytest ran no test: {why}")}


def _start(project: Project, *, ours: bool) -> list[str]:
    torchrun = ["torch.distributed.run", f"--nproc-per-node={project.ranks}", "-m"]
    program = [sys.executable, "-m", *(torchrun if project.ranks > 1 else ()), "pytest"]
    return (
        [sys.executable, "-m", "holdfast", "run", "--", *program]
        if ours and project.line != SWITCH
        else program
    )


def _environment(project: Project, tree: Path, told: str) -> dict[str, str]:
    # The project's folder before ours: both may have a package `tests`.
    path = [_HERE / "preload", tree / project.root, _HERE.parent, os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        **(project.environment or {}),
        "PYTHONPATH": os.pathsep.join(str(part) for part in path if part),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "STRANGERS_GPUS": str(project.gpus),
        "STRANGERS_STAND_INS": ",".join(project.stand_ins),
        "STRANGERS_FOLDER": told,
    }


def _read(project: Project, told: Path) -> dict[str, Ended]:
    """Return how the tests ended: on several ranks, as on the worst."""
    moments = [float(line) for file in told.glob("*.moments") for line in file.read_text().split()]
    ends = defaultdict[str, list[Ended]](list)
    for file in told.glob("*.ends"):
        of_process = defaultdict[str, list[dict[str, str | float]]](list)
        for line in file.read_text().splitlines():
            one = json.loads(line)
            of_process[one["test"]].append(one)
        for test, lines in of_process.items():
            last = max(lines[1:] or lines, key=lambda line: _WORST.index(str(line["how"])))
            first, end = float(lines[0]["at"]), float(lines[-1]["at"])
            ours = any(first <= at <= end for at in moments)
            ends[f"{project.name}/{test}"].append(Ended(str(last["how"]), str(last["why"]), ours))
    return {
        test: _known(max(ranks, key=lambda end: _WORST.index(end.how)), any(end.completed for end in ranks))
        for test, ranks in ends.items()
    }


def _known(end: Ended, completed: bool) -> Ended:
    if end.how == "began":
        return Ended("failed", "its process ended in it", completed)
    return end._replace(completed=completed)
