"""What a save takes of a sharded state dict, and what its ranks tell of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from holdfast.errors import BadInput
from holdfast.format import objects
from holdfast.format.names import COMMON
from holdfast.format.torch_objects import allowing
from holdfast.integrations.megatron import mcore, steps
from holdfast.integrations.megatron.common import Comparison
from holdfast.integrations.megatron.shards import Copies, to_save
from holdfast.protocol.call import Call
from holdfast.saving.job import SaveJob
from holdfast.saving.request import SaveRequest
from holdfast.state.flatten import Flat
from holdfast.store.base import Store
from holdfast.values import Message


class State(NamedTuple):
    """What `megatron.core.dist_checkpointing.save` is given to save."""

    sharded_state_dict: mcore.StateDict
    content_metadata: mcore.StateDict | None = None
    validate: bool = False
    """Compare common state between ranks, `preprocess` making of it what is compared."""
    preprocess: Callable[[mcore.StateDict], object] | None = None


def read_state_dict(
    store: Store,
    state: State,
    call: Call,
    **how: Any,
) -> SaveJob:
    """A save that has collected the state and has yet to run. how: fields of `SaveRequest`."""
    everyone = call.participants
    told = _Told(Comparison(state.preprocess) if state.validate and len(everyone) > 1 else None)

    def collect(rank: int) -> Flat:
        parts, common = take_apart(state)
        # Only the lowest participant's is stored; on other ranks it may hold anything.
        if rank == everyone[0]:
            _check_storable(common)
        # Now, on the caller's thread: of a save in the background, training goes on before it is written.
        told.read(common, len(everyone))
        return Flat(to_save(parts, common, Copies(rank, everyone)))

    notes = {"megatron-core": mcore.VERSION}
    # The state is read, and encoded, while the job is made; so this is long enough.
    with allowing(mcore.safe_types()):
        request = SaveRequest(
            store=store,
            collect=collect,
            call=call,
            notes=notes,
            report=told.report,
            merge_reports=told.merge,
            **how,
        )
        return SaveJob(request)


def take_apart(state: State) -> tuple[list[mcore.ShardedTensor], mcore.StateDict]:
    """The ShardedTensors and ShardedObjects in a state dict, and its common state."""
    # megatron-core changes containers in place, and they are the caller's.
    copied = own_containers(state.sharded_state_dict)
    mcore.apply_factories(copied)
    _, copied = mcore.extract_nonpersistent(copied)
    sharded, common = mcore.extract_sharded_base(copied)
    if state.content_metadata is not None:
        common[mcore.CONTENT_METADATA] = _clean(state.content_metadata, common)
    return list(mcore.nested_values(sharded)), common


class _Told:
    """What a rank tells with what it has written, and what the committer makes of it."""

    def __init__(self, comparison: Comparison | None) -> None:
        self._comparison = comparison
        self._steps: dict[str, float] | None = None
        """Of each optimizer; None where no optimizer's state is saved."""

    def read(self, common: mcore.StateDict, ranks: int) -> None:
        # Not None, even if nothing has stepped: only where an optimizer is saved the notes speak of steps.
        if any(True for _ in steps.optimizers(common)):
            self._steps = steps.counted(common)
        if self._comparison is not None:
            self._comparison.read(own_containers(common), ranks, steps.comparable)

    def report(self) -> Message:
        said: Message = {"steps": self._steps} if self._steps else {}
        common = self._comparison.say() if self._comparison is not None else ""
        return said | ({"common": common} if common else {})

    def merge(self, said: dict[int, Message]) -> Message:
        """What goes into the notes of the index."""
        if self._comparison is not None:
            self._comparison.compare({rank: message.get("common", "") for rank, message in said.items()})
        if self._steps is None:
            return {}
        told = {rank: message.get("steps", {}) for rank, message in said.items()}
        return {steps.NOTE: steps.merge(told, self._steps)}


def own_containers(state: Any) -> Any:
    """Dicts and lists of their own, empty ones among them; everything else as it is."""
    if isinstance(state, dict):
        return {key: own_containers(value) for key, value in state.items()}
    return [own_containers(value) for value in state] if isinstance(state, list) else state


def _clean(content_metadata: Mapping[str, object], common: object) -> mcore.StateDict:
    """Without process groups; optimizer state that is ours is fully reshardable, whatever was asked for.

    Frameworks that save a model and its optimizer into two folders (verl) ask the model's folder how the
    optimizer was described. Where `install` describes it, every folder says so.
    """
    from torch.distributed import ProcessGroup

    # Frameworks keep groups in it; no other process could use them.
    found = {key: value for key, value in content_metadata.items() if not isinstance(value, ProcessGroup)}
    kind = found.get(mcore.SHARDING_TYPE)
    ours = mcore.describes_optimizers() and kind is not None and kind != mcore.FSDP_DTENSOR
    if ours or any(True for _ in steps.optimizers(common)):
        found[mcore.SHARDING_TYPE] = mcore.FULLY_RESHARDABLE
    return found


def _check_storable(common: Mapping[str, object]) -> None:
    """Name the part of the common state that can't be stored."""
    try:
        objects.encode(dict(common), COMMON)
    except BadInput:
        # Encoded as a whole first, which mostly succeeds; part by part only to name the culprit.
        for key, value in common.items():
            objects.encode(value, f"{COMMON}[{key!r}]")
        raise
