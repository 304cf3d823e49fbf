"""Fingerprints of a sharded state dict of megatron-core."""

from __future__ import annotations

from holdfast._core.protocol.call import begin_call
from holdfast._core.protocol.job import Job
from holdfast._core.state.leaf import Flat
from holdfast._frameworks.megatron import mcore
from holdfast._frameworks.megatron.saving import take_apart
from holdfast._frameworks.megatron.shards import AllCopies, to_save
from holdfast._models.equality.fingerprints import Fingerprint, fingerprint_leaves
from holdfast._models.equality.published_names import Published


def fingerprint(
    sharded_state_dict: mcore.StateDict,
    *,
    published: Published | None = None,
    job: Job | None = None,
) -> dict[str, Fingerprint]:
    """Take the fingerprints of all weights of a model, in whatever layout the ranks have it.

    As `holdfast.fingerprint`, for a sharded state dict. `holdfast.same(fingerprint(...), folder)` compares
    the model on these ranks with a checkpoint, or with a folder that Hugging Face publishes.

    sharded_state_dict: the model's, as `save` takes it.
    published: as in `holdfast.fingerprint`.
    job: who takes part, and deadlines (`holdfast.Job`).

    Raises the errors of `holdfast.fingerprint`.
    """
    call = begin_call(job)

    def collect(rank: int) -> Flat:
        parts, _ = take_apart(sharded_state_dict)
        tensors = [part for part in parts if isinstance(part, mcore.ShardedTensor)]
        return Flat(to_save(tensors, {}, AllCopies(rank, call.participants)))

    return fingerprint_leaves(collect, call, published=published)
