"""Replacements for `torch.distributed.checkpoint` inside a framework's own save and load.

They are active only inside guarded functions; elsewhere a program that calls DCP gets DCP. Calls that only
torch DCP supports (another writer or planner, an unsupported argument) go to DCP, with a warning. Everywhere,
DCP's own reader also reads Holdfast folders, where it would fail otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from types import ModuleType
from typing import Any

from holdfast._core.base.reporting import warn_once
from holdfast._core.format.torch_objects import allowing
from holdfast._core.state.live import State, StateDict
from holdfast._frameworks.guard import is_guarded, note_committed
from holdfast._frameworks.megatron import enumerations
from holdfast._frameworks.patching import MakeReplacement, Replacement
from holdfast._frameworks.settings import Settings
from holdfast._frameworks.torch_dcp import arguments
from holdfast.errors import BadInput

_SAVER = "torch.distributed.checkpoint.state_dict_saver"
_READER = "torch.distributed.checkpoint.filesystem"
_LOADER = "torch.distributed.checkpoint.state_dict_loader"
_RANKS = ("checkpoint_id", "process_group", "no_dist")
_MOOT = ("use_collectives", "async_checkpointer_type", "coordinator_rank")
"""Arguments that select DCP's implementation (collectives and writer process), and have no effect: Holdfast
has no collectives, and always writes in a separate process."""


def replacements(settings: Settings) -> Iterator[Replacement]:
    """Yield replacements of DCP's public functions, with the deprecated one that frameworks still call, and
    of its reader's methods."""
    for module, name, ours in (
        (_SAVER, "save", "save"),
        (_SAVER, "async_save", "async_save"),
        (_LOADER, "load", "load"),
        (_LOADER, "load_state_dict", "load"),
    ):
        make, takes = _inside(ours, settings), _taken(ours)
        yield Replacement(module, name, "checkpoints", make, optional=True, takes=takes)
    for name in ("read_metadata", "read_data"):
        yield Replacement(_READER, f"FileSystemReader.{name}", "checkpoints", _reading(name), optional=True)


def _taken(name: str) -> Callable[[], tuple[str, ...]]:
    """Return a function that returns the arguments that the replacement handles."""

    def takes() -> tuple[str, ...]:
        return ("state_dict", *_RANKS, *_MOOT, *arguments.TAKES[name])

    return takes


def _reading(name: str) -> MakeReplacement:
    """Make a method of the reader that also reads Holdfast folders."""

    def make(original: Callable[..., object]) -> Callable[..., object]:
        @wraps(original)
        def read(*args: object, **named: object) -> object:
            _, reader = _with_torch_dcp()
            return reader.READS[name](original)(*args, **named)

        return read

    return make


def _inside(name: str, settings: Settings) -> MakeReplacement:
    """Make a function that calls Holdfast's inside a guard, and DCP's elsewhere or if only DCP supports the
    call."""

    def make(original: Callable[..., object]) -> Callable[..., object]:
        @wraps(original)
        def call(state_dict: StateDict, *args: object, **named: Any) -> object:
            # Only deprecated arguments are positional, and frameworks don't pass them.
            if args or not is_guarded():
                return original(state_dict, *args, **named)
            calls, _ = _with_torch_dcp()
            objects = {key: named[key] for key in arguments.TAKES[name] if key in named}
            try:
                if unknown := sorted(named.keys() - set(_taken(name)())):
                    raise BadInput(f"{', '.join(unknown)} is not known to this version of Holdfast.")
                if "://" in str(named.get("checkpoint_id")):
                    raise BadInput("A framework's own files go to paths, so its URLs are left to torch DCP.")
                arguments.understand(name, named.get("checkpoint_id"), **objects)
            except BadInput as error:
                # The framework gives this argument, and its user can't remove it (docs/decisions/0016).
                warn_once(f"torch.distributed.checkpoint.{original.__name__} is not replaced: {error}")
                return original(state_dict, **named)
            how: State = {
                **objects,
                "checkpoint_id": named.get("checkpoint_id"),
                "process_group": named.get("process_group"),
                "no_dist": named.get("no_dist", False),
                # A process group already says who takes part; giving both is an error.
                "job": settings.of_a_call(anyone=named.get("process_group") is not None),
            }
            with allowing(enumerations.if_imported()):
                if name == "load":
                    return calls.load(state_dict, **how)
                how["objects_may_differ"] = True  # frameworks save random states of all ranks under one name
                if name == "async_save":
                    return calls.async_save(state_dict, **how)
                saved = calls.save(state_dict, **how)
            # Not for an asynchronous save, which is committed only at its end.
            note_committed(saved.path)
            return saved

        return call

    return make


def _with_torch_dcp() -> tuple[ModuleType, ModuleType]:
    # Imported in a call: `install` must not import torch DCP into programs that do not use it, and torch DCP
    # is only partially imported when `make` runs.
    from holdfast._frameworks.torch_dcp import calls, reader

    return calls, reader
