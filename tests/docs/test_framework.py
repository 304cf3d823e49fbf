"""The page on how to add a framework: what it shows is what the code has."""

from __future__ import annotations

import dataclasses
import re

from holdfast._frameworks.framework import Framework
from tests.docs.pages import ROOT, code, table, text, without_code
from tests.docs.test_recipes import SECTIONS

PAGE = "docs/framework.md"
NAMED_IN = {".py", ".md", ".toml", ".yml", ".json", ".txt"}
"""Kinds of files in which a framework could have to be named."""


def test_the_description_on_the_page_is_accelerates() -> None:
    shown = code(text(PAGE))[0][1]
    assert shown == text("src/holdfast/_frameworks/accelerate/__init__.py")


def test_every_field_of_a_description_is_explained() -> None:
    fields = [field.name for field in dataclasses.fields(Framework)]
    assert sorted(row[0] for row in table(text(PAGE), "fields")) == sorted(fields)


def test_the_sections_of_a_recipe_are_those_that_the_page_lists() -> None:
    listed = without_code(text(PAGE)).partition("### 6. The page")[2].partition("## Check")[0]
    assert re.findall(r'"([^"]+)"', listed.replace("\n", " ")) == list(SECTIONS)


def test_what_the_page_tells_to_use_is_there() -> None:
    for name, file in (
        ("stand_in", "tests/support/stand_ins.py"),
        ("needs", "tests/support/third_parties.py"),
        ("warn_once", "src/holdfast/_core/base/reporting.py"),
        ("note_committed", "src/holdfast/_frameworks/guard.py"),
        ("of_a_call", "src/holdfast/_frameworks/settings.py"),
        ("replacements", "src/holdfast/_frameworks/verl/patches.py"),
    ):
        assert re.search(rf"def {name}\b", (ROOT / file).read_text(encoding="utf-8")), name
        assert name in text(PAGE)


def test_no_other_file_names_the_framework_that_was_added() -> None:
    """So adding one takes the files of the table, and none besides."""
    files = {row[0] for row in table(text(PAGE), "files")}
    assert len(files) == 6
    here = {PAGE, "tests/docs/test_framework.py"}
    places = [ROOT / "pyproject.toml", ROOT / "Makefile", ROOT / "mkdocs.yml", ROOT / "constraints.txt"]
    for folder in ("src", "tests", "tools", "docs", "examples"):
        places += [path for path in (ROOT / folder).rglob("*") if path.suffix in NAMED_IN]
    naming = {
        path.relative_to(ROOT).as_posix()
        for path in places
        if "torchtune" in path.read_text(encoding="utf-8").lower()
    }
    assert naming - here == files
