"""What Holdfast does with each argument of torch DCP's writers, readers, planners and stagers.

An argument is honoured, or moot (it tunes DCP's implementation, and does not affect the checkpoint), or only
torch DCP supports it: then `understand` raises `OnlyTorch`, and the call goes to torch DCP. `TAKES` has the
decisions; a test compares them with the constructors of the installed torch. Calls with an undecided
attribute of a newer torch go to torch DCP unless it has its default value. So do calls with an object of
another class, or with replaced methods: each rank plans alone, so code that needs the plans of all ranks
can't run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from enum import Enum
from importlib import import_module
from typing import Any, NamedTuple

from holdfast._core.format.names import INDEX, MARKER
from holdfast._core.store.base import Store
from holdfast._core.store.local import open_store
from holdfast._core.store.schemes import takes
from holdfast._models.views.hugging_face import weights_file
from holdfast.errors import BadInput

_DCP = "torch.distributed.checkpoint"


class OnlyTorch(BadInput):
    """Only torch DCP supports an argument of this call."""


class ArgumentRules(NamedTuple):
    """The decisions on a class's arguments."""

    honoured: tuple[str, ...] = ()
    moot: Mapping[str, str] = {}
    """Arguments without effect, with the reason why any value is satisfied."""
    torchs: Mapping[str, str] = {}
    """Arguments that go to torch DCP unless they have their default, with the reason."""
    kept_as: Mapping[str, str] = {}
    """The attribute with an argument's value, if it has another name."""
    made: tuple[str, ...] = ()
    """Attributes that are not set by an argument."""


_COPY = "a copy is made in any case, and its memory is used again"
_FLAT = "names are always the paths of values, joined by dots"
_WRITER = ArgumentRules(
    honoured=("path", "overwrite", "thread_count"),
    moot={
        "sync_files": "files are always synced",
        "per_thread_copy_ahead": "it bounds DCP's own copy from a GPU",
        "cache_staged_state_dict": _COPY,
    },
    torchs={
        "single_file_per_rank": "a rank writes one file",
        "_extensions": "data files are neither compressed nor encrypted",
        "serialization_format": "a checkpoint has one format",
    },
    kept_as={"_extensions": "transforms"},
    made=("save_id", "rank", "use_collectives", "state_dict_cache"),
)
_READER = ArgumentRules(
    honoured=("path",),
    torchs={"_extension_registry": "compressed and encrypted files are not read"},
    kept_as={"_extension_registry": "transforms"},
    made=("load_id", "rank", "use_collectives", "storage_data"),
)
_SAVE_PLANNER = ArgumentRules(
    moot={
        "dedup_replicated_tensors": "it has no effect in DCP either",
        "dedup_save_to_lowest_rank": "a replica is written once in any case",
        "enable_plan_caching": "there is no plan of all ranks",
    },
    torchs={"flatten_state_dict": _FLAT, "flatten_sharded_tensors": _FLAT},
    kept_as={"enable_plan_caching": "_enable_plan_caching"},
    made=("mappings",),
)
_LOAD_PLANNER = ArgumentRules(
    honoured=("allow_partial_load",),
    torchs={"flatten_state_dict": _FLAT, "flatten_sharded_tensors": _FLAT},
    made=("original_state_dict", "mappings"),
)
_WRITERS = {f"{_DCP}.filesystem.FileSystemWriter": _WRITER}
_SAVE_PLANNERS = {f"{_DCP}.default_planner.DefaultSavePlanner": _SAVE_PLANNER}
_STAGERS = {
    f"{_DCP}.staging.DefaultStager": ArgumentRules(moot={"config": _COPY}),
    f"{_DCP}.staging.BlockingAsyncStager": ArgumentRules(
        moot={"cache_staged_state_dict": _COPY, "type_check": _COPY}
    ),
}
TAKES: Mapping[str, Mapping[str, Mapping[str, ArgumentRules]]] = {
    "save": {"storage_writer": _WRITERS, "planner": _SAVE_PLANNERS},
    "async_save": {"storage_writer": _WRITERS, "planner": _SAVE_PLANNERS, "async_stager": _STAGERS},
    "load": {
        "storage_reader": {
            f"{_DCP}.filesystem.FileSystemReader": _READER,
            f"{_DCP}.hf_storage.HuggingFaceStorageReader": ArgumentRules(
                honoured=("path",),
                moot={"thread_count": "Options(writer_threads=) says it"},
                made=(*_READER.made, "transforms"),
            ),
        },
        "planner": {f"{_DCP}.default_planner.DefaultLoadPlanner": _LOAD_PLANNER},
    },
}
"""Rules by call, argument and class. A call with an object of an unlisted class goes to torch DCP."""
_ROLES = {
    "storage_writer": "storage.StorageWriter",
    "storage_reader": "storage.StorageReader",
    "async_stager": "staging.AsyncStager",
}
"""The required base class of each argument; that of a planner depends on the call."""
_URL = re.compile(r"(?!file:)([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


class Understood(NamedTuple):
    """The settings derived from the objects given to a DCP call."""

    folder: str | os.PathLike[str]
    overwrite: bool = True
    threads: int = 1
    partial: bool = False
    """May requested names be missing?"""
    save_id: str = MARKER
    """The ID of the save for the `.metadata`."""


def understand(call: str, checkpoint_id: str | os.PathLike[str] | None, **given: object) -> Understood:
    """Derive the settings from the arguments of `save`, `load` or `async_save`.

    Raises OnlyTorch for arguments that only torch DCP supports, BadInput for invalid ones.
    """
    for name, value in given.items():
        if value is not None:
            _check_role(call, name, value)
    storage, planner = given.get("storage_writer", given.get("storage_reader")), given.get("planner")
    folder = checkpoint_id if checkpoint_id is not None else getattr(storage, "path", None)
    if folder is None and not storage:
        raise BadInput(f"The call of holdfast.dcp.{call} names no folder.", hint="Give it as checkpoint_id=.")
    for name, value in given.items():
        if value is not None:
            _check(call, name, value, checkpoint_id)
    assert folder is not None  # the known writers and readers have a path
    if isinstance(folder, str) and (url := _URL.match(folder)) and not takes(url[1]):
        raise OnlyTorch(
            f"holdfast.dcp.{call} has no store for {url[1]}:// places.",
            hint="For s3://, gs:// and az://: pip install 'torch-holdfast[object]'.",
        )
    if type(storage).__name__ == "HuggingFaceStorageReader" and not _is_read(open_store(folder)):
        raise OnlyTorch(f"{os.fspath(folder)} is neither a checkpoint of Holdfast nor a published model.")
    return Understood(
        folder,
        overwrite=bool(getattr(storage, "overwrite", True)),
        threads=getattr(storage, "thread_count", 1),
        partial=getattr(planner, "allow_partial_load", False),
        save_id=getattr(storage, "save_id", MARKER),
    )


def _is_read(store: Store) -> bool:
    """Return whether a folder has a Holdfast checkpoint, or the weight files of a published model."""
    return store.stat(INDEX) is not None or weights_file(store) is not None


def _check_role(call: str, name: str, value: object) -> None:
    """Raise BadInput if an object has the wrong type for its argument, which torch DCP does not check."""
    role = _ROLES.get(name) or ("planner.LoadPlanner" if call == "load" else "planner.SavePlanner")
    module, _, last = role.partition(".")
    if not isinstance(value, getattr(import_module(f"{_DCP}.{module}"), last)):
        raise BadInput(
            f"holdfast.dcp.{call} takes no {name}= ({type(value).__name__}): it is no {last}.",
            hint=f"Give checkpoint_id={os.fspath(value)!r}."
            if isinstance(value, str | os.PathLike)
            else f"Leave {name} out.",
        )


def _check(call: str, name: str, value: Any, checkpoint_id: object) -> None:
    """Raise OnlyTorch if an argument requests something that Holdfast does not support."""
    theirs = type(value)
    kind = TAKES[call][name].get(f"{theirs.__module__}.{theirs.__qualname__}")
    if kind is None:
        path = getattr(value, "path", None)
        there = f" and give checkpoint_id={os.fspath(path)!r}" if isinstance(path, str | os.PathLike) else ""
        raise OnlyTorch(
            f"holdfast.dcp.{call} takes no {name}= ({theirs.__name__}): Holdfast plans, writes and reads by "
            f"itself.",
            hint=f"Leave {name} out{there if checkpoint_id is None else ''}.",
        )
    if name == "async_stager":
        return  # it only copies the state, so its attributes don't matter
    arguments = {attribute: argument for argument, attribute in kind.kept_as.items()}
    # A default object of the same class, for comparison.
    plain = vars(theirs(value.path) if "path" in kind.honoured else theirs())
    for attribute, found in vars(value).items():
        argument = arguments.get(attribute, attribute)
        if argument in (*kind.honoured, *kind.moot, *kind.made):
            continue
        replaced = callable(getattr(theirs, attribute, None))
        if replaced or (attribute in plain and not _same(found, plain[attribute])):
            why = kind.torchs.get(argument, "it is not known here")
            raise OnlyTorch(
                f"holdfast.dcp.{call} can't honour {argument} of the {theirs.__name__}: {why}.",
                hint=f"Leave {argument} out, or call torch.distributed.checkpoint.{call}.",
            )


def _same(one: object, other: object) -> bool:
    """Compare two attributes; torch's helper objects are compared by their own attributes."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if type(one) is not type(other):
        return False
    if type(one).__module__.startswith(_DCP) and not isinstance(one, type | Enum):
        mine, theirs = vars(one), vars(other)
        return mine.keys() == theirs.keys() and all(_same(mine[name], theirs[name]) for name in mine)
    return bool(one == other)
