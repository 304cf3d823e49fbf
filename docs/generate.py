"""Rewrites what is made from the code: blocks of docs/protocol.md, and docs/rounds.svg: python docs/generate.py

A block stands between `<!-- generated: name -->` and `<!-- end -->`. tests/docs/test_protocol.py fails
when a page is not what this script would write.
"""

from __future__ import annotations

import re
from pathlib import Path

from holdfast._core.layout.grid import Grid
from holdfast._core.protocol.phases import (
    CHOICE_TRANSITIONS,
    LOAD_TRANSITIONS,
    TASK_TRANSITIONS,
    TRANSITIONS,
    Transitions,
)
from holdfast._groups.lifecycle.plan import plan_groups, rounds

PAGES = Path(__file__).parent
PICTURE = PAGES / "rounds.svg"


def words(text: str) -> str:
    """A reason as mermaid takes it: no colon, no semicolon, no backtick."""
    return text.replace(":", ",").replace(";", ",").replace("`", "")


def diagram(table: Transitions) -> str:
    """A protocol table as a mermaid state diagram."""
    first = next(iter(table))
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first}"]
    for phase, ways in table.items():
        lines += [f"    {phase} --> {other}: {words(why)}" for other, why in ways.items()]
        if not ways:
            lines.append(f"    {phase} --> [*]")
    return "\n".join([*lines, "```"])


def picture() -> str:
    """The rounds in which the groups of sixteen ranks are warmed up, as SVG: a row a round, a column a rank."""
    cell, left, top, world = 34, 190, 34, 16
    plan = plan_groups(Grid(world, tp=2, pp=2, ep=2))
    numbers = iter(rounds([row for kind in plan for row in kind.table]))
    drawn, height = [], 0
    for rank in range(world):
        x = left + rank * cell + cell / 2
        drawn.append(f'<text x="{x}" y="{top - 10}" text-anchor="middle" class="dim">{rank}</text>')
    for kind in plan:
        for index, row in enumerate(kind.table.tolist()):
            y = top + next(numbers) * cell
            height = max(height, y + cell)
            hue = index * 360 // max(len(kind.table), 1)
            for rank in row:
                x = left + rank * cell
                drawn.append(
                    f'<rect x="{x + 2}" y="{y + 2}" width="{cell - 4}" height="{cell - 4}" rx="5" fill="hsl({hue} 55% 62%)"/>'
                )
        drawn.append(
            f'<text x="{left - 12}" y="{y + cell / 2 + 5}" text-anchor="end">{", ".join(kind.names)}</text>'
        )
    width = left + world * cell + 8
    style = "text{font:13px system-ui,sans-serif;fill:#444}.dim{fill:#888}@media(prefers-color-scheme:dark){text{fill:#ccc}}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 8}" role="img">',
            "<title>Rounds of the groups of sixteen ranks with TP 2, PP 2, EP 2</title>",
            f"<style>{style}</style>",
            *drawn,
            "</svg>\n",
        ]
    )


def blocks() -> dict[str, dict[str, str]]:
    """The generated blocks of each page, by their names."""
    tables = {
        "save": TRANSITIONS,
        "load": LOAD_TRANSITIONS,
        "choice": CHOICE_TRANSITIONS,
        "task": TASK_TRANSITIONS,
    }
    return {"protocol.md": {name: diagram(table) for name, table in tables.items()}}


def rewritten(name: str) -> str:
    """A page with every generated block as it should be."""
    page = (PAGES / name).read_text(encoding="utf-8")
    for block, text in blocks()[name].items():
        pattern = re.compile(rf"(<!-- generated: {block} -->\n)(?:(?!<!--).)*(<!-- end -->)", re.DOTALL)
        page, count = pattern.subn(lambda found, text=text: found[1] + text + "\n" + found[2], page)
        if count != 1:
            raise ValueError(f"{name} has {count} blocks named {block!r}, not one.")
    return page


def main() -> None:
    for name in blocks():
        (PAGES / name).write_text(rewritten(name), encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
