"""A plugin of pytest, in every process that runs it: writes how each test ended, as it ends.

A process that is killed has then told which test it was in.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(nodeid, "began", "")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        _write(report.nodeid, "skipped", reason(report.longreprtext))
    elif report.failed:
        _write(report.nodeid, "failed", reason(report.longreprtext))
    elif report.when == "teardown":
        _write(report.nodeid, "passed", "")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(report.nodeid, "failed", reason(report.longreprtext))


def _write(test: str, how: str, why: str) -> None:
    line = json.dumps({"test": test, "how": how, "why": why, "at": time.time()})
    with Path(os.environ["STRANGERS_FOLDER"], f"{os.getpid()}.ends").open("a") as file:
        file.write(f"{line}\n")


def reason(text: str) -> str:
    """Return the line that says what went wrong: of a rank's error, if ranks were processes."""
    lines = [line.strip().removeprefix("E ").strip() for line in text.replace("\\n", "\n").splitlines()]
    errors = [line for line in lines if line.split(":")[0].split(".")[-1].endswith(("Error", "Exception"))]
    return (errors[-1] if errors else next((line for line in lines if line), ""))[:300]
