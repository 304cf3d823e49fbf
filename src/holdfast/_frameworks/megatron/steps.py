"""The step numbers of optimizers, which the lowest rank may lack.

PyTorch's Adam counts steps in the state of each parameter. Transformer Engine's and Apex's count in the
parameter group, and only if the group has parameters: on a pipeline stage of dense layers, the groups of the
experts have no step. Common state is taken from the lowest rank, which may be on such a stage. So each rank
sends the steps of its optimizers with its report. The committer notes in the index those that its own common
state does not have, and a load fills them in.

A group without a step and one with step 0 are the same: Adam has not run.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from holdfast._core.base.values import Message
from holdfast._frameworks.megatron import mcore
from holdfast.errors import BadInput

NOTE = "optimizer_steps"
"""Key in the notes of the index: the step of each optimizer whose groups in common state have none."""
COMPLETE = "holdfast_steps"
"""Key in a loaded optimizer: its groups have the same steps as on the ranks that saved."""


def optimizers(common: object, path: str = "", depth: int = 3) -> dict[str, mcore.StateDict]:
    """Return the state of each optimizer in a common state whose format is fully reshardable, by its path."""
    # Three levels are enough: the optimizer's key, and the number of one in a chain.
    if not isinstance(common, dict) or not depth:
        return {}
    if common.get("param_state_sharding_type") == mcore.FULLY_RESHARDABLE:
        return {path: common}
    found: dict[str, mcore.StateDict] = {}
    for key, value in common.items():
        found |= optimizers(value, f"{path}.{key}" if path else str(key), depth - 1)
    return found


def groups_of(optimizer: mcore.StateDict) -> list[mcore.StateDict]:
    groups: list[mcore.StateDict] = optimizer["optimizer"]["param_groups"]
    return groups


def step_of(group: mcore.StateDict) -> float:
    """Return the step of a parameter group; 0 if it has none."""
    step = group.get("step")
    return float(step.item() if isinstance(step, torch.Tensor) else step or 0)


def counted(common: object) -> dict[str, float]:
    """Return the step of each optimizer; 0 if it has none on this rank."""
    return {
        path: max(map(step_of, groups_of(optimizer)), default=0.0)
        for path, optimizer in optimizers(common).items()
    }


def note(by_rank: Mapping[int, Mapping[str, float]]) -> Message:
    """Return the addition to the notes of the index: the steps that the lowest rank lacks. by_rank: the
    result of `counted` on each rank."""
    stored = by_rank[min(by_rank)]
    if not stored:
        return {}  # no optimizer is saved
    steps: dict[str, float] = {}
    for _, counts in sorted(by_rank.items()):
        for path, step in counts.items():
            if step:
                steps.setdefault(path, step)  # of the lowest rank that has one
    return {NOTE: {path: step for path, step in steps.items() if not stored.get(path)}}


def complete(common: object, noted: object) -> None:
    """Fill the steps from the notes of the index into a loaded common state."""
    if not isinstance(noted, dict):
        return  # megatron-core's checkpoint, or one without optimizers
    for path, optimizer in optimizers(common).items():
        # From here on, a group without a step had none on any rank, and must not take another group's.
        optimizer[COMPLETE] = True
        if path in noted:
            for group in groups_of(optimizer):
                group["step"] = int(noted[path])


def leave_out(common: object) -> None:
    """Remove values that may differ between ranks from a common state: the step, which groups without
    parameters on a rank lack, and the empty `param_state` of an optimizer without parameters."""
    for optimizer in optimizers(common).values():
        optimizer.pop("param_state", None)
        for group in groups_of(optimizer):
            group.pop("step", None)


def step_of_others(saved: list[mcore.StateDict]) -> float:
    """Return the step for groups that were saved without one, but have parameters in this layout.

    Raises BadInput, on all ranks or on none, if groups have different steps.
    """
    groups = [group for optimizer in saved for group in groups_of(optimizer)]
    known = sorted({step for step in map(step_of, groups) if step})
    if len(known) > 1:
        raise BadInput(
            f"The parameter groups in the checkpoint have different steps: "
            f"{'; '.join(f'{step:g}' for step in known)}.",
            hint="megatron-core has one step for all groups. Load the model alone, and begin with a new "
            "optimizer.",
        )
    complete = all(optimizer.get(COMPLETE) for optimizer in saved)
    return known[0] if known and not complete else 0.0
