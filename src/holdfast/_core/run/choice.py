"""Choose the checkpoint to resume from: the run's newest step or, if it has none, its start checkpoint."""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

from holdfast._core.base.values import Json
from holdfast._core.protocol.call import Call
from holdfast._core.protocol.operation import agree
from holdfast._core.store.absence import explain_fresh_start
from holdfast._core.store.base import Store
from holdfast._core.store.run_folder import newest_steps, refuse_other_checkpoints, step_of
from holdfast.errors import BadInput

log = logging.getLogger("holdfast")


class Found(NamedTuple):
    """A checkpoint to load."""

    step: int | None
    """None if its folder has no number."""
    store: Store
    is_own: bool
    """Whether it is a step of this run."""


def agree_on_newest(run: Store, source: Store | None, call: Call, rejected: tuple[int, ...]) -> Found | None:
    """Return the newest committed step of a run, as seen by the lowest participant, except those in
    `rejected`. If the run has no step, return its start checkpoint, or None. Equal on all ranks.

    source: the start checkpoint, or another run.
    """

    def newest(answers: dict[int, Json]) -> tuple[int | None, str, bool] | None:
        for step, folder in newest_steps(run, 1, but=rejected).items():
            return step, folder, True
        if rejected:
            return None
        refuse_other_checkpoints(run)
        mine = answers[call.rank]
        other = next((rank for rank, theirs in sorted(answers.items()) if theirs != mine), None)
        if other is not None:
            raise BadInput(
                f"{run.url} has no step, and ranks start it from different checkpoints: rank {call.rank} "
                f"from {mine}, rank {other} from {answers[other]}.",
                hint="Give the same start_from on all ranks.",
            )
        if source is None:
            log.info("%s", explain_fresh_start(run))
            return None
        for step, folder in newest_steps(source, 1).items():
            return step, folder, False
        return step_of(os.path.basename(source.url)), "", False

    # The key includes the rejected steps: ranks with different rejected steps must not join one call.
    title = f"choice of the newest step in {run.url}"
    mine = None if source is None else source.url
    found: list[Json] | None = agree(title, f"{run.url}|{rejected}", newest, call, mine)
    if found is None:
        return None
    step, folder, is_own = found
    store = run if is_own or source is None else source
    return Found(step, store.child(folder) if folder else store, bool(is_own))
