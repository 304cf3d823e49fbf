"""Replacements for `torch.distributed.checkpoint` inside a framework's own save and load.

They act only inside guarded functions; elsewhere a program that calls DCP gets DCP. A plain
`FileSystemWriter(path)` or `FileSystemReader(path)` gives only a folder, so Holdfast writes and reads there.
Calls with other code (another writer or planner) go to DCP, with a warning.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

from holdfast.background.pending import Pending
from holdfast.errors import BadInput
from holdfast.format.torch_objects import Allowed, allowing
from holdfast.integrations.guard import is_guarded, note_committed
from holdfast.integrations.patching import Make, Replacement
from holdfast.integrations.reporting import warn_once
from holdfast.integrations.settings import Settings
from holdfast.state.live import StateDict

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

_SAVER = "torch.distributed.checkpoint.state_dict_saver"
_LOADER = "torch.distributed.checkpoint.state_dict_loader"


def replacements(settings: Settings) -> Iterator[Replacement]:
    """Yield replacements of DCP's public functions, with the deprecated ones that frameworks still call."""
    for module, name, ours in (
        (_SAVER, "save", "save"),
        (_SAVER, "async_save", "async_save"),
        (_SAVER, "save_state_dict", "save"),
        (_LOADER, "load", "load"),
        (_LOADER, "load_state_dict", "load"),
    ):
        yield Replacement(module, name, "checkpoints", _inside(ours, settings), optional=True)


def _inside(name: str, settings: Settings) -> Make:
    """Make a function that calls ours when guarded, and DCP's elsewhere and for what only DCP can do."""

    def make(original: Callable[..., object]) -> Callable[..., object]:
        @wraps(original)
        def call(state_dict: StateDict, *args: Any, **named: Any) -> object:
            if not is_guarded():
                return original(state_dict, *args, **named)
            # Imported here: `install` must not import torch DCP into programs that don't use it.
            from holdfast.integrations import dcp

            # The deprecated functions also take other arguments by position.
            given = dict(zip(_POSITIONAL[original.__name__], args, strict=False)) | named
            storage = given.get("storage_writer", given.get("storage_reader"))
            stager = given.get("async_stager")
            try:
                plain = dcp.plain_arguments(
                    name,
                    given.get("checkpoint_id"),
                    storage,
                    given.get("planner"),
                    async_stager=None if _is_plain(stager) else stager,
                )
            except BadInput as error:
                # The framework gives this argument, and its user can't remove it (docs/decisions/0019).
                warn_once(f"torch.distributed.checkpoint.{original.__name__} is not replaced: {error}")
                return original(state_dict, *args, **named)
            how: dict[str, Any] = {
                "checkpoint_id": plain["checkpoint_id"],
                "process_group": given.get("process_group"),
                "no_dist": given.get("no_dist", False),
                "timeout": settings.timeout,
                "stall_timeout": settings.stall_timeout,
            }
            if how["process_group"] is None:
                # A process group already says who takes part; giving both is an error.
                how["participants"] = settings.ranks()
            if name == "load":
                with allowing(_enumerations()):
                    return dcp.load(state_dict, planner=given.get("planner"), **how)
            how["objects_may_differ"] = True  # frameworks save random states of all ranks under one name
            with allowing(_enumerations()):
                if name == "async_save":
                    made = dcp.async_save(state_dict, host_memory_budget=settings.host_memory_budget, **how)
                    # DCP returns a Future, or with a stager an AsyncSaveResponse; torchtitan asserts which.
                    return made.upload_completion if stager is None else _response(made)
                report = dcp.save(state_dict, **how)
            # Not for an asynchronous save, which is committed only at its end.
            note_committed(report.path)
            return report

        return call

    return make


def _is_plain(stager: object) -> bool:
    """Return whether a stager is torch's default: it only copies the state, as Holdfast does anyway."""
    kind = type(stager)
    return (kind.__module__, kind.__name__) == ("torch.distributed.checkpoint.staging", "DefaultStager")


def _response(pending: Pending) -> AsyncSaveResponse:
    """Make what DCP returns to a caller with a stager (torchtitan checks its type)."""
    from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

    return AsyncSaveResponse(pending.staging_completion, pending.upload_completion)  # type: ignore[arg-type]


def _enumerations() -> tuple[Allowed, ...]:
    """Return megatron-core's enumerations, which its `args` contain; none if it is not imported."""
    if "megatron.core" not in sys.modules:
        return ()
    from holdfast.integrations.megatron import mcore

    return mcore.safe_types()


_POSITIONAL = {
    # DCP accepts the writer or reader by position, with a warning (`_api_bc_check`).
    "save": ("storage_writer",),
    "async_save": (),
    "load": ("storage_reader",),
    "save_state_dict": ("storage_writer", "process_group", "coordinator_rank", "no_dist", "planner"),
    "load_state_dict": ("storage_reader", "process_group", "coordinator_rank", "no_dist", "planner"),
}
"""Arguments that DCP takes by position after the state."""
