"""torch.distributed.checkpoint's functions with their signatures: `import holdfast.dcp as dcp` switches over.

Arguments that choose DCP's implementation (`use_collectives`, `async_checkpointer_type`) have no effect:
there are no collectives, and asynchronous saves always use a process. A plain `FileSystemWriter(path)` or
`FileSystemReader(path)` gives the folder, and a `DefaultLoadPlanner` says whether names may be missing.
Arguments with code of their own (another writer, reader or planner, a stager) are refused with one sentence.
Checkpoints that DCP wrote load as they are. A save also writes a `.metadata`, by which tools of DCP find the
checkpoint (`holdfast.integrations.dcp_metadata`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, NotRequired, TypedDict

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from holdfast.background.async_save import async_save_into
from holdfast.background.manager import LANE
from holdfast.background.pending import Pending
from holdfast.errors import BadInput
from holdfast.integrations.dcp_metadata import mark
from holdfast.integrations.foreign_errors import of_torch, raising
from holdfast.loading.job import load as _load
from holdfast.options import Options
from holdfast.protocol.call import Call, begin_call, one_folder
from holdfast.saving.job import SaveJob, SaveReport
from holdfast.saving.request import SaveRequest
from holdfast.state.flatten import flatten
from holdfast.state.live import StateDict
from holdfast.store.base import Store
from holdfast.store.local import open_store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["async_save", "load", "save"]


@raising(of_torch)
def save(
    state_dict: StateDict,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: object = None,
    planner: object = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    timeout: float = 1800.0,
    stall_timeout: float = 120.0,
    options: Options | None = None,
    participants: Iterable[int] | None = None,
    objects_may_differ: bool = False,
) -> SaveReport:
    """Save as `torch.distributed.checkpoint.save` does, by `holdfast.save`.

    As in DCP, later saves into the same folder may have other names.

    objects_may_differ: where ranks have different objects under one name, save the one of the lowest rank and
        warn (DCP does so without a warning); by default that is an error.
    """
    plain = plain_arguments("save", checkpoint_id, storage_writer, planner)
    store = open_store(one_folder(None, plain["checkpoint_id"]))
    call = begin_call(
        no_dist=no_dist,
        process_group=process_group,
        participants=participants,
        timeout=timeout,
        stall_timeout=stall_timeout,
    )
    return _reading(store, state_dict, call, options, objects_may_differ).run()


@raising(of_torch)
def load(
    state_dict: StateDict,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: object = None,
    planner: object = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    timeout: float = 1800.0,
    stall_timeout: float = 120.0,
    options: Options | None = None,
    participants: Iterable[int] | None = None,
) -> None:
    """Load a checkpoint of Holdfast or DCP in place, as `torch.distributed.checkpoint.load` does."""
    plain = plain_arguments("load", checkpoint_id, storage_reader, planner)
    _load(
        state_dict,
        checkpoint_id=plain["checkpoint_id"],
        participants=participants,
        process_group=process_group,
        no_dist=no_dist,
        strict=not plain.get("partial", False),
        timeout=timeout,
        stall_timeout=stall_timeout,
        options=options,
    )


@raising(of_torch)
def async_save(
    state_dict: StateDict,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: object = None,
    planner: object = None,
    process_group: ProcessGroup | None = None,
    async_checkpointer_type: object = None,
    async_stager: object = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    timeout: float = 1800.0,
    stall_timeout: float = 120.0,
    options: Options | None = None,
    host_memory_budget: int | None = None,
    participants: Iterable[int] | None = None,
    objects_may_differ: bool = False,
) -> Pending:
    """Save as `torch.distributed.checkpoint.async_save` does, by `holdfast.async_save`.

    The returned object has the methods of the future that DCP returns (`result`, `done`, `exception`,
    `add_done_callback`), and the fields of its AsyncSaveResponse (`staging_completion`, `upload_completion`).
    """
    plain = plain_arguments("async_save", checkpoint_id, storage_writer, planner, async_stager=async_stager)
    store = open_store(one_folder(None, plain["checkpoint_id"]))

    def make() -> SaveJob:
        # Begun once the previous save has ended, so that the deadline does not include that wait. The lane
        # separates its messages from those of the calls that training makes meanwhile.
        call = begin_call(
            no_dist=no_dist,
            process_group=process_group,
            participants=participants,
            timeout=timeout,
            stall_timeout=stall_timeout,
        )
        return _reading(store, state_dict, call.lane(LANE), options, objects_may_differ)

    return async_save_into(store, make, None, host_memory_budget, 0)


def _reading(
    store: Store,
    state_dict: StateDict,
    call: Call,
    options: Options | None,
    objects_may_differ: bool,
) -> SaveJob:
    """Make a save that reads the state now, and writes the marker for tools of DCP after its commit."""
    request = SaveRequest(
        store=store,
        collect=lambda rank: flatten(state_dict, rank),
        call=call,
        options=options or Options(),
        objects_may_differ=objects_may_differ,
        # After the commit, because tools of DCP take a folder with `.metadata` for a checkpoint.
        after=lambda: mark(store),
    )
    return SaveJob(request)


class PlainArguments(TypedDict):
    """The arguments of DCP that have an effect here."""

    checkpoint_id: str | os.PathLike[str] | None
    partial: NotRequired[bool]
    """May requested names be missing? Only for a load."""


def plain_arguments(
    call: str,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage: object = None,
    planner: object = None,
    **others: object,
) -> PlainArguments:
    """Return the folder, and whether requested names may be missing.

    call: `save`, `load` or `async_save`. storage: a storage writer or reader.

    Raises BadInput for objects with code of their own: every rank plans alone, so code that needs the plans
    of all ranks can't run.
    """
    plain: PlainArguments = {"checkpoint_id": checkpoint_id}
    kind = "storage_reader" if call == "load" else "storage_writer"
    # By exact type, because a subclass does something else.
    if type(storage) in (FileSystemWriter, FileSystemReader):
        folder = os.fspath(storage.path)  # type: ignore[attr-defined]
        if checkpoint_id is None:
            plain["checkpoint_id"] = folder
        storage = None
    if type(planner) is DefaultLoadPlanner and call == "load":
        plain["partial"] = bool(getattr(planner, "allow_partial_load", False))
        planner = None
    elif type(planner) is DefaultSavePlanner and call != "load":
        planner = None
    # What was understood is None by now. To ignore the rest would drop what the caller relies on.
    for name, value in {kind: storage, "planner": planner, **others}.items():
        if value is None:
            continue
        path = getattr(value, "path", None)
        there = (
            f"checkpoint_id={os.fspath(path)!r}" if isinstance(path, str | os.PathLike) else "checkpoint_id="
        )
        raise BadInput(
            f"holdfast.dcp.{call} takes no {name}= ({type(value).__name__}): Holdfast plans, writes and "
            f"reads by itself.",
            hint=f"Leave {name} out"
            + (f" and give {there}." if checkpoint_id is None and name.startswith("storage") else "."),
        )
    return plain
