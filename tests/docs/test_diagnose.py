"""The tables of the page of diagnoses are those of the code; its scores are compared in tests/museum and, of the
faults, in tests/watch/test_faults.py."""

from __future__ import annotations

from holdfast._watch.verdict import BAR, CLASSES, CONFIDENCE
from tests.docs.pages import table, text
from tests.watch.faults import FAULTS, SILENT, expected

PAGE = "docs/diagnose.md"


def test_classes_and_confidence_are_those_of_the_code() -> None:
    page = text(PAGE)
    assert table(page, "classes") == [[name, about.means] for name, about in CLASSES.items()]
    assert table(page, "confidence") == [
        [name, f"{sure:.0%}".replace("%", " %")] for name, sure in CONFIDENCE.items()
    ]
    assert f"below {BAR:.0%}".replace("%", " %") in page.replace("\n", " ")


def test_every_class_has_what_to_do_and_a_thread() -> None:
    for name, about in CLASSES.items():
        assert about.todo, name
        assert about.thread.startswith("https://github.com/"), name


def test_the_faults_of_the_page_are_those_that_are_injected() -> None:
    """And are said to be decided where the test of the fault asks for that."""
    rows = table(text(PAGE), "faults")
    assert [row[:2] for row in rows] == [[fault.job, expected(fault)] for fault in FAULTS]
    for fault, row in zip(FAULTS, rows, strict=True):
        assert row[2] == ("-" if fault.job in SILENT else expected(fault))
