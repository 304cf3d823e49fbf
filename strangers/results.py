"""The figures that are kept, and the table of them in the docs."""

from __future__ import annotations

import json
import subprocess
import tomllib
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from strangers.projects import Project
from strangers.run import Ended

SAVES = ("lists of `*.distcp` not compared", "it committed a save or completed a load in")
NOTHING = "Installing breaks nothing here; in these tests Holdfast commits no save and completes no load:"
BEGIN, END = "<!-- strangers -->\n", "<!-- end -->"


class Row(NamedTuple):
    """The figures of a file of tests."""

    project: str
    suite: str
    release: str
    commit: str
    date: str
    stock: int
    ours: int
    completed: int | None
    """In so many of `ours`, or of `unlisted`, Holdfast committed a save or completed a load; None: it was not
    counted."""
    differ: list[str]
    """Names of the tests that pass on stock alone."""
    unlisted: int | None = None
    """So many pass where lists of `*.distcp` are not compared; None: no test that differs was run so."""

    @classmethod
    def of(
        cls,
        project: Project,
        copies: Path,
        suite: str,
        stock: Mapping[str, Ended],
        ours: Mapping[str, Ended],
        unlisted: Mapping[str, Ended],
    ) -> Row:
        """Count the tests of a file.

        copies: the folder with the project's copy. unlisted: how tests that differ ended where lists of
        `*.distcp` are not compared.
        """
        passed = [test for test, end in stock.items() if end.how == "passed"]
        here = [test for test in passed if test in ours and ours[test].how == "passed"]
        again = [end for end in unlisted.values() if end.how == "passed"]
        return cls(
            project.name,
            suite,
            f"{project.package} {version(project.package)}"
            if project.package
            else f"{project.name} {project.tag}",
            _commit(copies / project.name),
            datetime.now(UTC).date().isoformat(),
            len(passed),
            len(here),
            sum(end.completed for end in (*(ours[test] for test in here), *again)),
            [test for test in passed if test not in here],
            len(here) + len(again) if unlisted else None,
        )

    def with_(self, other: Row) -> Row:
        """Add the figures of another file of the same project; the older date stays."""
        return self._replace(
            date=min(self.date, other.date),
            stock=self.stock + other.stock,
            ours=self.ours + other.ours,
            completed=None
            if self.completed is None or other.completed is None
            else self.completed + other.completed,
            differ=self.differ + other.differ,
            unlisted=None
            if self.unlisted is other.unlisted is None
            else sum(row.ours if row.unlisted is None else row.unlisted for row in (self, other)),
        )


def _commit(copy: Path) -> str:
    """Return the commit of a copy that git made, shortened; of another one, what its file COMMIT says."""
    if (copy / "COMMIT").exists():
        return (copy / "COMMIT").read_text().strip()
    if not (copy / ".git").exists():
        return ""
    asked = subprocess.run(["git", "-C", str(copy), "rev-parse", "HEAD"], capture_output=True, text=True)
    return asked.stdout[:10]


def keep_rows(file: Path, rows: list[Row]) -> None:
    """Put rows in place of those of the same files of tests."""
    kept = {(row.project, row.suite): row for row in [*(read_rows(file) if file.exists() else ()), *rows]}
    file.write_text(json.dumps([row._asdict() for row in kept.values()], indent=1) + "\n")


def read_rows(file: Path) -> list[Row]:
    """Read the rows that `keep_rows` wrote."""
    return [Row(**one) for one in json.loads(file.read_text())]


def of_projects(rows: list[Row]) -> list[Row]:
    """Return one row for each project, in the order of names."""
    sums: dict[str, Row] = {}
    for row in rows:
        sums[row.project] = sums[row.project].with_(row) if row.project in sums else row
    return [sums[name] for name in sorted(sums)]


def read_reasons(file: Path) -> dict[str, str]:
    """Read why tests differ: reasons by the names of tests."""
    differences = tomllib.loads(file.read_text())["difference"]
    return {test: one["reason"] for one in differences for test in one["tests"]}


def table(rows: list[Row], reasons: Mapping[str, str]) -> str:
    """Return two tables in Markdown: the second is of the projects in whose tests Holdfast does nothing."""
    head = ["tests of", "commit", "date", "pass on stock", "on Holdfast"]
    saves, others = _lines([*head, *SAVES, "not passed"]), _lines([*head, "not passed"])
    for row in of_projects(rows):
        counts = Counter(reasons.get(test, "not expected") for test in row.differ)
        why = "; ".join(f"{count}: {reason}" for reason, count in counts.items())
        figures: list[object] = [row.release, row.commit, row.date, row.stock, row.ours]
        if row.completed == 0:
            others += _lines([*figures, why])[:1]
        else:
            unlisted = "" if row.unlisted is None else row.unlisted
            completed = "not counted again" if row.completed is None else row.completed
            saves += _lines([*figures, unlisted, completed, why])[:1]
    return "\n".join([*saves, "", NOTHING, "", *others, ""])


def _lines(cells: list[object]) -> list[str]:
    """Return a line of a table, and the line that makes it the head of one."""
    return [f"| {' | '.join(map(str, cells))} |", f"|{'---|' * len(cells)}"]


def write_page(page: Path, file: Path, reasons: Mapping[str, str]) -> None:
    """Write the table into a page, between its two marks."""
    before, rest = page.read_text().split(BEGIN, 1)
    page.write_text(f"{before}{BEGIN}{table(read_rows(file), reasons)}{END}{rest.split(END, 1)[1]}")
