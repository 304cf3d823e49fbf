"""Run tests on every supported Python, and with the oldest and the newest torch and megatron-core that are supported.

`make matrix` runs all of it and writes docs/tested.md. `.ci/run` gives `--within`: what would take longer is left out, and named.
Needs nothing but Python; each environment is a folder `.venv-...` that stays for the next time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
"""Supported; the last one that is found runs the whole suite."""
LIFE = (
    "tests/test_exits.py", "tests/test_late.py", "tests/test_heart.py", "tests/background", "tests/groups/session", "tests/run",
    "tests/system/test_async.py", "tests/watch/test_ways.py", "tests/docs/test_programs.py",
)  # fmt: skip
"""What depends on how an interpreter runs and ends."""
PORTABLE = (
    "tests/promises", "tests/roster", "tests/store", "tests/protocol", "tests/saving", "tests/background", "tests/test_public.py",
    "tests/test_late.py", "tests/state/test_optimizers.py", "tests/state/test_nothing.py", "tests/state/test_meta.py",
    "tests/state/test_tensors.py", "tests/state/test_flatten.py", "tests/integrations/test_dcp_marker.py",
    "tests/integrations/test_dcp_arguments.py", "tests/system/test_ranks.py", "tests/system/test_content.py",
)  # fmt: skip
"""What needs no newer torch."""
FRAMEWORKS = ("tests/integrations", "tests/groups/lifecycle", "tests/promises")


@dataclass
class Environment:
    """A Python with packages, and the tests that run on it."""

    title: str
    python: str
    tests: tuple[str, ...]
    minutes: float
    """About how long it takes on two cores, installation included."""
    torch: str = ""
    """`oldest` or `newest`: that torch, without frameworks. Otherwise all that `make test` installs."""
    megatron: str = "oldest"
    has: dict[str, str] = field(default_factory=dict)
    """Versions of packages; filled in by the run, as all that follows."""
    counts: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    """Tests by the reason why they were skipped."""
    took: float = 0.0
    """Seconds, of the tests alone."""
    said: str = ""
    """Why it did not run."""

    @property
    def venv(self) -> str:
        more = (
            f"-torch-{self.torch}"
            if self.torch
            else f"-megatron-{self.megatron}" * (self.megatron != "oldest")
        )
        return f".venv-{self.python}{more}"


def environments(newest: str) -> list[Environment]:
    """Return all, the most telling first."""
    return [
        Environment("the whole suite", newest, ("tests",), 32),
        Environment("life of the process, frameworks", "3.12", (*LIFE, *FRAMEWORKS), 22, megatron="newest"),
        *(Environment("life of the process", one, LIFE, 9) for one in PYTHONS if one not in (newest, "3.12")),
        Environment("what needs no newer torch", "3.11", PORTABLE, 10, torch="oldest"),
        Environment("what needs no newer torch", newest, PORTABLE, 10, torch="newest"),
    ]


def find(version: str) -> str:
    """Return a Python of this version; "" if there is none."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for candidate in (sys.executable, f"python{version}", *map(str, pyenv)):
        try:
            code = f"import sys; sys.exit(sys.version_info[:2] != {tuple(map(int, version.split('.')))})"
            if subprocess.run([candidate, "-c", code], capture_output=True).returncode == 0:
                return candidate
        except OSError:
            continue
    return ""


def newest() -> str:
    """Return the version of the newest supported Python that is there."""
    return next(version for version in reversed(PYTHONS) if find(version))


def install(one: Environment, python: str) -> str:
    """Make its environment, if it is not there; return what failed, or ""."""
    ready = ROOT / one.venv / ".ready"
    if one.torch:
        if ready.exists():
            return ""
        binary = f"{one.venv}/bin/python"
        pip = [binary, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        commands = [
            [python, "-m", "venv", one.venv],
            [*pip, "pip>=25.1"],
            [*pip, "--group", f"torch-{one.torch}", "-e", ".", "--group", "test"],
        ]
    else:
        commands = [
            ["make", f"VENV={one.venv}", f"PYTHON={python}", f"MEGATRON={one.megatron}", f"{one.venv}/.ready"]
        ]
    for command in commands:
        code = subprocess.run(command, cwd=ROOT).returncode
        if code:
            return f"could not be installed: {' '.join(command)} ended with {code}"
    ready.touch()
    return ""


def run(one: Environment, limit: float | None) -> None:
    """Run its tests and note how they ended."""
    python = str(ROOT / one.venv / "bin/python")
    code = "import importlib.metadata as m, json, platform; has = {d.name: d.version for d in m.distributions()}; "
    code += "print(json.dumps({'python': platform.python_version(), **has}))"
    one.has = json.loads(subprocess.run([python, "-c", code], capture_output=True, check=True).stdout)
    report = ROOT / one.venv / "report.xml"
    report.unlink(missing_ok=True)
    started = time.monotonic()
    workers = os.environ.get("WORKERS", "3")
    command = [python, "-m", "pytest", "-n", workers, "--dist", "loadfile", "--no-loadscope-reorder"]
    command += ["--max-worker-restart", "0", "-m", "not soak and not gpu", f"--junitxml={report}", *one.tests]
    try:
        done = subprocess.run(command, cwd=ROOT, timeout=limit)
    except subprocess.TimeoutExpired:
        one.said = f"did not end within {limit:.0f} s"
        return
    one.took = time.monotonic() - started
    if report.exists():
        _read(one, report)
    if done.returncode and not one.counts["failed"]:
        one.counts["failed"] = 1  # a worker that has ended, or nothing collected


def _read(one: Environment, report: Path) -> None:
    for suite in ElementTree.parse(report).iter("testsuite"):
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped = int(suite.get("skipped", 0))
        one.counts += Counter(
            failed=failed, skipped=skipped, passed=int(suite.get("tests", 0)) - failed - skipped
        )
        for case in suite.iter("skipped"):
            one.skipped[str(case.get("message"))] += 1


def page(ran: list[Environment]) -> Iterator[str]:
    """Yield the lines of docs/tested.md."""
    yield "# What was run on what"
    yield ""
    yield f"Written by `make matrix` on {date.today()}, on Linux with {os.cpu_count()} cores and no GPU. `.ci/run` runs the same for"
    yield "each change, as far as its time goes. Python 3.14 was not tried. torch is as PyPI ships it for the CUDA of its release,"
    yield "unless its version ends with `+cpu`."
    yield ""
    yield "| Python | torch | megatron-core | tests | passed | skipped | failed | minutes |"
    yield "|---|---|---|---|---|---|---|---|"
    for one in ran:
        has, counts = one.has, one.counts
        if one.said:
            yield f"| {one.python} | | | {one.title} | not run: {one.said} | | | |"
            continue
        versions = f"| {has['python']} | {has['torch']} | {has.get('megatron-core', 'none')} | {one.title} "
        yield f"{versions}| {counts['passed']} | {counts['skipped']} | {counts['failed']} | {one.took / 60:.0f} |"
    yield ""
    yield "## What was skipped"
    yield ""
    for one in ran:
        if one.skipped:
            yield f"Python {one.has['python']}, torch {one.has['torch']}, {one.title}:"
            yield ""
            for reason, count in sorted(one.skipped.items()):
                text = re.sub(r"([|_*<>])", r"\\\1", reason)
                yield f"- {count} x {text}"
            yield ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--newest", action="store_true", help="print the newest supported Python that is found, and end"
    )
    parser.add_argument(
        "--without-suite", type=float, metavar="SECONDS", help="the suite has run, and took this long"
    )
    parser.add_argument("--within", type=float, metavar="SECONDS", help="leave out what would take longer")
    parser.add_argument("--page", type=Path, help="write this page")
    given = parser.parse_args()
    if given.newest:
        print(find(newest()))
        return 0
    wanted, slowness, began = environments(newest()), 1.0, time.monotonic()
    if given.without_suite is not None:
        slowness = max(1.0, given.without_suite / 60 / wanted.pop(0).minutes)
    for one in wanted:
        left = None if given.within is None else given.within - (time.monotonic() - began)
        python = find(one.python)
        if not python:
            one.said = "no such Python was found"
        elif left is not None and left < one.minutes * 60 * slowness:
            one.said = (
                f"it takes about {one.minutes * slowness:.0f} minutes, and {max(left, 0) / 60:.0f} were left"
            )
        else:
            print(
                f"== {one.title}: Python {one.python}, torch {one.torch or 'of constraints.txt'}", flush=True
            )
            one.said = install(one, python)
            if one.said:
                one.counts["failed"] = 1
            else:
                run(one, None if given.within is None else given.within - (time.monotonic() - began))
        if one.said:
            print(
                f"not run: {one.title}, Python {one.python}, torch {one.torch or 'of constraints.txt'}: {one.said}",
                flush=True,
            )
    if given.page is not None:
        (ROOT / given.page).write_text("\n".join(page(wanted)).rstrip() + "\n")
    return int(any(one.counts["failed"] for one in wanted))


if __name__ == "__main__":
    sys.exit(main())
