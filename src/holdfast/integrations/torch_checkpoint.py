"""`torch.distributed.checkpoint` inside a framework's own save and load: by Holdfast.

Only inside functions that are guarded; elsewhere a program that calls DCP gets DCP. A plain
`FileSystemWriter(path)` or `FileSystemReader(path)` names a folder and nothing else, so Holdfast writes and
reads there. What brings code of its own (another writer, a planner that plans) goes to DCP, and one sentence
says so.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

from holdfast.background.pending import Pending
from holdfast.errors import BadInput
from holdfast.format.torch_objects import Allowed, allowing
from holdfast.integrations.guard import is_guarded, note_committed
from holdfast.integrations.patching import Make, Replacement
from holdfast.integrations.settings import Settings
from holdfast.state.live import StateDict

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

log = logging.getLogger("holdfast")
_SAVER = "torch.distributed.checkpoint.state_dict_saver"
_LOADER = "torch.distributed.checkpoint.state_dict_loader"
_said: set[str] = set()


def replacements(settings: Settings) -> Iterator[Replacement]:
    """DCP's public functions, the deprecated ones that frameworks still call among them."""
    for module, name, ours in (
        (_SAVER, "save", "save"),
        (_SAVER, "async_save", "async_save"),
        (_SAVER, "save_state_dict", "save"),
        (_LOADER, "load", "load"),
        (_LOADER, "load_state_dict", "load"),
    ):
        yield Replacement(module, name, "checkpoints", _inside(ours, settings), optional=True)


def _inside(name: str, settings: Settings) -> Make:
    """Ours in a guarded function, DCP's elsewhere and for what only it can do."""

    def make(original: Callable[..., object]) -> Callable[..., object]:
        @wraps(original)
        def call(state_dict: StateDict, *args: Any, **named: Any) -> object:
            if not is_guarded():
                return original(state_dict, *args, **named)
            # Here: `install` must not import torch DCP into programs that don't use it.
            from holdfast.integrations import dcp

            # The deprecated functions take more than the state by position.
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
                # The framework wrote this argument, and its user can't take it out (docs/decisions/0019).
                _say_once(f"torch.distributed.checkpoint.{original.__name__} is not replaced: {error}")
                return original(state_dict, *args, **named)
            how: dict[str, Any] = {
                "checkpoint_id": plain["checkpoint_id"],
                "process_group": given.get("process_group"),
                "no_dist": given.get("no_dist", False),
                "timeout": settings.timeout,
                "stall_timeout": settings.stall_timeout,
            }
            if how["process_group"] is None:
                # A group says itself who takes part, and both together are refused.
                how["participants"] = settings.ranks()
            if name == "load":
                with allowing(_enumerations()):
                    return dcp.load(state_dict, planner=given.get("planner"), **how)
            how["objects_may_differ"] = True  # frameworks put each rank's generators under one name
            with allowing(_enumerations()):
                if name == "async_save":
                    made = dcp.async_save(state_dict, host_memory_budget=settings.host_memory_budget, **how)
                    # DCP returns a Future, or its response to those with a stager; torchtitan asserts which.
                    return made.upload_completion if stager is None else _response(made)
                report = dcp.save(state_dict, **how)
            # Not of a save in the background: whether that is committed only its end tells.
            note_committed(report.path)
            return report

        return call

    return make


def _is_plain(stager: object) -> bool:
    """Does it only say how torch copies a state, which Holdfast does in its own way?"""
    kind = type(stager)
    return (kind.__module__, kind.__name__) == ("torch.distributed.checkpoint.staging", "DefaultStager")


def _response(pending: Pending) -> AsyncSaveResponse:
    """What DCP returns to those who give it a stager (torchtitan looks at its type)."""
    from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

    return AsyncSaveResponse(pending.staging_completion, pending.upload_completion)  # type: ignore[arg-type]


def _enumerations() -> tuple[Allowed, ...]:
    """Those of megatron-core, which its `args` hold, where it is loaded."""
    if "megatron.core" not in sys.modules:
        return ()
    from holdfast.integrations.megatron import mcore

    return mcore.safe_types()


_POSITIONAL = {
    # These take the writer or reader by position with a warning only (`_api_bc_check`).
    "save": ("storage_writer",),
    "async_save": (),
    "load": ("storage_reader",),
    "save_state_dict": ("storage_writer", "process_group", "coordinator_rank", "no_dist", "planner"),
    "load_state_dict": ("storage_reader", "process_group", "coordinator_rank", "no_dist", "planner"),
}
"""What DCP takes by position after the state."""


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        log.warning("%s", text)
