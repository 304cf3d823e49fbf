"""The tables of the page of diagnoses are those of the code; its scores are compared in tests/museum and, of the
faults, in tests/watch/test_faults.py."""

from __future__ import annotations

from holdfast._watch.verdict import MEANS, TODO
from tests.docs.pages import table, text
from tests.watch.faults import FAULTS, SILENT, expected

PAGE = "docs/diagnose.md"


def test_causes_are_those_of_the_code() -> None:
    assert table(text(PAGE), "causes") == [[name, means] for name, means in MEANS.items()]
    assert TODO.keys() == MEANS.keys()


def test_the_faults_of_the_page_are_those_that_are_injected() -> None:
    """And are said to be named where the test of the fault asks for that."""
    rows = table(text(PAGE), "faults")
    assert [[row[0], row[1], row[3]] for row in rows] == [[fault.job, *expected(fault)] for fault in FAULTS]
    for fault, row in zip(FAULTS, rows, strict=True):
        assert row[5] == ("silent" if fault.job in SILENT else "right"), fault.job
