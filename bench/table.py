"""Writes docs/benchmarks.md from bench/results/*.json, and fails if the results contradict what a page says.

python -m bench.table [RESULTS_DIR] [--out FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.claims import CLAIMS, Claim, broken, rows_of
from bench.machine import Machine
from bench.rows import Results, Row, number, read_results

ROOT = Path(__file__).resolve().parents[1]
ORDER = (
    "save_load",
    "small_save",
    "unchanged",
    "per_tensor",
    "async_save",
    "objects",
    "defaults",
    "fsdp",
    "megatron",
    "planning",
    "growth",
    "huggingface",
    "fingerprint",
    "groups",
    "standing",
    "watch",
)
PICTURES = {"growth": ("![Costs by ranks, tensors, steps and files](growth.svg)", "")}
INTRODUCTION = """\
# Benchmarks

`make bench` measures everything and writes this page (`bench/table.py`); `python -m bench.NAME` measures one section.
Every rank is a process, ranks talk over gloo, and tensors lie in CPU memory.

- Both sides of a row were measured in the same run, in turns, on the same ranks. The peer is what the metric names last,
  after a slash. Figures are medians of `n`.
- `first` is what ours took in the first call of its kind in these processes, `its first` the same of the peer. These calls
  pay for fresh memory, for modules imported on demand and for processes that are started; the medians leave them out.
- `ratio` above 1: ours is better. Where the peer is a limit of the machine (raw I/O, a plain copy, `floor`), the ratio is
  the share of the limit that ours reaches. Where the peer is a target, the ratio is target over ours.
- The limits of the machine are prepared like ours: their buffers and calls are made up before the clock starts. Raw
  writes use the size of call that was fastest on that file system just before; the note says which.
- `asked` is the ratio that this project set itself. A row that misses it stays here.
"""
BEFORE_AND_AFTER = """\
## Before and after a change

`python -m bench.before_after OLD [NEW] --benches save_load per_tensor --rounds 3` runs these benchmarks for two commits or
folders in turns and prints what changed; `--quick` takes small sizes. NEW is the working tree if it is not given. The
peer's own change from one to the other, which no commit of ours causes, shows how far the machine drifted.
"""


def document(results: list[Results]) -> str:
    """The whole page."""
    machines = distinct(results)
    lines = INTRODUCTION.split("\n")
    lines += [f"Machine {name(at)}: {machine}.\n" for at, machine in enumerate(machines)]
    lines += [
        "## What other pages say",
        "",
        "Each sentence about speed or memory, and the row it rests on. `make bench` fails if the ratio of a row is below what the",
        "words need.",
        "",
        "| words | page | row: ours and the peer | ratio | needs |",
        "|---|---|---|---:|---:|",
    ]
    lines += [claim_line(claim, results) for claim in CLAIMS]
    lines += ["", *BEFORE_AND_AFTER.split("\n")]
    for one in sorted(results, key=place):
        lines += section(one, name(machines.index(one.machine)))
    return "\n".join(lines).rstrip() + "\n"


def distinct(results: list[Results]) -> list[Machine]:
    found: list[Machine] = []
    for one in sorted(results, key=place):
        if one.machine not in found:
            found.append(one.machine)
    return found


def name(at: int) -> str:
    return chr(ord("A") + at)


def place(one: Results) -> tuple[int, str]:
    return (ORDER.index(one.bench) if one.bench in ORDER else len(ORDER), one.bench)


def section(one: Results, machine: str) -> list[str]:
    measured = [f"Measured {one.measured[:10]}", f"machine {machine}"]
    measured += [f"commit {one.commit}"] if one.commit else []
    measured += [f"load average {one.load:g} before it began"] if one.load is not None else []
    measured += ["small sizes (`--quick`)"] if one.quick else []
    return [
        f"## {one.bench}",
        "",
        ", ".join(measured) + ".",
        "",
        "| metric | ours | peer | unit | first | its first | ratio | asked | | n | note |",
        "|---|---:|---:|---|---:|---:|---:|---:|---|---:|---|",
        *[line(row) for row in one.rows],
        "",
        *PICTURES.get(one.bench, ()),
    ]


def line(row: Row) -> str:
    met = {True: "met", False: "**missed**", None: ""}[row.met]
    cells = (
        row.metric,
        number(row.ours),
        number(row.peer),
        row.unit,
        number(row.first),
        number(row.peer_first),
        number(row.ratio),
        number(row.limit),
        met,
        str(row.n),
        row.note,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def claim_line(claim: Claim, results: list[Results]) -> str:
    rows = rows_of(claim, results)
    figures = "; ".join(
        f"{row.metric}: {number(row.ours)} and {number(row.peer)} {row.unit}".strip() for row in rows
    )
    page = f"[{claim.page}]({'../' if '/' not in claim.page else ''}{Path(claim.page).name})"
    ratio = min((row.ratio for row in rows if row.ratio is not None), default=None)
    cells = f"[{claim.bench}](#{claim.bench}): {figures or 'not measured'} | {number(ratio)} | {number(claim.least)}"
    return f"| {claim.words} | {page} | {cells} |"


def write() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.table")
    parser.add_argument("results", type=Path, nargs="?", default=ROOT / "bench" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks.md")
    args = parser.parse_args()
    results = [read_results(path) for path in sorted(args.results.glob("*.json"))]
    if not results:
        print(f"error: no JSON files in {args.results}", file=sys.stderr)
        return 1
    args.out.write_text(document(results))
    print(f"wrote {args.out}")
    sentences = list(broken(results))
    for sentence in sentences:
        print(f"error: {sentence}", file=sys.stderr)
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(write())
