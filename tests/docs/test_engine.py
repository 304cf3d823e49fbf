"""The page on weights in an engine: its lists say what the tables and the tests have."""

from __future__ import annotations

from holdfast._models.views.forms import FORMS
from tests.docs.pages import text
from tests.engines.models import LAYOUTS, SETTINGS


def rows(mark: str) -> list[list[str]]:
    part = text("docs/engine.md").partition(f"<!-- {mark} -->\n")[2].partition("<!-- end -->")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines()[2:]]


def test_the_forms_are_those_of_the_source() -> None:
    told = {name: " ".join((form.__doc__ or "").split()) for name, form in FORMS.items()}
    assert {name.strip("`"): about for name, about in rows("forms")} == told


def test_the_models_are_those_that_are_run() -> None:
    assert [row[0].split("`")[1] for row in rows("engines")] == sorted(SETTINGS)
    for kind, _, *layouts in rows("engines"):
        assert [cell.startswith("yes") for cell in layouts] == [
            not experts or "expert" in str(SETTINGS[kind.split("`")[1]]) for _, experts in LAYOUTS.values()
        ]
