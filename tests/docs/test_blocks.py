"""Every code block of every page runs in the suite, or says in a comment above it why not.

Blocks of Python on one page are one program, from top to bottom. Blocks of recipes are run by `test_recipes`.
"""

from __future__ import annotations

import pytest

from tests.docs.pages import PAGES, RECIPES, ROOT, Block, blocks

DRAWN = {"mermaid", "text"}
"""Languages of blocks that nobody can run."""
TESTED = {
    "docs/format.md": "tests/docs/test_format.py",
    "docs/model.md toml": "tests/docs/test_model.py",
}
"""Pages, or their blocks of one language, with a test of their own."""
FOUND = {str(page.relative_to(ROOT)): blocks(page.read_text(encoding="utf-8")) for page in PAGES}


def shown(name: str) -> list[Block]:
    """The blocks that a reader could run, and that no other test has."""
    return [
        block
        for block in FOUND[name]
        if block.language not in DRAWN and name not in TESTED and f"{name} {block.language}" not in TESTED
    ]


RUN = [
    name
    for name in FOUND
    if ROOT / name not in RECIPES and any(b.language == "python" and not b.elsewhere for b in shown(name))
]


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("name", RUN)
def test_the_python_of_a_page_runs(name: str) -> None:
    space: dict[str, object] = {"__name__": name}
    for block in shown(name):
        if block.language == "python" and not block.elsewhere:
            exec(compile(block.before, f"{name}, before line {block.line}", "exec"), space)
            # Lines in errors are the page's.
            exec(compile("\n" * (block.line - 1) + block.code, str(ROOT / name), "exec"), space)


@pytest.mark.parametrize("name", FOUND)
def test_a_block_that_is_not_run_here_says_why(name: str) -> None:
    for block in shown(name):
        assert block.language in {"python", "sh"}, f"line {block.line}: what is it?"
        if ROOT / name in RECIPES or (block.language == "python" and not block.elsewhere):
            continue
        assert block.elsewhere, f"line {block.line}: who runs it?"


def test_the_example_of_the_readme_is_short() -> None:
    example = next(block for block in FOUND["README.md"] if block.language == "python")
    assert len([line for line in example.code.split("\n") if line]) <= 10


def test_there_is_much_to_run() -> None:
    assert len(RUN) >= 6
    assert len(shown("docs/api.md")) >= 12
