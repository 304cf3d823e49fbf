"""Fingerprints of a sharded state dict of megatron-core."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from holdfast.integrations.megatron import mcore
from holdfast.integrations.megatron.saving import State, take_apart
from holdfast.integrations.megatron.shards import Copies, to_save
from holdfast.maintenance.fingerprints import Fingerprint, fingerprint_leaves
from holdfast.protocol.call import begin_call
from holdfast.roster.base import Roster
from holdfast.state.leaf import Flat

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def fingerprint(
    sharded_state_dict: mcore.StateDict,
    *,
    participants: Iterable[int] | None = None,
    process_group: ProcessGroup | None = None,
    timeout: float = 1800.0,
    stall_timeout: float = 120.0,
    roster: Roster | None = None,
) -> dict[str, Fingerprint]:
    """Take the fingerprints of all weights of a model, in whatever layout the ranks have it.

    As `holdfast.fingerprint`, for a sharded state dict. `holdfast.same(fingerprint(...), folder)` compares
    the model on these ranks with a checkpoint, or with a folder that Hugging Face publishes.

    sharded_state_dict: the model's, as `save` takes it.
    participants, process_group: the ranks that take part; default all.
    timeout, stall_timeout: seconds, as in `save`.
    roster: a coordination store to use in place of torch.distributed's.

    Raises the errors of `holdfast.fingerprint`.
    """
    call = begin_call(
        roster,
        participants=participants,
        process_group=process_group,
        timeout=timeout,
        stall_timeout=stall_timeout,
    )

    def collect(rank: int) -> Flat:
        parts, _ = take_apart(State(sharded_state_dict))
        tensors = [part for part in parts if isinstance(part, mcore.ShardedTensor)]
        return Flat(to_save(tensors, {}, Copies(rank, call.participants)))

    return fingerprint_leaves(collect, call)
