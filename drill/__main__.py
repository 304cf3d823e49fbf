"""python -m drill [--only NAME ...] [--json FILE] [--page FILE]

Exits 1 if an expectation of either side did not hold.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.machine import commit, this_machine
from drill.must_go_on import run as must_go_on
from drill.page import document, with_front
from drill.results import Results, Row
from drill.scenarios import SCENARIOS
from tests.support.processes import PRELOAD

ROOT = Path(__file__).resolve().parents[1]
HEALTHY = "must-go-on"
NAMES = (*SCENARIOS, HEALTHY)
PACKAGES = ("torch", "megatron-core", "megatron-bridge", "verl", "torch-holdfast")


def main(words: list[str] | None = None) -> int:
    """Run the drill; what it measured goes to the files, its progress to the terminal."""
    parser = argparse.ArgumentParser(
        prog="python -m drill", description="Replay the reports, stock and ours."
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table as Markdown")
    parser.add_argument("--front", type=Path, metavar="FILE", help="write the short table into this page")
    args = parser.parse_args(words)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # stores look their own host's name up
    preload = "tests.frameworks.megatron.preload"
    if preload not in PRELOAD:
        PRELOAD.append(preload)
    measured, begun = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    load = round(os.getloadavg()[0], 1)
    names = list(args.only or NAMES)
    rows, broken = _run({name: SCENARIOS[name] for name in names if name != HEALTHY})
    healthy, more = _run({HEALTHY: must_go_on} if HEALTHY in names else {})
    results = Results(
        measured,
        round(time.monotonic() - begun, 1),
        commit(),
        load,
        this_machine({}),
        _versions(),
        rows,
        healthy,
    )
    rows, broken = rows + healthy, broken + more
    if args.json:
        results.write(args.json)
    if args.page:
        args.page.write_text(document(results))
    if args.front:
        args.front.write_text(with_front(args.front.read_text(), results))
    failed = [f"{row.name}: not so: {what}" for row in rows for what in row.failed]
    for line in (*failed, *broken):
        print(f"error: {line}", file=sys.stderr)
    held = sum(check.held for row in rows for check in row.checks)
    print(f"{len(rows)} scenarios, {held} expectations held, {len(failed)} did not; {results.seconds:.0f} s")
    return 1 if failed or broken else 0


def _run(scenarios: dict[str, Callable[[], list[Row]]]) -> tuple[list[Row], list[str]]:
    """The rows, and what kept a scenario from having any."""
    rows, broken = [], []
    for name, run in scenarios.items():
        print(f"{name} ...", flush=True)
        begun = time.monotonic()
        try:
            found = run()
        except Exception as error:
            traceback.print_exc()
            broken.append(f"{name}: {type(error).__name__}: {error}")
            continue
        for row in found:
            print(f"  {row.scenario}\n    stock    {row.stock.seconds:6.1f} s  {row.stock.message}")
            print(f"    Holdfast {row.ours.seconds:6.1f} s  {row.ours.message}")
            print(f"    {'; '.join(f'NOT SO: {what}' for what in row.failed) or 'as expected'}")
        print(f"  {time.monotonic() - begun:.0f} s", flush=True)
        rows += found
    return rows, broken


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
