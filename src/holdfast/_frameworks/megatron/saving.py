"""Saves of sharded state dicts: their parts, and the reports that ranks send to the committer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch.distributed import ProcessGroup

from holdfast._core.base.values import Message
from holdfast._core.format import objects
from holdfast._core.format.names import COMMON
from holdfast._core.format.torch_objects import allowing
from holdfast._core.layout.ranks import ranks_text
from holdfast._core.protocol.call import Call
from holdfast._core.protocol.idle import idle_of
from holdfast._core.protocol.liveness import NO_PART
from holdfast._core.saving.commit import NOT_OURS
from holdfast._core.saving.job import SaveJob
from holdfast._core.saving.request import SaveRequest
from holdfast._core.state.leaf import Flat
from holdfast._core.store.base import Store
from holdfast._frameworks.guard import note_absent, note_committed
from holdfast._frameworks.megatron import common as common_state
from holdfast._frameworks.megatron import mcore, steps
from holdfast._frameworks.megatron.metadata import MARKS
from holdfast._frameworks.megatron.shards import Progression, WrittenCopies, to_save
from holdfast.errors import IdleRanks, SaveFailed

log = logging.getLogger("holdfast")


def read_state_dict(
    store: Store,
    sharded_state_dict: mcore.StateDict,
    call: Call,
    *,
    content_metadata: mcore.StateDict | None = None,
    compares: bool = False,
    preprocess: Callable[[mcore.StateDict], mcore.StateDict] | None = None,
    without: tuple[int, ...] = (),
    **how: Any,
) -> SaveJob:
    """Collect the state, and return a save that has yet to run.

    compares: compare common state between ranks, after `preprocess`.
    without: absent ranks, for the notes of the index.
    how: fields of `SaveRequest`.
    """
    everyone = call.participants
    copies: list[list[Progression]] = []
    report: Message = {}
    """This rank's additions to its report: the steps of its optimizers, and digests of its common state."""

    def collect(rank: int) -> Flat:
        parts, common = take_apart(sharded_state_dict)
        if content_metadata is not None:
            common[mcore.CONTENT_METADATA] = _clean(content_metadata, common)
        # Only the lowest participant's is stored; on other ranks it may contain anything.
        if rank == everyone[0]:
            _check_storable(common)
        # Now, on the caller's thread: in an asynchronous save, training goes on before the report is sent.
        report["steps"] = steps.counted(common)
        if compares:
            copied = own_containers(common)  # the functions below change it
            steps.leave_out(copied)
            seen = preprocess(copied) if preprocess is not None else copied
            report["common"] = common_state.digests(seen)
        written = WrittenCopies(rank, everyone)
        copies.extend(written.same(parts))
        return Flat(to_save(parts, common, written))

    def merge(reports: dict[int, Message]) -> Message:
        """Return the additions to the notes of the index."""
        if compares:
            common_state.compare({rank: message["common"] for rank, message in reports.items()})
        return steps.note({rank: message["steps"] for rank, message in reports.items()})

    # `allowing` ends with the making of the job, which reads and encodes the state.
    with allowing(mcore.safe_types()):
        request = SaveRequest(
            store=store,
            collect=collect,
            call=call,
            notes={"megatron-core": mcore.VERSION} | ({"without": list(without)} if without else {}),
            copies=None if without else lambda: copies,  # the ranks that came are waited for
            report=lambda: report,
            merge_reports=merge,
            marks=MARKS,
            **how,
        )
        return SaveJob(request)


def save_at_once(make: Callable[..., SaveJob], call: Call) -> None:
    """Save; without ranks that are absent after `report_after`, if other ranks hold copies of all their data.

    make: takes the call, and the ranks to leave out.
    """
    job: SaveJob = make(call)
    try:
        report = job.run()
    except IdleRanks as error:
        absent = idle_of(error, call.participants)
        note_absent(absent)
        if call.rank in absent:
            log.warning("%s Rank %d came after that, and saves nothing.", error.message, call.rank)
            return
        others = tuple(rank for rank in call.participants if rank not in absent)
        again: SaveJob = make(replace(call, participants=others), absent)
        if call.rank == others[0] and job.operation.context.idle != absent:
            # Raised in the call, so that the others get it, too.
            again.collect_error = SaveFailed(
                f"The message store says that the {job.request.title} is made without ranks "
                f"{ranks_text(absent)}, which rank {call.rank} has not decided.",
                rank=call.rank,
                hint=NOT_OURS,
            )
        report = again.run()
        if call.rank == others[0]:
            log.warning("%s It is committed. %s", error.message, NO_PART)
    note_committed(report.path)


def take_apart(sharded_state_dict: mcore.StateDict) -> tuple[list[mcore.ShardedTensor], mcore.StateDict]:
    """Return the ShardedTensors and ShardedObjects in a state dict, and its common state."""
    # A copy, because megatron-core changes containers in place, and these are the caller's.
    copied = own_containers(sharded_state_dict)
    mcore.apply_factories(copied)
    _, copied = mcore.extract_nonpersistent(copied)
    sharded, common = mcore.extract_sharded_base(copied)
    return list(mcore.nested_values(sharded)), common


def own_containers(state: Any) -> Any:
    """Copy nested dicts and lists, also empty ones, but not the values in them."""
    if isinstance(state, dict):
        return {key: own_containers(value) for key, value in state.items()}
    return [own_containers(value) for value in state] if isinstance(state, list) else state


def _clean(content_metadata: Mapping[str, object], common: object) -> mcore.StateDict:
    """Remove process groups, and set the format of our optimizer state, whatever format was asked for.

    Frameworks that save a model and its optimizer into two folders (verl) read the optimizer's format from
    the model's folder. So the metadata of every folder has it where `install` describes optimizers.
    """
    # Frameworks put process groups in it, which no other process can use.
    metadata = {key: value for key, value in content_metadata.items() if not isinstance(value, ProcessGroup)}
    kind = metadata.get(mcore.SHARDING_TYPE)
    ours = mcore.describes_optimizers() and kind is not None and kind != mcore.FSDP_DTENSOR
    if ours or steps.optimizers(common):
        metadata[mcore.SHARDING_TYPE] = mcore.FULLY_RESHARDABLE
    return metadata


def _check_storable(common: Mapping[str, object]) -> None:
    """Raise BadInput if a part of common state can't be stored, and name it."""
    for key, value in common.items():
        objects.encode(value, f"{COMMON}[{key!r}]")
