"""What a diagnosis says of the programs of the two tables, by the recordings of their roll calls.

    python -m tests.watch.programs.judging ARCHIVE

prints a line for each recording of an archive: the program, who and why is right, and what was said. What is right of a
sick program stands in its docstring, and was written before the rules.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import NamedTuple

from holdfast._watch.diagnose import diagnose
from holdfast._watch.evidence import Evidence, Frame
from holdfast._watch.verdict import Diagnosis, listed
from tests.watch.programs.runner import programs, recorded, unpacked

WHYS = {
    "error": {"died", "ended"},  # of a process that is gone, the exit code may not be known
    "ended": {"ended"},
    "mismatch": {"mismatch"},
    "cycle": {"cycle"},
    "host": {"unreachable"},
    "stopped": {"stopped"},
    "unproven": set[str](),
}
"""What may be said of each cause of a docstring. To say none is never wrong."""


class Judged(NamedTuple):
    """A program, and what was said of it."""

    name: str
    kind: str
    who: tuple[int, ...]
    """Who is right: of a sick program those to go to, or nobody."""
    why: str
    found: Diagnosis
    grouped: tuple[int, ...]
    """Whom the grouping of stacks alone names."""

    @property
    def said_who(self) -> tuple[int, ...]:
        return (self.found.who.ranks or ()) if self.found.who is not None else ()

    @property
    def said_why(self) -> str:
        return self.found.why.kind if self.found.why is not None else ""

    @property
    def is_who_right(self) -> bool:
        return self.said_who == self.who

    @property
    def is_why_wrong(self) -> bool:
        return bool(self.said_why) and self.said_why not in WHYS[self.why]

    def __str__(self) -> str:
        cells = (self.name, _of(self.who), _of(self.said_who), self.why, self.said_why or "-")
        words = ("who" if not self.is_who_right else "") + (" WHY" if self.is_why_wrong else "")
        return f"| {' | '.join(cells)} | {words.strip()} |"


def _of(ranks: tuple[int, ...]) -> str:
    return listed(ranks) if ranks else "nobody"


def label(script: Path) -> tuple[tuple[int, ...], str]:
    """Return who and why is right of a sick program."""
    text = ast.get_docstring(ast.parse(script.read_text())) or ""
    facts = dict(re.findall(r"^(who|why): *(.*?)\.?$", text, re.MULTILINE))
    who = () if facts["who"].startswith("none") else tuple(map(int, re.findall(r"\d+", facts["who"])))
    return who, facts["why"].split()[0].strip(".,;")


def fewest(evidence: Evidence) -> tuple[int, ...]:
    """Name the ranks whose main thread is where the fewest are, as a script of 30 lines does."""
    groups: dict[tuple[Frame, ...], list[int]] = {}
    for rank, stack in evidence.shown().items():
        groups.setdefault(stack.calls, []).append(rank)
    sizes = sorted(map(len, groups.values()))
    alone = len(sizes) > 1 and sizes[0] < sizes[1]
    return tuple(min(groups.values(), key=len)) if alone else ()


def judged(archive: Path) -> list[Judged]:
    """Judge all recordings of an archive."""
    found, texts = [], unpacked(archive)
    for kind in ("healthy", "sick"):
        for script in programs(kind):
            if script.stem in texts:
                who, why = label(script) if kind == "sick" else ((), "unproven")
                evidence = recorded(texts[script.stem])
                said = diagnose(evidence)
                found.append(Judged(script.stem, kind, who, why, said, fewest(evidence)))
    return found


def main() -> None:
    every = judged(Path(sys.argv[1]))
    for kind in ("healthy", "sick"):
        some = [one for one in every if one.kind == kind]
        for one in some:
            print(one)
            if "-v" in sys.argv and (one.is_why_wrong or (kind == "sick" and not one.is_who_right)):
                print("    " + one.found.says.replace("\n", "\n    "))
        if kind == "sick":
            print(f"{sum(one.is_who_right for one in some)} of {len(some)} who right")
            print(f"{sum(one.grouped == one.who for one in some)} by the grouping of stacks")
        print(f"{sum(one.is_why_wrong for one in some)} of {len(some)} why wrong")


if __name__ == "__main__":
    main()
