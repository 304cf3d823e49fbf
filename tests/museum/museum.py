"""The museum: public hangs as fixtures, and the score of a diagnosis by how much evidence it is given.

An exhibit is one text file: what is right, and sections of evidence. `posted` sections are machine output of the
thread, `composed` ones are written by us from its facts, in the form of the tool that would have written them.
The right answers were written before the rules, and every third exhibit was kept aside until the rules were
written.

    python -m tests.museum.museum

prints the scores, and what torch's own analysis of flight records (`torchfrtrace`) names, given the same counts.
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


class Score(NamedTuple):
    right: int
    of: int
    """Exhibits that this much evidence decides."""
    partly: int
    """The class is right, and the ranks are left open."""
    silent: int
    wrong: int


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


def kept_aside() -> tuple[Exhibit, ...]:
    """Every third one."""
    return exhibits()[2::3]


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


def judged(exhibit: Exhibit, found: Diagnosis | None) -> str:
    """`right`, `partly`, `silent` or `wrong`."""
    if found is None or found.verdict is None:
        return "right" if exhibit.decided_by == "nothing" else "silent"
    verdict = found.verdict
    if verdict.kind != exhibit.kind or (verdict.ranks is not None and verdict.ranks != exhibit.ranks):
        return "wrong"
    return "right" if verdict.ranks == exhibit.ranks else "partly"


def score(some: tuple[Exhibit, ...], level: str, folder: Path) -> Score:
    """Score a level over exhibits."""
    order = [*LEVELS, "nothing"]
    results = {exhibit: judged(exhibit, diagnosed(exhibit, level, folder)) for exhibit in some}
    decided = [one for one in some if order.index(one.decided_by) <= order.index(level)]
    counted = [result for exhibit, result in results.items() if exhibit in decided]
    return Score(
        counted.count("right"),
        len(decided),
        counted.count("partly"),
        counted.count("silent"),
        list(results.values()).count("wrong"),
    )


def scores(folder: Path) -> list[list[str]]:
    """Return the rows of the table in docs/diagnose.md."""
    open_ones = tuple(one for one in exhibits() if one not in kept_aside())
    parts = {"all": exhibits(), "rules were written for": open_ones, "kept aside": kept_aside()}
    return [
        [title, level, f"{one.right} of {one.of}", str(one.partly), str(one.silent), str(one.wrong)]
        for title, some in parts.items()
        for level in LEVELS
        for one in [score(some, level, folder / title)]
    ]


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
        for row in (
            ["exhibits", "evidence", "right", "class only", "silent", "wrong"],
            *scores(Path(folder)),
        ):
            print("| " + " | ".join(row) + " |")
        for exhibit, named in peer_names(Path(folder)).items():
            right = (
                "not known" if exhibit.ranks is None else listed(exhibit.ranks) if exhibit.ranks else "none"
            )
            print(f"torchfrtrace: {exhibit.name}: {listed(named) if named else 'none'} (right: {right})")


if __name__ == "__main__":
    main()
