"""The museum: public hangs as fixtures, and the score of a diagnosis by how much evidence it is given.

An exhibit is one text file: what is right, and sections of evidence. `posted` sections are machine output of the
thread, `composed` ones are written by us from its facts, in the form of the tool that would have written them.
The right answers were written before the rules.

    python -m tests.museum.museum

prints what is said of each.
"""

from __future__ import annotations

import json
import pickle
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from holdfast._watch.diagnose import diagnose
from holdfast._watch.read import read_all
from holdfast._watch.verdict import Diagnosis, listed
from tests.watch.faults import peer_says

FOLDER = Path(__file__).parent / "exhibits"
LEVELS = {
    "log": ("log",),
    "counts": ("log", "counts", "states"),
    "stacks": ("log", "counts", "states", "stacks"),
}
"""What a reader of each level has."""


class Section(NamedTuple):
    kind: str
    is_posted: bool
    is_later: bool
    text: str


class Exhibit(NamedTuple):
    name: str
    url: str
    kind: str
    ranks: tuple[int, ...] | None
    decided_by: str
    replay: str
    """The fault of `tests.watch.faults` that hangs real ranks in this way; or `no, ` and why none does."""
    checked: str
    """What was seen of the thread itself when the exhibit was made, beside the notes on it."""
    sections: tuple[Section, ...]

    def has(self, level: str) -> bool:
        return any(section.kind in LEVELS[level] for section in self.sections)


def ranks_of(text: str) -> tuple[int, ...]:
    """`1-3,7` as ranks."""
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return tuple(found)


@cache
def exhibits() -> tuple[Exhibit, ...]:
    return tuple(_read(path) for path in sorted(FOLDER.glob("*.txt")))


def _read(path: Path) -> Exhibit:
    head, *parts = re.split(r"^=== ", path.read_text(), flags=re.MULTILINE)
    facts = dict(line.split(": ", 1) for line in head.strip().splitlines())
    ranks = {"unknown": None, "none": ()}.get(facts["ranks"], ...)
    sections = []
    for part in parts:
        title, _, text = part.partition("\n")
        words = title.split()
        sections.append(Section(words[0], words[-1] == "posted", "again" in words, text))
    return Exhibit(
        path.stem,
        facts["url"],
        facts["class"],
        ranks_of(facts["ranks"]) if ranks is ... else ranks,
        facts["decided by"],
        facts["replay"],
        facts["checked"],
        tuple(sections),
    )


def write(exhibit: Exhibit, level: str, folder: Path) -> None:
    """Write the evidence of a level as the files that a reporter would have."""
    folder.mkdir(parents=True, exist_ok=True)
    logs = "".join(section.text for section in exhibit.sections if section.kind == "log")
    if logs:
        (folder / "job.log").write_text(logs)
    for section in exhibit.sections:
        if section.kind not in LEVELS[level]:
            continue
        if section.kind == "counts":
            for rank, record in _records(section.text).items():
                # As torch writes them: a pickle for each rank, its number last.
                (folder / f"trace_{rank}").write_bytes(pickle.dumps(record, protocol=2))
        elif section.kind == "states":
            for line in section.text.splitlines():
                ranks, _, how = line.partition(" exited ")
                for rank in ranks_of(ranks):
                    ending = {"what": f"exit code {how}", "source": ["/proc", 0], "is_clean": how == "0"}
                    told = {"roll_call": {"rank": rank, "endings": [ending]}}
                    (folder / f"state-rank-{rank}.json").write_text(json.dumps(told))
        elif section.kind == "stacks":
            for ranks, lines in _stacks(section.text):
                for rank in ranks:
                    name = f"stacks-{'again-' * section.is_later}rank-{rank}.txt"
                    (folder / name).write_text(f'Process {1000 + rank}: python\n\nThread {1000 + rank} (idle): "MainThread"\n{lines}')  # fmt: skip


def _records(text: str) -> dict[int, dict[str, object]]:
    """The flight records that rows of `ranks group members #number operation in out state` stand for."""
    records: dict[int, dict[str, object]] = {}
    numbers: dict[str, str] = {}
    for line in text.splitlines():
        ranks, group, members, number, name, taken, given, state = line.split()
        guid = "0" if group == "default_pg" else numbers.setdefault(group, str(len(numbers) + 1))
        for rank in ranks_of(ranks):
            record = records.setdefault(
                rank, {"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": []}
            )
            record["pg_config"][guid] = {"name": guid, "desc": group, "ranks": str(list(ranks_of(members)))}  # type: ignore[index]
            record["entries"].append(  # type: ignore[attr-defined]
                {
                    "record_id": 0,
                    "pg_id": int(guid),
                    "process_group": (guid, group),
                    "collective_seq_id": int(number[1:]),
                    "p2p_seq_id": 0,
                    "profiling_name": f"nccl:{name}",
                    "input_sizes": [json.loads(taken)],
                    "output_sizes": [json.loads(given)],
                    "input_dtypes": ["Float"],
                    "output_dtypes": ["Float"],
                    "time_created_ns": int(number[1:]),
                    "state": state,
                    "retired": state == "completed",
                    "is_p2p": False,
                    "frames": [],
                }
            )
    return records


def _stacks(text: str) -> Iterator[tuple[tuple[int, ...], str]]:
    for part in re.split(r"^ranks ", text, flags=re.MULTILINE)[1:]:
        ranks, _, lines = part.partition("\n")
        yield ranks_of(ranks), lines


def diagnosed(exhibit: Exhibit, level: str, folder: Path) -> Diagnosis | None:
    """The diagnosis of what a level shows; None if it shows nothing."""
    if not exhibit.has(level):
        return None
    place = folder / exhibit.name / level
    write(exhibit, level, place)
    return diagnose(read_all([str(place)]))


WHYS = {"mismatch": "mismatch", "died": "died", "cycle": "cycle"}
"""Classes of which the evidence can be a proof. Of all others, no cause may be given, but an end."""


def judged(exhibit: Exhibit, found: Diagnosis | None) -> tuple[str, str]:
    """Return how `who` and `why` are: `right`, `silent` or `wrong`."""
    who = found.who if found is not None else None
    why = found.why.kind if found is not None and found.why is not None else ""
    ranks = None if who is None else who.ranks
    if exhibit.ranks is None:
        how = "right" if who is not None or exhibit.decided_by == "nothing" else "silent"
    else:
        how = "right" if ranks == exhibit.ranks else "silent" if ranks is None else "wrong"
    right = WHYS.get(exhibit.kind, "")
    if why == "ended" and any(section.kind == "states" for section in exhibit.sections):
        right = why  # the exhibit says of these ranks that they have ended
    return how, "right" if why == right else "silent" if not why else "wrong"


def scores(folder: Path) -> list[list[str]]:
    """Return the rows of the table in docs/diagnose.md: by level, who is right, silent and wrong, and why."""
    rows = []
    for level in LEVELS:
        some = [one for one in exhibits() if one.has(level)]
        results = [judged(one, diagnosed(one, level, folder)) for one in some]
        row = [level]
        for column in zip(*results, strict=True):
            row += [
                f"{column.count('right')} of {len(some)}",
                str(column.count("silent")),
                str(column.count("wrong")),
            ]
        rows.append(row)
    return rows


def peer_names(folder: Path) -> dict[Exhibit, tuple[int, ...]]:
    """Return the ranks that torch's analysis names, of each exhibit that has counts."""
    found = {}
    for exhibit in exhibits():
        if any(section.kind == "counts" for section in exhibit.sections):
            place = folder / "torchfrtrace" / exhibit.name
            write(exhibit, "counts", place)
            found[exhibit] = peer_says(place)[1] or ()
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for row in scores(Path(folder)):
            print("| " + " | ".join(row) + " |")
        for one in exhibits():
            found = diagnosed(one, "stacks", Path(folder))
            right = "-" if one.ranks is None else listed(one.ranks) if one.ranks else "nobody"
            print(f"{one.name}: {one.kind}, {right}: {judged(one, found)}")
            if found is not None:
                print("    " + found.says.replace("\n", "\n    "))


if __name__ == "__main__":
    main()
