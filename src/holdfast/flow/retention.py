"""A run folder: which steps are committed, which is the newest, which may go. No torch, no NumPy."""

from __future__ import annotations

import os
import re

from holdfast.errors import BadInput
from holdfast.store.base import Store
from holdfast.store.local import open_store

INDEX = "index.safetensors"
_STEP = re.compile(r"step-(\d{8,})/\Z")


def step_folder(step: int) -> str:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise BadInput(f"step must be a whole number from 0 on, not {step!r}.")
    return f"step-{step:08d}"


def committed_steps(store: Store) -> list[int]:
    """Steps whose folder has an index, ascending; nothing else counts."""
    return [step for step in all_steps(store) if INDEX in store.list(step_folder(step))]


def all_steps(store: Store) -> list[int]:
    """Steps that have a folder, committed or not, ascending."""
    found = [(name, int(match[1])) for name in store.list() if (match := _STEP.match(name))]
    return sorted(step for name, step in found if name == step_folder(step) + "/")


def latest(run: str | os.PathLike[str]) -> str | None:
    """The folder of the newest committed step of a run, or None. Reads no data and needs no torch."""
    store = open_store(run)
    for step in reversed(all_steps(store)):
        if INDEX in store.list(step_folder(step)):
            return store.child(step_folder(step)).url
    return None


def remove_step(store: Store, step: int) -> None:
    """Delete a step: its index first, so that it stops being a checkpoint before it loses data."""
    folder = step_folder(step)
    if INDEX in store.list(folder):
        store.delete(f"{folder}/{INDEX}")
    for name in store.list(f"{folder}/data"):
        store.delete(f"{folder}/data/{name}")
    store.delete(f"{folder}/data")
    for name in store.list(folder):
        if not name.endswith("/"):
            store.delete(f"{folder}/{name}")
    if not store.list(folder):
        store.delete(folder)


def surplus(steps: list[int], keep: int | None) -> list[int]:
    """Committed steps beyond the newest `keep`, ascending."""
    return [] if keep is None else steps[: max(len(steps) - keep, 0)]
