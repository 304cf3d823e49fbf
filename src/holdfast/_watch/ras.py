"""Reads the output of `ncclras`, as text (also `-v`) or as JSON: which ranks of a communicator have launched
fewer operations than others, and which processes do not answer.

Its ranks are those in the communicator, not in the job, and a healthy job shows the same for a moment. So it
is shown to the user, but no rule uses it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from holdfast._core.base.values import Message
from holdfast._watch.collector import Collector
from holdfast._watch.evidence import SourceLine
from holdfast._watch.verdict import listed
from holdfast.errors import BadInput

_TITLE = re.compile(r"^(?:#\d+-\d+ \((\w+)\) )?(INCOMPLETE|DEAD|ERROR|MISMATCH|TIMEOUT)$")
LINES = 64
"""Maximum number of lines of one problem."""


def is_ras(head: str) -> bool:
    """Return whether a text looks like the output of ncclras."""
    return re.search(r"^Job summary\r?\n=+", head, re.MULTILINE) is not None


def read_ras(lines: Iterable[str], to: Collector, name: str) -> None:
    """Read the text form."""
    title = kind = ""
    began, told = 0, list[str]()

    def end() -> None:
        if told:
            to.remark("ras", f"NCCL RAS, {title}: {'; '.join(told)}", SourceLine(name, began), kind)
        told.clear()

    for number, line in enumerate(lines, 1):
        if (found := _TITLE.match(line)) is not None:
            end()
            title, kind, began = f"{found[1] or 'the job'} {found[2]}", found[2], number
        elif kind and line.startswith("  "):
            if "ranks have different" in line:  # the next operation
                end()
                began = number
            if len(told) < LINES:
                told.append(line.strip())
        elif line.strip():
            end()
            kind = ""
    end()


def read_ras_json(value: Message, to: Collector, name: str) -> None:
    """Read the JSON form."""
    source = SourceLine(name)
    try:
        for one in value["communicators"]:
            title = str(one["hash"]).removeprefix("0x")
            missing = {int(rank["rank"]) for rank in one["missing_ranks"]}
            if missing:
                text = f"NCCL RAS, {title} INCOMPLETE: no answer of {listed(missing)} of {int(one['size'])}"
                to.remark("ras", text, source, "INCOMPLETE")
            counts: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
            for rank in one["ranks"]:
                for operation, count in rank["collective_counts"].items():
                    counts[operation][int(count)].add(int(rank["rank"]))
            for operation, by_count in counts.items():
                if len(by_count) > 1:
                    said = "; ".join(f"{listed(ranks)}: {n}" for n, ranks in sorted(by_count.items())[:LINES])
                    text = f"NCCL RAS, {title} MISMATCH: {operation} operations launched: {said}"
                    to.remark("ras", text, source, "MISMATCH")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadInput(f"{name} is no output of ncclras: {type(error).__name__}: {error}.") from None
