"""The pages as text: their code blocks, tables, links and headings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
RECIPES = sorted(ROOT.glob("docs/recipes/*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/*.md")),
    *RECIPES,
    *sorted(ROOT.glob("docs/decisions/*.md")),
]
OURS = [page for page in PAGES if page.name != "benchmarks.md"]
"""Pages that people write; the other one is made by `make bench`."""
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NOTE = re.compile(r"<!-- (run by|not run|before):? ?((?:(?!-->).)*?)\s*-->\n\Z", re.DOTALL)


class Block(NamedTuple):
    """A code block of a page, and what the comment right above it says."""

    line: int
    language: str
    code: str
    elsewhere: str
    """Which test runs it, or why none does; empty: it is run as a part of its page."""
    before: str
    """What a reader has done before, which the page does not show."""


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def code(page: str, language: str = "python") -> list[tuple[int, str]]:
    """The code blocks of a page, each with the line it begins on."""
    return [
        (page.count("\n", 0, found.start(2)) + 1, found[2])
        for found in _FENCE.finditer(page)
        if found[1] == language
    ]


def blocks(page: str) -> list[Block]:
    """All code blocks of a page. A comment above a block says `run by TEST`, `not run: WHY`, or `before: CODE`."""
    found = []
    for fence in _FENCE.finditer(page):
        note = _NOTE.search(page, 0, fence.start())
        kind, words = (note[1], note[2].strip()) if note else ("", "")
        first = fence[2].partition("\n")[0]
        if first.startswith("# run by "):
            kind, words = "run by", first
        before = words if kind == "before" else ""
        line = page.count("\n", 0, fence.start(2)) + 1
        found.append(Block(line, fence[1], fence[2], "" if before else words, before))
    return found


def after(page: str, marker: str) -> str:
    """The code block that follows a marker."""
    _, found, rest = page.partition(f"<!-- {marker} -->\n")
    assert found, marker
    return code(rest)[0][1]


def without_code(page: str) -> str:
    return _FENCE.sub("", page)


def table(page: str, marker: str) -> list[list[str]]:
    """The cells of the table between a marker and the next end."""
    _, found, rest = page.partition(f"<!-- {marker} -->\n")
    assert found, marker
    lines = rest.partition("<!-- end -->")[0].strip().split("\n")
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


def anchors(page: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    heads = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
