"""A run folder: which steps are committed, which is the newest, which may go. No torch, no NumPy."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from holdfast.errors import BadInput
from holdfast.store.base import Store
from holdfast.store.local import open_store

INDEX = "index.safetensors"
_STEP = re.compile(r"(step-|iter_)(\d+)\Z")


def step_folder(step: int, megatron: bool = False) -> str:
    """The name of a step's folder; megatron: as Megatron-LM names it."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise BadInput(f"step must be a whole number from 0 on, not {step!r}.")
    return f"iter_{step:07d}" if megatron else f"step-{step:08d}"


def step_of(folder: str) -> int | None:
    """The step that a folder's name stands for, in either spelling."""
    found = _STEP.match(folder)
    if found is None or folder != step_folder(int(found[2]), found[1] == "iter_"):
        return None
    return int(found[2])


def step_folders(store: Store) -> dict[int, str]:
    """The folder of each step of a run, committed or not, ascending."""
    return dict(_all_folders(store))


def committed_steps(store: Store, marks: tuple[str, ...] = (INDEX,)) -> dict[int, str]:
    """The folder of each step that has an index (or another of `marks`), ascending; nothing else counts."""
    return {
        step: folder for step, folder in _all_folders(store) if not set(marks).isdisjoint(store.list(folder))
    }


def latest(run: str | os.PathLike[str]) -> str | None:
    """The folder of the newest committed step of a run, or None. Reads no data and needs no torch."""
    store = open_store(run)
    for _, folder in reversed(_all_folders(store)):
        if INDEX in store.list(folder):
            return store.child(folder).url
    return None


def _all_folders(store: Store) -> list[tuple[int, str]]:
    """(step, folder), ascending; a step may have two folders, in both spellings."""
    names = [name[:-1] for name in store.list() if name.endswith("/")]
    return sorted((step, name) for name in names if (step := step_of(name)) is not None)


def remove_step(store: Store, folder: str) -> None:
    """Delete a step: its index first, so that it stops being a checkpoint before it loses data."""
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


def surplus(steps: Iterable[int], keep: int | None) -> list[int]:
    """Committed steps beyond the newest `keep`, of ascending ones."""
    found = list(steps)
    return [] if keep is None else found[: max(len(found) - keep, 0)]
