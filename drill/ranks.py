"""Jobs of ranks, and what came of them: an answer, an error, or none.

`ask` runs a job in new processes and waits for the ranks that are to answer; `attempt` is what a job wraps the
call in that the scenario is about.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from drill.results import Side
from holdfast.errors import HoldfastError
from tests.frameworks.megatron.jobs import children_allowed
from tests.support.processes import ProcessWorld

GIVEN_UP = "no answer: still waiting when the drill gave up"
SAID = 420
"""Characters of a message that are kept."""


@dataclass(frozen=True)
class Answer:
    """What one rank got from the call."""

    rank: int
    seconds: float
    value: Any = None
    error: str = ""
    named: tuple[int, ...] = ()


def begin(rank: int, install: dict[str, Any] | None) -> None:
    """The first lines of a job: RANK as a launcher sets it, and the one line of Holdfast, or not."""
    os.environ["RANK"] = str(rank)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)  # what ranks print in the end is in their errors, too
    os.dup2(silence, 2)
    if install is not None:
        import holdfast

        holdfast.install(**install)


def attempt(rank: int, call: Callable[[], Any]) -> Answer:
    """Call it; what it raises is the answer."""
    begun = time.monotonic()
    try:
        with children_allowed():  # stock megatron-core writes in processes of its own
            value = call()
    except Exception as error:
        return Answer(
            rank, time.monotonic() - begun, None, f"{type(error).__name__}: {error}", _blamed(rank, error)
        )
    return Answer(rank, time.monotonic() - begun, value)


def _blamed(rank: int, error: Exception) -> tuple[int, ...]:
    if isinstance(error, HoldfastError):
        found = {info.rank for info in error.missing} or {error.rank}
        return tuple(sorted(who for who in found if who is not None))
    return ranks_in(str(error), rank)


def ranks_in(text: str, speaker: int | None) -> tuple[int, ...]:
    """The ranks that a text mentions, without the one that says it."""
    lists = re.findall(r"\branks? (\d+(?:(?:, | and )\d+)*)", text, re.IGNORECASE)
    found = {int(number) for one in lists for number in re.findall(r"\d+", one)}
    return tuple(sorted(who for who in found if who != speaker))


def shorten_timeouts(seconds: float) -> None:
    """Collectives of all groups of this process fail after so many seconds, not after their half hour."""
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def ask(
    size: int, job: Callable[..., Any], *args: Any, waited_for: Iterable[int], patience: float
) -> list[Answer]:
    """Run `job(rank, *args)` on `size` new ranks; the answers of those that are waited for, by rank.

    patience: seconds until a rank that has not answered counts as hanging; its processes are ended then.
    """
    wanted = sorted(waited_for)
    with ProcessWorld(size) as world:
        world.start(job, *args)
        found = {result.rank: result for result in world.collect_some(patience, wanted)}
    answers = []
    for rank in wanted:
        if rank not in found:
            answers.append(Answer(rank, patience, error=GIVEN_UP))
        elif found[rank].died is not None:
            answers.append(Answer(rank, found[rank].seconds, error=f"died with exit code {found[rank].died}"))
        else:
            answers.append(found[rank].get())
    return answers


def side_of(answers: list[Answer], done: str) -> Side:
    """The slowest rank's seconds, the first error (or `done` where there is none), and who is blamed by any."""
    errors = [answer.error for answer in answers if answer.error]
    named = sorted({who for answer in answers for who in answer.named})
    return Side(
        round(max(answer.seconds for answer in answers), 1),
        one_line(errors[0]) if errors else done,
        tuple(named),
    )


def one_line(text: str) -> str:
    """A message as a cell shows it."""
    flat = re.sub(r"/\S*holdfast-drill-\w+", "...", " ".join(text.split()))
    return flat if len(flat) <= SAID else flat[: SAID - 3].rstrip() + "..."
