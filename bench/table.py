"""Writes docs/benchmarks.md from bench/results/*.json and says on which machine.

python -m bench.table [RESULTS_DIR] [--out FILE]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from pathlib import Path

from bench.harness import Row, number

ROOT = Path(__file__).resolve().parents[1]
ORDER = ("save_load", "fsdp", "async_save", "per_tensor", "planning", "megatron")


def machine() -> str:
    import numpy
    import torch

    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{len(os.sched_getaffinity(0))} cores ({processor()}), {pages:.0f} GiB memory, {gpu}, "
        f"Linux {platform.release()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"NumPy {numpy.__version__}"
    )


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def section(path: Path) -> list[str]:
    rows = [Row(**row) for row in json.loads(path.read_text())]
    measured = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC).date()
    lines = [
        f"## {path.stem}",
        "",
        f"Measured {measured}.",
        "",
        "| metric | ours | peer | unit | ratio | asked | | n | note |",
        "|---|---:|---:|---|---:|---:|---|---:|---|",
    ]
    lines += [line(row) for row in rows]
    return [*lines, ""]


def line(row: Row) -> str:
    met = {True: "met", False: "**missed**", None: ""}[row.met]
    cells = (
        row.metric,
        number(row.ours),
        number(row.peer),
        row.unit,
        number(row.ratio),
        number(row.limit),
        met,
        str(row.n),
        row.note,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def document(results: list[Path]) -> str:
    lines = [
        "# Benchmarks",
        "",
        f"Made by `make bench`, written {datetime.date.today()}. Machine: {machine()}.",
        "",
        "Both sides of a row were measured in turns in the same run; figures are medians of n. The peer is",
        "named after the last slash of the metric. A ratio above 1 means ours is better; against a physical",
        "limit it is the share of the limit that is reached. `asked` is the ratio this project set itself.",
        "",
    ]
    for path in sorted(
        results, key=lambda p: (ORDER.index(p.stem) if p.stem in ORDER else len(ORDER), p.stem)
    ):
        lines += section(path)
    return "\n".join(lines).rstrip() + "\n"


def write() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.table")
    parser.add_argument("results", type=Path, nargs="?", default=ROOT / "bench" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks.md")
    args = parser.parse_args()
    results = list(args.results.glob("*.json"))
    if not results:
        print(f"error: no JSON files in {args.results}", file=sys.stderr)
        return 1
    args.out.write_text(document(results))
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(write())
