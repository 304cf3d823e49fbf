"""Runs benchmarks for two source trees in turns: what a change of the library costs or saves, in one command.

python -m bench.before_after OLD [NEW] --benches save_load per_tensor [--rounds 3] [--quick] [--json FILE]

OLD and NEW are folders or commits; a commit gets a worktree for as long as this runs. NEW is this tree if it is not given.
Each tree runs its own benchmarks, as a public call may have changed its name; rows whose metrics both have are
compared, so look at what has changed in bench/ before you believe a figure.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.harness import leave
from bench.rows import number
from bench.table import ORDER

ROOT = Path(__file__).resolve().parents[1]
Found = dict[str, "Sides"]


@dataclass(frozen=True)
class Sides:
    """One row of one run."""

    ours: float | None
    peer: float | None
    first: float | None
    unit: str


@dataclass(frozen=True)
class Change:
    """A metric before and after, as medians over the rounds."""

    bench: str
    metric: str
    unit: str
    before: float
    after: float
    change: float
    """After over before; units that end in a second (GB/s, steps/s) are better the larger, all others the smaller."""
    least: float
    most: float
    """The change in single rounds."""
    peer: float | None
    """The same of the peers, the median of all: no commit of ours is its cause, the machine is."""
    first_before: float | None
    first_after: float | None


@contextmanager
def source_tree(where: str) -> Iterator[Path]:
    """The folder of this name, or a worktree of this commit, which goes afterwards."""
    if Path(where, "src", "holdfast").is_dir():
        yield Path(where).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-before-") as parent:
        folder = str(Path(parent, "tree"))
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", folder, where], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True)


def environment(tree: Path) -> dict[str, str]:
    """Variables with which Python imports this tree's holdfast; scratch folders lie in one place for both."""
    return {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "TMPDIR": os.environ.get("TMPDIR", str(ROOT.parent)),
    }


def check(tree: Path) -> None:
    """Raise RuntimeError if another holdfast than this tree's would be measured."""
    words = [sys.executable, "-c", "import holdfast; print(holdfast.__file__)"]
    done = subprocess.run(words, env=environment(tree), cwd=tree, capture_output=True, text=True, check=True)
    if not Path(done.stdout.strip()).is_relative_to(tree / "src"):
        raise RuntimeError(f"{done.stdout.strip()} is not in {tree}")


def run_once(bench: str, tree: Path, quick: bool, limit_s: float) -> Found:
    """One run of one benchmark with one tree's library; rows by metric."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        words = [sys.executable, "-m", f"bench.{bench}", "--json", str(path), *(["--quick"] if quick else [])]
        process = subprocess.Popen(
            words,
            env=environment(tree),
            cwd=tree,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _, errors = process.communicate(timeout=limit_s)
        except BaseException:
            process.terminate()  # it removes its scratch folders and ends its ranks
            process.wait(30)
            raise
        if process.returncode:
            print(
                f"{bench}, {tree}: exit code {process.returncode}\n{errors.strip()[-500:]}", file=sys.stderr
            )
        return read_rows(path) if path.exists() else {}


def read_rows(path: Path) -> Found:
    """The rows of a result; older commits wrote the list of rows alone."""
    found = json.loads(path.read_text())
    rows = found["rows"] if isinstance(found, dict) else found
    return {row["metric"]: Sides(row["ours"], row["peer"], row.get("first"), row["unit"]) for row in rows}


def compare(bench: str, rounds: Sequence[tuple[Found, Found]]) -> list[Change]:
    """What changed, once for each figure of ours that all rounds have on both sides, whatever it is compared with."""
    peers: dict[tuple[str, tuple[float, ...]], list[str]] = {}
    for metric in rounds[0][0] if rounds else ():
        runs = [found.get(metric) for pair in rounds for found in pair]
        ours = tuple(run.ours for run in runs if run is not None and run.ours)
        if len(ours) == len(runs):
            what, _, peer = metric.rpartition(" / ")
            peers.setdefault((what or peer, ours), []).append(peer)
    return [change(bench, what, named, rounds) for (what, _), named in peers.items()]


def change(bench: str, what: str, peers: Sequence[str], rounds: Sequence[tuple[Found, Found]]) -> Change:
    """What changed in one figure of ours, which stands beside these peers."""
    metrics = [f"{what} / {peer}" if peer != what else what for peer in peers]
    pairs = [(old[metrics[0]], new[metrics[0]]) for old, new in rounds]
    each = [new.ours / old.ours for old, new in pairs if old.ours and new.ours]
    before, after = ([one.ours for one in column if one.ours] for column in zip(*pairs, strict=True))
    firsts = ([one.first for one in column if one.first is not None] for column in zip(*pairs, strict=True))
    drift = [
        theirs_new / theirs_old
        for metric, peer in zip(metrics, peers, strict=True)
        if peer != "target"  # a number that never moves
        for old, new in rounds
        if (theirs_old := old[metric].peer) and (theirs_new := new[metric].peer)
    ]
    return Change(
        bench,
        f"{what} / {', '.join(peers)}",
        pairs[0][0].unit,
        statistics.median(before),
        statistics.median(after),
        statistics.median(after) / statistics.median(before),
        min(each),
        max(each),
        statistics.median(drift) if drift else None,
        *(statistics.median(first) if first else None for first in firsts),
    )


def show(changes: Sequence[Change], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading in ("bench", "metric", "unit"):
        table.add_column(heading)
    for heading in ("before", "after", "after/before", "rounds", "peer's", "first before", "first after"):
        table.add_column(heading, justify="right")
    for one in changes:
        figures = (one.before, one.after, one.change)
        table.add_row(
            one.bench,
            one.metric,
            one.unit,
            *map(number, figures),
            f"{number(one.least)}-{number(one.most)}",
            *map(number, (one.peer, one.first_before, one.first_after)),
        )
    Console(width=None if sys.stdout.isatty() else 200).print(table, markup=False)


def in_turns(
    bench: str, old: Path, new: Path, args: argparse.Namespace, silent: list[str]
) -> list[tuple[Found, Found]]:
    """The rounds of one benchmark; a run that gave no figure is added to `silent`, and its round left out."""
    rounds = []
    for at in range(args.rounds):
        found = {}
        for tree in (old, new) if at % 2 == 0 else (new, old):  # neither is always the one that comes later
            print(f"{bench}, round {at + 1} of {args.rounds}, {tree}", file=sys.stderr)
            found[tree] = run_once(bench, tree, args.quick, args.limit)
            if not found[tree]:
                silent.append(f"{bench}, round {at + 1}, {tree}")
        if all(found.values()):
            rounds.append((found[old], found[new]))
    return rounds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.before_after")
    parser.add_argument("old", help="a folder or a commit")
    parser.add_argument("new", nargs="?", default=str(ROOT), help="the same; this tree if not given")
    parser.add_argument("--benches", nargs="+", choices=ORDER, required=True)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--limit", type=float, default=1800.0, metavar="SECONDS", help="for one run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the changes as JSON")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, leave)
    changes: list[Change] = []
    silent: list[str] = []
    with ExitStack() as stack:
        old, new = (stack.enter_context(source_tree(where)) for where in (args.old, args.new))
        check(old)
        check(new)
        try:
            for bench in args.benches:
                changes += compare(bench, in_turns(bench, old, new, args, silent))
        finally:  # also where it was ended early: a round may have taken an hour
            show(changes, f"{args.old} -> {args.new}")
            if args.json is not None:
                text = json.dumps([asdict(one) for one in changes], indent=1, allow_nan=False)
                args.json.write_text(text + "\n")
    for run in silent:
        print(f"error: no figure from {run}", file=sys.stderr)
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
