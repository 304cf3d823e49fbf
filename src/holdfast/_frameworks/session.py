"""`session`: process groups and run folders under one `with`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from holdfast._core.layout.grid import Grid
from holdfast._core.protocol.job import Job
from holdfast._core.run.checkpoints import Checkpoints
from holdfast._groups.session import session as groups


class Session(groups.GroupSession):
    """See `session`."""

    def checkpoints(self, run: str | os.PathLike[str], **how: Any) -> Checkpoints:
        """Return a `holdfast.Checkpoints` that the session closes at its end."""
        made = Checkpoints(run, **{"job": self.job, **how})
        self.closed_first.append(made.close)
        return made


def session(
    grid: Grid | None = None,
    *,
    backend: str | None = None,
    grace: float = 10.0,
    after_end: float | None = None,
    warm: bool = True,
    operations: Sequence[str] | None = None,
    memory_budget: int | None = None,
    job: Job | None = None,
) -> Session:
    """Open, warm up, watch and close process groups around a `with` block, on all ranks.

        with holdfast.session(holdfast.Grid(16, tp=2, pp=2, ep=2)) as s:
            checkpoints = s.checkpoints("run/", keep=3)
            train(s.groups["tp"], s.groups["edp"])

    grid: the layout, whose groups are `s.groups`; default: the grid of the job; None: no groups are made.
    grace: seconds that processes have to end after a failure becomes known. Then a process that is stuck in a
        call exits with code 86. If anything else blocks the end of the session, the process is ended by force
        after 2 * grace + 5 seconds.
    after_end: seconds that a process may stay idle (no CPU time, input or output) after the end of its main
        thread. Then it exits with code 87. None: never. In both cases its stacks, and the threads that keep
        it alive, are written after the job's `report_after`. A program that goes on after the session is not
        affected.
    job: its `timeout` (600 s by default) applies separately to start, opening, warm-up and closing of groups,
        and to collectives of the groups. `s.checkpoints()` uses the same job.
    warm: whether to warm up all groups that torch knows.
    operations, memory_budget: see `warm_up`.

    If torch.distributed is not initialised, the session initialises it from torchrun's environment, with an
    error that names missing ranks, and destroys it at the end.

    If the body raises on one rank, that rank raises its exception, and all others raise `RankFailed`, which
    quotes it, also if they wait in a collective. If a rank dies, all others raise `RankFailed` too.
    """
    return Session(
        grid,
        backend=backend,
        grace=grace,
        after_end=after_end,
        warm=warm,
        operations=operations,
        memory_budget=memory_budget,
        job=job,
    )
