"""Run test files with pytest, each in a process of its own, and read how each test ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ONE_TEST, ONE_FILE = 120, 590
"""Seconds that a test, and a file of tests, may take."""


class Ended(NamedTuple):
    """How a test ended: passed, failed or skipped; and the last line of why."""

    how: str
    why: str = ""


def run_suite(
    folder: Path, suite: str, only: Collection[str] | None = None, limit: float = ONE_FILE
) -> dict[str, Ended]:
    """Run a test file; return how each of its tests ended, by its name (`suite::Class::test`).

    only: names of the tests to run; None: all. limit: seconds for all of them.
    """
    if only is not None and not only:
        return {}
    report = folder / f"{Path(suite).stem}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(folder)]
    command += ["-p", "no:cacheprovider", f"--timeout={ONE_TEST}", f"--junitxml={report}", *(only or [suite])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with (
        (folder / f"{Path(suite).stem}.log").open("wb") as log,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
    if not report.exists():
        return {f"{suite}::": Ended("failed", f"pytest did not finish: {log.name}")}
    return {
        name: end for case in ElementTree.parse(report).iter("testcase") for name, end in [_read(suite, case)]
    }


def _read(suite: str, case: ElementTree.Element) -> tuple[str, Ended]:
    name = "::".join([suite, case.get("classname", "").rpartition(".")[2], case.get("name", "")])
    for tag, how in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
        found = case.find(tag)
        if found is not None:
            return name, Ended(how, _reason(found))
    return name, Ended("passed")


def _reason(found: ElementTree.Element) -> str:
    """Return the line that says what went wrong: of a rank's error, if ranks were processes."""
    text = f"{found.get('message', '')}\n{found.text or ''}".replace("\\n", "\n")
    lines = [line.strip().removeprefix("E ").strip() for line in text.splitlines()]
    errors = [line for line in lines if line.split(":")[0].split(".")[-1].endswith(("Error", "Exception"))]
    return (errors[-1] if errors else next((line for line in lines if line), ""))[:300]
