"""python -m strangers --copies FOLDER [--project NAME ...] [--suite TEST ...]

Exits 1 if the differences between stock and Holdfast are not those of expected.toml.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from strangers.projects import Project, copy_project, read_projects
from strangers.results import Row, keep_rows, read_reasons, write_page
from strangers.run import Ended, run_tests

_HERE = Path(__file__).parent
VARIABLE = "COPIES"
Results = dict[str, Ended]


def main(words: list[str] | None = None) -> int:
    """Run the tests on both sides, print the table, compare; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m strangers",
        description="Other projects' tests of their checkpoints, on stock and on Holdfast.",
    )
    parser.add_argument(
        "--copies",
        type=Path,
        default=os.environ.get(VARIABLE),
        help=f"a folder with a copy of each project (${VARIABLE})",
    )
    parser.add_argument("--project", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--suite", nargs="+", metavar="TEST", help="only these of the project's tests")
    parser.add_argument(
        "--projects", type=Path, default=_HERE / "projects.toml", help="the table of projects"
    )
    parser.add_argument(
        "--expected", type=Path, default=_HERE / "expected.toml", help="differences, with reasons"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="put the figures into it")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table of --json into this page")
    args = parser.parse_args(words)
    copies = Path(args.copies or "copies")
    projects = [one for one in read_projects(args.projects) if not args.project or one.name in args.project]
    for project in projects:
        if not project.is_in(copies):
            print(f"{project.name}: not in {copies}. To get it: {project.how_to_get}", file=sys.stderr)
    projects = [project for project in projects if project.is_in(copies)]
    if not projects:
        print(f"Nothing to run: give the folder of copies by --copies or {VARIABLE}.", file=sys.stderr)
        return 2
    reasons = read_reasons(args.expected)
    stock, ours = Results(), Results()
    print(HEAD)
    for project in projects:
        for suite, one, other, unlisted in compare(project, copies, args.suite or project.tests):
            print(line_of(f"{project.name}/{suite}", one, other, reasons, unlisted), flush=True)
            stock, ours = stock | one, ours | other
            if args.json:  # after each file: a run may take hours
                keep_rows(args.json, [Row.of(project, copies, suite, one, other, unlisted)])
    if args.json and args.page:
        write_page(args.page, args.json, reasons)
    return conclude(stock, ours, reasons)


def compare(
    project: Project, copies: Path, suites: tuple[str, ...]
) -> Iterator[tuple[str, Results, Results, Results]]:
    """Run a project's tests on stock, and those that pass on Holdfast, too: file by file.

    Those that differ run once more, without assertions on lists of `*.distcp`, if the project has any.
    """
    with tempfile.TemporaryDirectory() as work:
        trees = {side: Path(work, side) for side in ("stock", "ours", "unlisted")}
        compared = False
        for side, tree in trees.items():
            lists = side != "unlisted"
            compared = copy_project(project, copies, tree, ours=side != "stock", lists=lists)
        for suite in suites:
            if not (copies / project.name / project.root / suite.partition("::")[0]).exists():
                print(f"{project.name}/{suite}: not in this copy")
                continue
            stock = run_tests(project, trees["stock"], suite, ours=False)
            passed = [test for test, end in stock.items() if end.how == "passed"]
            ours = run_tests(project, trees["ours"], suite, ours=True, only=passed)
            differ = differences(stock, ours) if compared else ()
            yield suite, stock, ours, run_tests(project, trees["unlisted"], suite, ours=True, only=[*differ])


def differences(stock: Results, ours: Results) -> dict[str, str]:
    """Return the tests that stock passes and Holdfast does not, with what went wrong."""
    lost = Ended("failed", "it did not run")
    ends = {test: ours.get(test, lost) for test, end in stock.items() if end.how == "passed"}
    return {test: end.why for test, end in ends.items() if end.how != "passed"}


HEAD = f"{'':70} stock  ours  saved or loaded in  not here"


def line_of(
    suite: str,
    stock: Results,
    ours: Results,
    reasons: Mapping[str, str],
    unlisted: Mapping[str, Ended] = MappingProxyType({}),
) -> str:
    """Return a file's line of the table, and its differences; unlisted: how these ended without lists."""
    passed = [test for test, end in stock.items() if end.how == "passed"]
    differ = differences(stock, ours)
    reached = sum(ours[test].completed for test in passed if test not in differ)
    figures = f"{len(passed):5} {len(passed) - len(differ):5} {reached:19} {len(stock) - len(passed):9}"
    lines = [f"{suite[-70:]:70} {figures}"]
    for test, why in differ.items():
        lines.append(f"    {test}: {reasons.get(test, f'NOT EXPECTED: {why}')}")
        if test in unlisted:
            lines.append(f"        where lists of *.distcp are not compared: {unlisted[test].how}")
    return "\n".join(lines)


def conclude(stock: Results, ours: Results, reasons: Mapping[str, str]) -> int:
    """Print the sums and what is not as expected; return the exit status."""
    differ = differences(stock, ours)
    passed = {test for test, end in stock.items() if end.how == "passed"}
    if not passed:
        print(f"Stock passes no test here: {'; '.join({end.why for end in stock.values()})}")
        return 1
    here = passed - differ.keys()
    reached = sum(ours[test].completed for test in here)
    share = f"{len(here)} ({len(here) / len(passed):.0%})"
    print(f"\nOf {len(passed)} tests that stock passes, {share} pass on Holdfast;")
    print(f"in {reached} of these, Holdfast committed a save or completed a load.")
    stale = [test for test in reasons if test in passed and test not in differ]
    for test, why in differ.items():
        if test not in reasons:
            print(f"Not expected to differ: {test}: {why}")
    for test in stale:
        print(f"Expected to differ, and does not: {test}")
    return 1 if stale or differ.keys() - reasons.keys() else 0


if __name__ == "__main__":
    sys.exit(main())
