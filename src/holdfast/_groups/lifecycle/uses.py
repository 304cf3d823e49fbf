"""Derives the operations of process groups from their names. No torch here.

Names are those of `open_groups`, the descriptions of Megatron's `parallel_state`, and the dimension names of
a DeviceMesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

OPERATIONS = ("all_reduce", "all_to_all", "pairs")
"""Operations that `warm_up` can issue, in this order."""

EXPERTS = frozenset({"ep", "EXPERT_MODEL_PARALLEL_GROUP", "mesh_ep"})
"""Groups that send tokens to experts."""

TENSORS_OF_EXPERTS = frozenset({"tp_ep", "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"})
"""Groups that also send tokens if the layout has EXPERTS of more than one rank. Otherwise they are
tensor-parallel groups under another name."""

PIPELINES = frozenset({"pp", "PIPELINE_MODEL_PARALLEL_GROUP", "mesh_pp"})
"""Groups whose neighbours send to each other."""


def uses(groups: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, ...]]:
    """Return the operations (of OPERATIONS) that each group is used for; only all_reduce for unknown names.

    groups: all groups of more than one rank that a rank is in, each with all its names.
    """
    names = {group: frozenset(group_names) for group, group_names in groups.items()}
    to_experts = EXPERTS
    if any(known & EXPERTS for known in names.values()):
        to_experts |= TENSORS_OF_EXPERTS
    return {
        group: ("all_reduce",)
        + (("all_to_all",) if known & to_experts else ())
        + (("pairs",) if known & PIPELINES else ())
        for group, known in names.items()
    }
