"""ms-swift 8385 and 9188: how the processes of a job end, when one of them ends in its own way.

Under torchrun, as the reporters ran: it names the first process that it finds ended, and ends the others. Every rank
is an interpreter of its own, up to its exit code. Over gloo the ranks that wait in a collective hear of a process
that is gone, because its connection closes; over NCCL they would wait to the watchdog's timeout.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from drill.exit_program import AFTER_END_S, ALONE, BEGINS, THREAD
from drill.ranks import one_line, ranks_in
from drill.results import Check, Row, Side
from drill.torchrun import Ended, Launcher, launcher

WORLD = 4
STOCK_S = 6.0
"""Timeout of collectives, on both sides."""
PATIENCE_S = 60.0
"""Seconds until the drill kills ranks that have not ended: longer than any timeout."""
NEVER_S = 25.0
"""The same for a stock rank that is expected to stay for ever."""
GRACE_S = 10.0
"""Of `install`, which is its own: for the others at the end, and for all after a failure."""
SLACK_S = 15.0
"""On the way out of a busy machine."""
REPORT = "ms-swift 8385, 9188"
ABSENT = "not in that collective: "


@dataclass(frozen=True)
class Ending:
    """One way in which a rank leaves."""

    name: str
    """As the program calls it."""
    scenario: str
    culprits: tuple[int, ...]
    where: str
    """What says how or where they were, as a regular expression."""
    codes: dict[int, int]
    """Exit codes that ranks must have, with Holdfast."""
    speak: bool = True
    """Do the other ranks come to say who it was, before torchrun ends them?"""
    never: bool = False
    """Does a stock rank stay for ever?"""
    bound: float = 0.0
    """Seconds until all processes are gone, with Holdfast, beside `SLACK_S`."""
    blamed: int | None = None
    """The rank that torchrun names in place of the culprit, on both sides."""


ENDINGS = (
    Ending(
        THREAD,
        "a normal end, but for a thread of rank 1",
        (1,),
        r"threads that are no daemons: 'uploader'",
        {1: 87},
        never=True,
        bound=GRACE_S + AFTER_END_S,
    ),
    Ending(
        "raise on 2",
        "an exception on rank 2, others in a collective",
        (2,),
        r"jobs\.py:\d+ end_with raised ValueError",
        {2: 1},
    ),
    Ending(
        "bare exit",
        "`raise SystemExit(3)` on rank 1, others in a collective",
        (1,),
        r"exited with code 3 \(SystemExit\) at .*jobs\.py:\d+ leave",
        {1: 3},
    ),
    Ending(
        "kill",
        "SIGKILL of rank 2, others in a collective",
        (2,),
        r"exitcode +: -9 .*SIGKILL",  # by torchrun
        {2: -9},
        speak=False,
    ),
    Ending(
        ALONE,
        "rank 0 alone in a collective, others at work",
        (1, 2, 3),
        r"jobs\.py:\d+ dawdle",
        {0: 1},
        bound=STOCK_S,
        blamed=0,
    ),
)


class Run(NamedTuple):
    """How the processes of one side ended."""

    ended: Ended
    seconds: float
    """From the moment when the ranks began to end."""
    said: str

    @property
    def named(self) -> tuple[int, ...]:
        return blamed(self.said)

    def side(self) -> Side:
        lines = self.said.splitlines()
        told = [line for line in lines if f"holdfast: {ABSENT}" in line]
        told += [line for line in lines if re.match(r"rank \d+ ends", line)]
        told += [line for line in lines if re.match(r"\[rank\d+\]: \w+(Error|Exception)\b", line)]
        end = f"exit codes {', '.join(str(self.ended.codes[rank]) for rank in range(WORLD))}"
        if self.ended.stuck:
            end = f"rank {', '.join(map(str, self.ended.stuck))} never ended and was killed by the drill"
        message = one_line(f"{end}: {told[0] if told else 'nothing on the terminal'}")
        return Side(round(self.seconds, 1), message, self.named, self.ended.blamed)


def blamed(terminal: str) -> tuple[int, ...]:
    """The ranks that other ranks name on a terminal: a rank's own traceback names nobody else."""
    found: set[int] = set()
    for line in terminal.splitlines():
        speaker = re.match(r"\[?rank ?(\d+)\]?", line)
        text = line[speaker.end() :] if speaker else line
        _, absent, others = text.rpartition(ABSENT)  # before it: who waited for them
        text = absent + others
        to_blame = re.findall(r"(?:because (?:of )?|collective: |; |for |: )(rank \d+)", text)
        found |= set(ranks_in(", ".join(to_blame), int(speaker[1]) if speaker else None))
    return tuple(sorted(found))


def go(start: Launcher, ending: Ending, how: str, folder: Path) -> Run:
    """The program, stock or with the one line, from its first process to the end of its last."""
    patience = NEVER_S if ending.never and how == "stock" else PATIENCE_S
    folder.mkdir()
    ended = start.run("drill.exit_program", [how, str(STOCK_S), ending.name], WORLD, folder, patience)
    over = time.monotonic()
    lines = [line for line in ended.said.splitlines() if line.strip()]
    marks = [float(line.removeprefix(BEGINS)) for line in lines if line.startswith(BEGINS)]
    said = "\n".join(line for line in lines if not line.startswith(BEGINS))
    return Run(ended, over - max(marks) if marks else ended.seconds, said)


def row(ending: Ending, stock: Run, ours: Run) -> Row:
    first = ending.culprits[0] if ending.blamed is None else ending.blamed
    named = ", ".join(map(str, ending.culprits))
    checks = [
        Check("stock: no rank says who it was", not set(ending.culprits) & set(stock.named)),
        Check("with install() all processes end by themselves", not ours.ended.stuck),
        Check(f"within {ending.bound + SLACK_S:g} s", ours.seconds < ending.bound + SLACK_S),
        Check(f"torchrun names rank {first}", ours.ended.blamed == first),
        Check("with how or where it was, on the terminal", re.search(ending.where, ours.said) is not None),
        Check(
            "and its exit code is kept",
            ours.ended.code == 1
            and all(ours.ended.codes[rank] == code for rank, code in ending.codes.items()),
        ),
    ]
    if ending.speak:
        checks.append(Check(f"its ranks name rank {named}, and nobody else", ours.named == ending.culprits))
    if ending.never:
        checks.append(Check("stock: the rank never ends", stock.ended.stuck == ending.culprits))
    else:
        checks.append(Check(f"stock: torchrun names rank {first}, too", stock.ended.blamed == first))
    return Row(REPORT, ending.scenario, stock.side(), ours.side(), tuple(checks))


def run() -> list[Row]:
    with TemporaryDirectory(prefix="holdfast-drill-") as top, launcher() as start:
        return [row(ending, *both(start, ending, Path(top, ending.name))) for ending in ENDINGS]


def both(start: Launcher, ending: Ending, folder: Path) -> Sequence[Run]:
    """Stock, and with the one line, at the same time."""
    folder.mkdir()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda how: go(start, ending, how, folder / how), ("stock", "install")))
