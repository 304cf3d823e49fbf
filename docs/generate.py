"""Rewrites the blocks of docs/protocol.md that are made from the code's tables: python docs/generate.py

A block stands between `<!-- generated: name -->` and `<!-- end -->`. tests/docs/test_protocol.py fails
when the page is not what this script would write.
"""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.flow.phases import CHOICE_TRANSITIONS, LOAD_TRANSITIONS, TRANSITIONS, Table

PAGE = Path(__file__).with_name("protocol.md")


def words(text: str) -> str:
    """A reason as mermaid takes it: no colon, no semicolon, no backtick."""
    return text.replace(":", ",").replace(";", ",").replace("`", "")


def diagram(table: Table) -> str:
    """A protocol table as a mermaid state diagram."""
    first = next(iter(table))
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first}"]
    for phase, ways in table.items():
        lines += [f"    {phase} --> {other}: {words(why)}" for other, why in ways.items()]
        if not ways:
            lines.append(f"    {phase} --> [*]")
    return "\n".join([*lines, "```"])


BLOCKS = {"save": TRANSITIONS, "load": LOAD_TRANSITIONS, "choice": CHOICE_TRANSITIONS}


def rewritten(page: str) -> str:
    """The page with every generated block as it should be."""
    for name, table in BLOCKS.items():
        pattern = re.compile(rf"(<!-- generated: {name} -->\n)(?:(?!<!--).)*(<!-- end -->)", re.DOTALL)
        page, count = pattern.subn(
            lambda found, table=table: found[1] + diagram(table) + "\n" + found[2], page
        )
        if count != 1:
            raise ValueError(f"{PAGE.name} has {count} blocks named {name!r}, not one.")
    return page


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(rewritten(page), encoding="utf-8")


if __name__ == "__main__":
    main()
