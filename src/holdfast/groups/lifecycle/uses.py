"""What process groups are used for, told from their names. No torch here.

Names are those of `open_groups`, the descriptions that Megatron's `parallel_state` gives, and those of the
dimensions of a DeviceMesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

OPERATIONS = ("all_reduce", "all_to_all", "pairs")
"""What `warm_up` can issue, in the order in which it does."""

EXPERTS = frozenset({"ep", "EXPERT_MODEL_PARALLEL_GROUP", "mesh_ep"})
"""Groups in which tokens are sent to experts."""

TENSORS_OF_EXPERTS = frozenset({"tp_ep", "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"})
"""These as well, in a layout that has EXPERTS of more than one rank. Without, they are tensor-parallel groups
under another name."""

PIPELINES = frozenset({"pp", "PIPELINE_MODEL_PARALLEL_GROUP", "mesh_pp"})
"""Groups whose neighbours send to each other."""


def uses(groups: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, ...]]:
    """For each group the operations that it is used for, some of OPERATIONS; all_reduce if none of its names
    is known.

    groups: the names of each group of more than one rank that a rank is in, all of them.
    """
    names = {group: frozenset(found) for group, found in groups.items()}
    to_experts = EXPERTS
    if any(known & EXPERTS for known in names.values()):
        to_experts |= TENSORS_OF_EXPERTS
    return {
        group: ("all_reduce",)
        + (("all_to_all",) if known & to_experts else ())
        + (("pairs",) if known & PIPELINES else ())
        for group, known in names.items()
    }
