"""Choose the checkpoint to resume from: the run's newest step or, if it has none, its start checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from holdfast._core.base.values import Json
from holdfast._core.format.local_copy import Ancestry
from holdfast._core.format.names import PARTIAL
from holdfast._core.protocol.call import Call
from holdfast._core.protocol.operation import agree
from holdfast._core.ready import ready
from holdfast._core.run.local_tier import LocalTier
from holdfast._core.store.absence import explain_fresh_start
from holdfast._core.store.base import Store
from holdfast._core.store.run_folder import newest_steps, refuse_other_checkpoints, step_of
from holdfast.errors import (
    BadInput,
    CorruptCheckpoint,
    HoldfastError,
    MissingTensors,
    NotCommitted,
    Replaced,
    StorageError,
)

log = logging.getLogger("holdfast")
ANOTHER_MAY_LOAD = (CorruptCheckpoint, MissingTensors, NotCommitted, Replaced, StorageError)
"""Errors of a load after which another copy, or another step, may load."""


class Found(NamedTuple):
    """A checkpoint to load."""

    step: int | None
    """None if its folder has no number."""
    store: Store
    is_own: bool
    """Whether it is a step of this run."""
    ancestry: Ancestry = Ancestry()
    """With local folders: what the next saves tell, if this is restored."""
    save: str = ""
    """Of a local copy: the save that it is of."""
    place: str = ""
    """Of a local copy: names it in messages between ranks, whose folders may have different paths."""
    is_part: bool = False
    """Of a local copy: whether other hosts have other parts."""


def agree_on_copy(tier: LocalTier, step: int | None, call: Call, rejected: tuple[int, ...]) -> Found:
    """Return the newest copy in local folders, if all ranks have it and it is not older than the newest
    durable step of the run; else no step, but the ancestry. Equal on all ranks, but for the folders.

    step: only this one. rejected: damaged steps of the run.
    """

    def choose(answers: dict[int, Json]) -> Json:
        copy, folder, ancestry = tier.choose(answers, step, rejected)
        told = msgspec.to_builtins(ancestry)
        return (
            [None, "", "", told, False]
            if copy is None
            else [copy.step, copy.save, folder, told, copy.is_part]
        )

    run = tier.run.url
    title = f"choice of the newest step in the local folders of {run}"
    place = f"{run}|local|{step}|{rejected}|{sorted(tier.rejected)}"
    number, save, folder, told, is_part = agree(title, place, choose, call, tier.tell())
    place = f"the local copies of {run}/{save}" if save else ""
    store = tier.store.child(folder) if folder else tier.store
    return Found(number, store, True, msgspec.convert(told, ready(Ancestry)), save, place, is_part)


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
            level, text = explain_fresh_start(run)
            log.log(level, "%s", text)
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


def why_passed_over(error: HoldfastError) -> str:
    """Return why the step before is loaded, now that the load of the newest one has raised this; "" if it is
    not."""
    if isinstance(error, CorruptCheckpoint):
        return "is damaged and"
    if isinstance(error, MissingTensors) and PARTIAL in error.details:
        return "was saved with include= or exclude=, lacks names of the state, and is"
    return ""


def all_passed_over(run: Store, rejected: Mapping[int, HoldfastError]) -> HoldfastError:
    """Return the error of a load for which no step is left.

    rejected: the error of each step, the newest first.
    """
    damaged = sorted(step for step, error in rejected.items() if isinstance(error, CorruptCheckpoint))
    if not damaged:
        return next(iter(rejected.values()))
    lacking = sorted(rejected.keys() - set(damaged))
    if not lacking:
        return CorruptCheckpoint(f"All committed steps in {run.url} are damaged: {damaged}.")
    return CorruptCheckpoint(
        f"No committed step in {run.url} can be restored. Damaged: {damaged}. Saved with include= or "
        f"exclude=, and without names of the state: {lacking}."
    )
