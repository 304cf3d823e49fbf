"""Explain why a place has no checkpoint, with a hint. No torch, no NumPy."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from typing import TypeAlias

from holdfast._core.base.values import amount
from holdfast._core.format.names import (
    DATA,
    INDEX,
    LEFT,
    LOCAL,
    METADATA,
    OWNER,
    PINS,
    REMOVED,
    SLICE,
    TRAINER_STATE,
    is_fetched,
    is_named_by_save,
)
from holdfast._core.store.base import FOLDERS, Store, capabilities, parent
from holdfast._core.store.local import open_store
from holdfast._core.store.run_folder import (
    LOOKED_AT,
    MarkEntries,
    all_step_folders,
    is_only_marked,
    newest_steps,
    other_checkpoints,
    removed_steps,
    step_of,
)
from holdfast.errors import HoldfastError, NotCommitted

Reason: TypeAlias = tuple[str, str]
"""Why a place has no checkpoint, as a clause, and a hint."""
_SHOWN = 5
_COMPARED = 1000
"""Maximum number of names to compare with a possibly mistyped name."""


def nothing_there(store: Store) -> NotCommitted:
    """Return the error for a folder without a checkpoint, which explains what the folder contains."""
    why, hint = _why(store)
    return NotCommitted(f"{store.url} holds no committed checkpoint: {why}.", hint=hint)


def explain_fresh_start(store: Store) -> tuple[int, str]:
    """Describe the contents of a run folder without checkpoints, for a run that starts from scratch. Return
    the level of the log, too: data without an index is a warning."""
    fresh = f"No step is restored from {store.url}, so the run starts fresh"
    if store.stat() is None:
        return logging.INFO, f"{fresh}: the folder does not exist{_near(store)}."
    names = [name for name in store.list() if name not in (OWNER, LEFT, f"{REMOVED}/")]
    removed = removed_steps(store)

    def described(name: str) -> str:
        folder = name.rstrip("/")
        if step_of(folder) is None:
            return name
        return f"{name} (removed)" if folder in removed else f"{name} (never committed)"

    shown = ", ".join(map(described, names[:_SHOWN]))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    text = f"{fresh}: the folder " + (f"holds {shown}{more}." if names else "is empty.")
    folder = _uncommitted_data(store, removed)
    if not folder:
        return logging.INFO, text
    return logging.WARNING, (
        f"{text} {folder} holds data without an index: its save was never committed, or the index is gone. "
        f"`holdfast reindex {store.url}/{folder}` may recover it, until a later save removes it."
    )


def _uncommitted_data(store: Store, removed: set[str]) -> str:
    """Return the newest step folder with data of a save, of a run without a committed step; "" if there is
    none, or none that this user may list."""
    for _, folder in sorted(all_step_folders(store), reverse=True)[:_SHOWN]:
        with suppress(HoldfastError):
            if folder not in removed and any(map(is_named_by_save, store.list(f"{folder}/{DATA}"))):
                return folder
    return ""


def _near(store: Store) -> str:
    """Name the folder with the most similar name: the path may be mistyped."""
    if not capabilities(store).reopens:
        return ""
    parent, name = os.path.split(store.url)
    near: list[str] = []
    with suppress(HoldfastError):  # a folder that this user may not list
        folders = [other[:-1] for other in open_store(parent).list() if other.endswith("/")]
        near = get_close_matches(name, folders[:_COMPARED], 1)
    return f", but {parent} has {near[0]!r}" if near else ""


def _why(store: Store) -> Reason:
    entry = store.stat()
    if entry is None:
        return _missing(store)
    if entry.kind not in FOLDERS:
        return "it is a file, not a folder", "Give the folder that the index lies in."
    names = store.list()
    if names == [f"{PINS}/"]:
        return _missing(store)  # the pin is the one of the reader that gets this answer
    for explain in _EXPLAINED:
        reason = explain(store, names)
        if reason is not None:
            return reason
    return f"there is no {INDEX}", "`holdfast latest RUN` names the newest committed step of a run."


def _fetched(store: Store, names: list[str]) -> Reason | None:
    if SLICE not in names:
        return None
    return (
        "it is what `holdfast fetch` took of one, or of a published model, for some ranks",
        "holdfast.load and holdfast.megatron.load read it on these ranks; else give the whole folder.",
    )


def _marked(store: Store, names: list[str]) -> Reason | None:
    if METADATA not in names or not is_only_marked(store):
        return None
    return (
        f"it holds only the marker that Holdfast leaves beside one, a {METADATA} without an {INDEX}",
        "The index was removed or not copied; `holdfast reindex` makes one from the data files, if they are "
        "there.",
    )


def _foreign(store: Store, names: list[str]) -> Reason | None:
    if METADATA not in names:
        return None
    return (
        "it is one of torch DCP or megatron-core, not of Holdfast",
        f"holdfast.load, holdfast.open and `holdfast inspect` read it as it is; `holdfast import torch_dist "
        f"{store.url} OUT` makes one of Holdfast.",
    )


def _run(store: Store, names: list[str]) -> Reason | None:
    if not all_step_folders(store):
        return None
    for folder in _newest(store, 1).values():
        return (
            f"it is a run folder, whose newest committed step is {store.url}/{folder}",
            "Give a step's folder; holdfast.Checkpoints loads the newest step of a run.",
        )
    return "it is a run folder, and none of its steps is committed", "`holdfast inspect` shows what there is."


def _local(store: Store, names: list[str]) -> Reason | None:
    """Explain the local folder of a run."""
    if LOCAL not in names:
        return None
    copies = sorted(name[:-1] for name in names if name.startswith("step-") and name.endswith("/"))
    if not copies:
        return "it is the local folder of a run, and has no copy of a step", "Give the run's own folder."
    return (
        f"it is the local folder of a run, with this host's copies of steps: {', '.join(copies[:_SHOWN])}",
        f"`holdfast inspect {store.url}/{copies[-1]}` shows one; Checkpoints(local=).restore takes them.",
    )


def _unfinished(store: Store, names: list[str]) -> Reason | None:
    if f"{DATA}/" not in names:
        return None
    # Others have folders of this name, too: the names of its files say whether they are Holdfast's.
    files = [name for name in store.list(DATA) if ".safetensors" in name]
    if any(map(is_fetched, files)):
        return (
            "a fetch was begun here, and has not ended",
            "Run the same `holdfast fetch` again: it goes on with what is there.",
        )
    if not any(map(is_named_by_save, files)):
        return None
    if capabilities(store).references:
        run, folder = parent(store), store.url.rpartition("/")[2]
        if folder in removed_steps(run):
            return (
                "it was removed from its run (keep=, delete, `holdfast prune`); its data is there as long as "
                "later steps refer to it, or somebody reads it",
                "`holdfast latest RUN` names the newest committed step of a run.",
            )
    return (
        f"there are data files of Holdfast, but no {INDEX}, so a save failed, or is still under way",
        "`holdfast latest RUN` names the newest committed step of a run; `holdfast reindex` may recover this "
        "one.",
    )


def _complete_model(store: Store, names: list[str]) -> Reason | None:
    return _model(store, names) if any(map(_PUBLISHED[0][0], names)) else None


def _empty(store: Store, names: list[str]) -> Reason | None:
    return None if names else ("it is an empty folder", _is_right(store))


def _zero(store: Store, names: list[str]) -> Reason | None:
    """Explain a DeepSpeed checkpoint, or a folder whose file `latest` refers to one."""
    if not any(name.endswith(_ZERO) for name in names):
        steps = [name for name in names if name.startswith(_ZERO_STEP) and name.endswith("/")]
        if not steps or not {"latest", "latest_universal"} & set(names):
            return None
    return (
        "it is one of DeepSpeed (ZeRO), not of Holdfast",
        f"`holdfast import zero {store.url} OUT` makes one of Holdfast, which all calls and commands read.",
    )


_ZERO, _ZERO_STEP = ("_model_states.pt", "_optim_states.pt"), "global_step"
"""Suffixes of the files of a ZeRO checkpoint, and the prefix of its folder in DeepSpeed."""


def _inside(store: Store, names: list[str]) -> Reason | None:
    """Explain a folder without a checkpoint of its own that contains checkpoint folders or run folders."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for folder, mark in other_checkpoints(store, names):
        kinds.setdefault(_MARKED.get(mark, _FOREIGN), []).append(folder)
    known = {folder for folders in kinds.values() for folder in folders}
    others = [name[:-1] for name in names if name.endswith("/") and name[:-1] not in known]
    with suppress(HoldfastError):  # a folder that this user may not list
        if runs := [name for name in others[:LOOKED_AT] if all_step_folders(store.child(name))]:
            kinds["a run folder", "run folders"] = runs
        look = MarkEntries(store, others[:LOOKED_AT])
        if local := [name for name in others[:LOOKED_AT] if look(name, LOCAL) is not None]:
            kinds["the local folder of a run", "local folders of runs"] = local
    if not kinds:
        return None
    shown = []
    for kind, folders in kinds.items():
        folders.sort()
        more = f", and {len(folders) - _SHOWN} more" if len(folders) > _SHOWN else ""
        shown.append(f"{', '.join(map(repr, folders[:_SHOWN]))}{more} ({kind[len(folders) > 1]})")
    first = next(iter(kinds.values()))[0]
    return f"it is none itself, but holds {' and '.join(shown)}", f"Give such a folder: {store.url}/{first}."


_MARKED = {
    INDEX: ("a checkpoint of Holdfast", "checkpoints of Holdfast"),
    TRAINER_STATE: ("a checkpoint of a trainer", "checkpoints of a trainer"),
}
_FOREIGN = "a checkpoint in another format", "checkpoints in other formats"


def explain_model(store: Store) -> Reason | None:
    """Describe a folder written by Hugging Face's libraries, as a clause, with a hint; None for others."""
    names = store.list()
    return _model(store, names) or _in_cache(store, names)


def _in_cache(store: Store, names: list[str]) -> Reason | None:
    """Explain the folder of a model in the cache of the hub, which has a folder for each revision."""
    if not {"blobs/", "snapshots/"} <= {*names}:
        return None
    found = [name[:-1] for name in store.list("snapshots") if name.endswith("/")]
    hint = f"Give the folder of a revision: {store.url}/snapshots/{found[0] if found else '...'}."
    return (
        f"it is a repository in the cache of the Hugging Face hub, with {amount(len(found), 'revision')}",
        hint,
    )


def _model(store: Store, names: list[str]) -> Reason | None:
    found = (row for row in _PUBLISHED if any(map(row[0], names)))
    return next(((why, hint.format(store.url)) for _, why, hint in found), None)


_PUBLISHED: tuple[tuple[Callable[[str], bool], str, str], ...] = (
    (
        lambda name: name in ("model.safetensors", "model.safetensors.index.json"),
        "it is a published model, not a checkpoint of Holdfast",
        "holdfast.load, holdfast.open and `holdfast inspect` read it as it is; `holdfast import hf {} OUT` "
        "makes a checkpoint of it.",
    ),
    (
        lambda name: name.startswith(("adapter_model.", "adapter_config.")),
        "it is an adapter of PEFT's (LoRA) without the model that it belongs to",
        "Give its model, with this folder as the adapter: holdfast.huggingface.merged(MODEL, {0}), or "
        "`holdfast import hf MODEL OUT --adapter {0}`.",
    ),
    (
        lambda name: name.startswith("pytorch_model") and name.endswith((".bin", ".bin.index.json")),
        "it is a published model whose weights are pickled (pytorch_model.bin), and loading a pickle may run "
        "code that it holds",
        "Have transformers write it as safetensors: from_pretrained, then save_pretrained to a new folder.",
    ),
    (
        lambda name: name.endswith(".gguf"),
        "its weights are in GGUF, the format of llama.cpp, which Holdfast does not read",
        "Give the folder of the model in safetensors that it was made of.",
    ),
    (
        lambda name: name.endswith(".safetensors"),
        "it holds safetensors files, and neither model.safetensors nor model.safetensors.index.json, which "
        "says which of them are the weights",
        "Copy the index, too, or name the file as transformers_weights in config.json.",
    ),
    (
        lambda name: name == "config.json",
        "it holds a config.json, which may be the configuration of a published model without its weights",
        "Copy model.safetensors, or all files that model.safetensors.index.json names and the index.",
    ),
)
"""Kinds of files that Hugging Face's libraries write; the first kind with a present file applies."""


def _missing(store: Store) -> Reason:
    """Explain a missing folder: it may be a step of a run that has other steps."""
    parent, name = os.path.split(store.url)
    if capabilities(store).reopens and step_of(name) is not None:
        steps = _newest(open_store(parent), _SHOWN)
        if steps:
            return (
                f"it does not exist; the newest committed steps in {parent} are {', '.join(map(str, steps))}",
                "It was never committed, or it was removed as an old step (keep=, `holdfast prune`).",
            )
    return "it does not exist", _is_right(store)


def _is_right(store: Store) -> str:
    return "Is the URL right?" if "://" in store.url else "Is the path right, and mounted on this host?"


def _newest(store: Store, most: int) -> dict[int, str]:
    """Return the newest committed steps that this process can read."""
    try:
        # Steps that can't be read are left out: this explains an error, and must not replace it.
        return newest_steps(store, most)
    except HoldfastError:
        return {}


_EXPLAINED = (
    _fetched,
    _marked,
    _foreign,
    _run,
    _local,
    _unfinished,
    _complete_model,
    _zero,
    _in_cache,
    _inside,
    _model,
    _empty,
)
"""What a folder may hold instead; the first reason that applies is given."""
