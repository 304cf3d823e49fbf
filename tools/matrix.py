"""Run tests on every supported Python, with the oldest and the newest torch and megatron-core that are supported, and with the
next torch, if the registry has a pre-release of it.

`make matrix` runs all of it, notes the results in tools/tested.json and writes docs/tested.md. `.ci/run` gives `--within`: what would
take longer is left out, and named. Needs nothing but Python; each environment is a folder `.venv-...` that stays for the next time.
pip's registries are those of its settings: with torch's own in PIP_EXTRA_INDEX_URL, the next torch is that of the last night.
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
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "tools/tested.json", ROOT / "docs/tested.md"
PYTHONS = ("3.11", "3.12", "3.13")
"""Supported; the last one that is found runs the whole suite."""
LIFE = (
    "tests/test_exits.py", "tests/test_late.py", "tests/test_heart.py", "tests/background", "tests/groups/session", "tests/run",
    "tests/system/test_async.py", "tests/docs/test_programs.py",
)  # fmt: skip
"""What depends on how an interpreter runs and ends."""
PORTABLE = (
    "tests/promises", "tests/roster", "tests/store", "tests/protocol", "tests/saving", "tests/background", "tests/test_public.py",
    "tests/test_late.py", "tests/state/test_optimizers.py", "tests/state/test_nothing.py", "tests/state/test_meta.py",
    "tests/state/test_tensors.py", "tests/state/test_flatten.py", "tests/frameworks/torch_dcp/test_marker.py",
    "tests/frameworks/torch_dcp/test_arguments.py", "tests/system/test_ranks.py", "tests/system/test_content.py",
)  # fmt: skip
"""What needs no newer torch."""
FRAMEWORKS = ("tests/frameworks", "tests/groups/lifecycle", "tests/promises")
MARKS = "not soak and not gpu"
"""Which tests, as for pytest's `-m`: those of `make test` and of `make wide`."""


@dataclass
class Environment:
    """A Python with packages, and the tests that run on it."""

    title: str
    python: str
    tests: tuple[str, ...]
    minutes: float
    """About how long it takes on two cores, installation included."""
    torch: str = ""
    """`oldest`, `newest`, or `next` (a pre-release): that torch, without frameworks. Otherwise all that `make test` installs."""
    megatron: str = "oldest"

    @property
    def venv(self) -> str:
        more = (
            f"-torch-{self.torch}"
            if self.torch
            else f"-megatron-{self.megatron}" * (self.megatron != "oldest")
        )
        return f".venv-{self.python}{more}"


@dataclass
class Result:
    """How the tests of an environment ended."""

    on: str
    """The day."""
    versions: tuple[str, str, str]
    """Of Python, torch and megatron-core."""
    passed: int = 0
    skipped: int = 0
    failed: int = 0
    minutes: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)
    """Why tests were skipped, and how many for that."""


def environments(newest: str) -> list[Environment]:
    """Return all, the most telling first."""
    others = [version for version in reversed(PYTHONS) if version != newest]
    ends = {"3.12": "newest"}  # the newest Megatron-Bridge is for Python 3.12 alone
    return [
        Environment(f"the whole suite: Python {newest}", newest, ("tests",), 32),
        *(
            Environment(
                f"the life of a process: Python {one}", one, LIFE, 9, megatron=ends.get(one, "oldest")
            )
            for one in others
        ),
        Environment("all that needs no newer torch: oldest torch", "3.11", PORTABLE, 12, torch="oldest"),
        Environment("all that needs no newer torch: newest torch", newest, PORTABLE, 12, torch="newest"),
        Environment("frameworks: newest megatron-core", "3.12", FRAMEWORKS, 30, megatron="newest"),
        Environment("the next torch: its newest pre-release", newest, PORTABLE, 12, torch="next"),
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


def newest_torch(python: str) -> str:
    """Return the newest version of torch that the registry has, pre-releases included; "" if it does not answer."""
    command = [python, "-m", "pip", "index", "versions", "torch", "--pre", "--disable-pip-version-check"]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    found = re.search(r"^Available versions: ([^,\s]+)", said, re.MULTILINE)  # the newest is the first
    return found[1] if found else ""


def is_prerelease(version: str) -> bool:
    return re.match(r"[\d.]+\d(a|b|rc|\.dev)\d", version) is not None


def install(one: Environment, python: str) -> bool:
    """Make an environment, if it is not there; return whether it could be made."""
    ready = ROOT / one.venv / ".ready"
    pip = [
        "tools/again",
        f"{one.venv}/bin/python",
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
    ]
    commands = [
        ["make", f"VENV={one.venv}", f"PYTHON={python}", f"MEGATRON={one.megatron}", f"{one.venv}/.ready"]
    ]
    if one.torch and one.torch != "next" and ready.exists():
        commands = []
    elif one.torch:
        chosen = ["--group", f"torch-{one.torch}"]
        if one.torch == "next":
            chosen = ["--pre", f"torch=={newest_torch(python)}"]
        commands = [
            [python, "-m", "venv", one.venv],
            [*pip, "pip>=25.1"],
            [*pip, *chosen, "-e", ".", "--group", "test"],
        ]
    if any(subprocess.run(command, cwd=ROOT).returncode for command in commands):
        return False
    ready.touch()
    return True


def run(one: Environment, limit: float | None) -> Result | None:
    """Run the tests of an environment; None if they did not end within `limit` seconds."""
    python, report = str(ROOT / one.venv / "bin/python"), ROOT / one.venv / "report.xml"
    names = "torch", "megatron-core"
    code = "import importlib.metadata as m, json, platform; has = {d.name: d.version for d in m.distributions()}; "
    code += f"print(json.dumps([platform.python_version(), *(has.get(name, 'none') for name in {names})]))"
    versions = json.loads(subprocess.run([python, "-c", code], capture_output=True, check=True).stdout)
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-n", os.environ.get("WORKERS", "4"), "--dist", "loadfile"]
    command += ["--no-loadscope-reorder", "--max-worker-restart", "0", "-m", MARKS]
    began = time.monotonic()
    try:
        done = subprocess.run([*command, f"--junitxml={report}", *one.tests], cwd=ROOT, timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    result = Result(str(date.today()), versions, minutes=round((time.monotonic() - began) / 60, 1))
    reasons: Counter[str] = Counter()
    for suite in ElementTree.parse(report).iter("testsuite") if report.exists() else ():
        result.failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        result.skipped += int(suite.get("skipped", 0))
        result.passed += int(suite.get("tests", 0))
        reasons.update(str(case.get("message")) for case in suite.iter("skipped"))
    result.passed -= result.failed + result.skipped
    result.reasons = dict(sorted(reasons.items()))
    if done.returncode and not result.failed:
        result.failed = 1  # a worker has ended, or nothing was collected
    return result


def page(results: dict[str, Result]) -> Iterator[str]:
    """Yield the lines of docs/tested.md."""
    yield "# What was run on what"
    yield ""
    yield "Written by `make matrix`, on Linux with two cores and no GPU. `.ci/run` runs the same for each change, as far as its time"
    yield "goes. Python 3.14 was not tried. torch is as PyPI ships it, with CUDA, unless its version ends with `+cpu`."
    yield ""
    yield "| tests | Python | torch | megatron-core | passed | skipped | failed | minutes | on |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for title, one in results.items():
        counts = f"{one.passed} | {one.skipped} | {one.failed} | {one.minutes:.0f}"
        yield f"| {title.partition(':')[0]} | {' | '.join(one.versions)} | {counts} | {one.on} |"
    yield ""
    yield "## What was skipped"
    for title, one in results.items():
        if one.reasons:
            yield f"\n{title.partition(':')[0]}, Python {one.versions[0]}, torch {one.versions[1]}:\n"
            for reason, count in one.reasons.items():
                text = re.sub(r"([|_*<>])", r"\\\1", reason)
                yield f"- {count} x {text}"


def note(title: str, result: Result, order: list[str]) -> None:
    """Keep a result, and write the page of all that are kept."""
    kept = (
        {name: Result(**values) for name, values in json.loads(RESULTS.read_text()).items()}
        if RESULTS.exists()
        else {}
    )
    kept[title] = result
    kept = {name: kept[name] for name in order if name in kept}
    RESULTS.write_text(json.dumps({name: asdict(one) for name, one in kept.items()}, indent=1) + "\n")
    PAGE.write_text("\n".join(page(kept)) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--newest", action="store_true", help="print the newest supported Python that is found, and end"
    )
    parser.add_argument("--only", default="", help="run environments whose title contains this")
    parser.add_argument(
        "--without-suite", type=float, metavar="SECONDS", help="the suite has run, and took this long"
    )
    parser.add_argument(
        "--within", type=float, metavar="SECONDS", help="leave out what would take longer; note nothing"
    )
    given = parser.parse_args()
    if given.newest:
        print(find(newest()))
        return 0
    wanted, slowness, began, failed = environments(newest()), 1.0, time.monotonic(), False
    order = [one.title for one in wanted]
    if given.without_suite is not None:
        slowness = max(1.0, given.without_suite / 60 / wanted.pop(0).minutes)

    def left() -> float | None:
        return None if given.within is None else given.within - (time.monotonic() - began)

    for one in wanted:
        if given.only not in one.title:
            continue
        seconds, python = left(), find(one.python)
        takes = one.minutes * slowness * 60
        result, said = None, ""
        if not python:
            said = f"no Python {one.python} was found"
        elif seconds is not None and seconds < takes:
            said = f"it takes about {takes / 60:.0f} minutes, and {max(seconds, 0) / 60:.0f} are left"
        elif one.torch == "next" and (last := newest_torch(python)) and not is_prerelease(last):
            print(f"== not run: {one.title}: the registry has none after torch {last}", flush=True)
            if given.within is None:
                note(one.title, Result(str(date.today()), ("-", f"none after {last}", "-")), order)
            continue
        elif not install(one, python):
            said = "it could not be installed"
        else:
            print(f"== {one.title}", flush=True)
            result = run(one, left())
            said = "" if result else "it did not end in time"
        if said:
            print(f"== not run: {one.title}: {said}", flush=True)
        elif result is not None and given.within is None:
            note(one.title, result, order)
        # In CI a Python that is not there, a registry that does not answer, and a slow machine fail no change.
        failed = failed or (result is not None and result.failed > 0) or (bool(said) and given.within is None)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
