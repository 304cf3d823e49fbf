"""torch.distributed.checkpoint's calls, with their signatures: `import holdfast.dcp as dcp` is the switch.

Arguments that say how DCP does it (`use_collectives`, `async_checkpointer_type`) have no effect: there are no
collectives, and the background is always a process. A plain `FileSystemWriter(path)` or
`FileSystemReader(path)` stands for its folder, a `DefaultLoadPlanner` for whether names may be missing.
Arguments that bring code of their own (another writer or reader, a planner that plans, a stager) can't be
honoured, and are refused with one sentence. Checkpoints that DCP wrote load as they are. Beside what is saved
stands a `.metadata` by which tools of DCP find it (`holdfast.integrations.dcp_metadata`).
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
    """`torch.distributed.checkpoint.save`, by `holdfast.save`. Names may come and go between saves of one
    folder, as in DCP.

    objects_may_differ: where ranks have different objects under one name, save that of the lowest rank and
        warn, as DCP does without a word; by default that is an error.
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
    """`torch.distributed.checkpoint.load`, by `holdfast.load`: in place, of what Holdfast or DCP wrote."""
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
    """`torch.distributed.checkpoint.async_save`, by `holdfast.async_save`.

    What it returns has the methods of the future that DCP returns (`result`, `done`, `exception`,
    `add_done_callback`), and the fields of its AsyncSaveResponse (`staging_completion`, `upload_completion`).
    """
    plain = plain_arguments("async_save", checkpoint_id, storage_writer, planner, async_stager=async_stager)
    store = open_store(one_folder(None, plain["checkpoint_id"]))

    def make() -> SaveJob:
        # Not before the last save has ended, so that the deadline does not count the wait for it. The
        # lane keeps its messages apart from those of calls that training makes meanwhile.
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
    """A save that reads the state now, and marks the folder for tools of DCP once it is committed."""
    request = SaveRequest(
        store=store,
        collect=lambda rank: flatten(state_dict, rank),
        call=call,
        options=options or Options(),
        objects_may_differ=objects_may_differ,
        # After the commit: tools of DCP take a `.metadata` for a checkpoint.
        after=lambda: mark(store),
    )
    return SaveJob(request)


class PlainArguments(TypedDict):
    """What arguments of DCP come to here."""

    checkpoint_id: str | os.PathLike[str] | None
    partial: NotRequired[bool]
    """May names that are asked for be missing? A load's only."""


def plain_arguments(
    call: str,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage: object = None,
    planner: object = None,
    **others: object,
) -> PlainArguments:
    """The folder, and whether names that are asked for may be missing.

    call: `save`, `load` or `async_save`. storage: a storage writer or reader.

    Raises BadInput for objects that bring code of their own: every rank plans alone, so nothing that sees the
    plans of all can take part.
    """
    plain: PlainArguments = {"checkpoint_id": checkpoint_id}
    kind = "storage_reader" if call == "load" else "storage_writer"
    # By exact type: a subclass has been written to do something else.
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
    # What was understood is None by now. Passing over the rest would drop what somebody relies on.
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
