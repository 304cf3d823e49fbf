"""The tables of the page of diagnoses are those of the code; its score is compared in tests/museum."""

from __future__ import annotations

from holdfast._watch.verdict import BAR, CLASSES, CONFIDENCE
from tests.docs.pages import table, text

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
