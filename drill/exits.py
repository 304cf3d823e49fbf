"""ms-swift 8385 and 9188: how the processes of a job end, when one of them ends in its own way.

Every rank is an interpreter of its own, up to its exit code. Over gloo the ranks that wait in a collective hear
of a process that is gone, because its connection closes; over NCCL they would wait to the watchdog's timeout.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from drill.exit_program import ALONE, BEGINS, CLOSE_S, STALL_S, THREAD
from drill.ranks import one_line, ranks_in
from drill.results import Check, Row, Side
from tests.groups.session.launch import Forks

WORLD = 4
STOCK_S = 6.0
"""Timeout of collectives, on both sides."""
PATIENCE_S = 60.0
"""Seconds until the drill kills ranks that have not ended: longer than any timeout."""
NEVER_S = 25.0
"""The same for a stock rank that is expected to stay for ever."""
SLACK_S = 15.0
"""On the way out of a busy machine."""
MODULES = ("tests.integrations.megatron.preload",)
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
    never: bool = False
    """Does a stock rank stay for ever?"""
    bound: float = 2 * STALL_S
    """Seconds until all processes are gone, with Holdfast, beside `SLACK_S`."""


ENDINGS = (
    Ending(
        THREAD,
        "a normal end, but for a thread of rank 1",
        (1,),
        r"its program has ended; its main thread is at threading\.py:\d+ _shutdown",
        {1: 86},
        never=True,
        bound=CLOSE_S + STALL_S,
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
    Ending("kill", "SIGKILL of rank 2, others in a collective", (2,), r"its process has ended", {2: -9}),
    Ending(
        ALONE,
        "rank 0 alone in a collective, others at work",
        (1, 2, 3),
        r"jobs\.py:\d+ dawdle",
        {0: 1},
        bound=STOCK_S + STALL_S,
    ),
)


@dataclass(frozen=True)
class Run:
    """How the processes of one side ended."""

    codes: list[int]
    seconds: float
    """From the moment when the ranks began to end."""
    said: str
    stuck: tuple[int, ...]
    """Ranks that the drill had to kill."""

    @property
    def named(self) -> tuple[int, ...]:
        return blamed(self.said)

    def side(self) -> Side:
        lines = self.said.splitlines()
        told = [line for line in lines if f"holdfast: {ABSENT}" in line]
        told += [line for line in lines if re.match(r"rank \d+ ends", line)]
        last = (lines or ["nothing on the terminal"])[-1]
        end = f"exit codes {', '.join(map(str, self.codes))}"
        if self.stuck:
            end = f"rank {', '.join(map(str, self.stuck))} never ended and was killed by the drill"
        return Side(round(self.seconds, 1), one_line(f"{end}: {told[0] if told else last}"), self.named)


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


def go(forks: Forks, ending: Ending, how: str, folder: Path) -> Run:
    """The program, stock or with the one line, from its first process to the end of its last."""
    args = [how, str(STOCK_S), ending.name]
    patience = NEVER_S if ending.never and how == "stock" else PATIENCE_S
    ended = forks.run(args, list(range(WORLD)), WORLD, folder / f"{how} {ending.name}", patience)
    over = time.monotonic()
    lines = [line for line in ended.said.splitlines() if line.strip()]
    marks = [float(line.removeprefix(BEGINS)) for line in lines if line.startswith(BEGINS)]
    stuck = ended.seconds >= patience
    return Run(
        ended.codes,
        over - max(marks) if marks else ended.seconds,
        "\n".join(line for line in lines if not line.startswith(BEGINS)),
        tuple(
            rank for rank, code in enumerate(ended.codes) if stuck and code == -9 != ending.codes.get(rank)
        ),
    )


def row(ending: Ending, stock: Run, ours: Run) -> Row:
    checks = [
        Check("stock: no rank says who it was", not set(ending.culprits) & set(stock.named)),
        Check("with install() all processes end by themselves", not ours.stuck),
        Check(
            f"within {ending.bound + SLACK_S:g} s",
            ours.seconds < ending.bound + SLACK_S,
        ),
        Check(
            f"rank {', '.join(map(str, ending.culprits))} is named, and nobody else",
            ours.named == ending.culprits,
        ),
        Check("with how or where it was", re.search(ending.where, ours.said) is not None),
        Check(
            "and its exit code is kept",
            all(ours.codes[rank] == code for rank, code in ending.codes.items()) and 0 not in ours.codes,
        ),
    ]
    if ending.never:
        checks.append(Check("stock: the rank never ends", stock.stuck == ending.culprits))
    return Row(REPORT, ending.scenario, stock.side(), ours.side(), tuple(checks))


def run() -> list[Row]:
    with (
        TemporaryDirectory(prefix="holdfast-drill-") as top,
        Forks("drill.exit_program", MODULES) as forks,
    ):
        return [
            row(ending, go(forks, ending, "stock", Path(top)), go(forks, ending, "install", Path(top)))
            for ending in ENDINGS
        ]
