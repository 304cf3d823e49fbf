"""The step that an optimizer counts, where no rank alone knows it.

PyTorch's Adam counts in the state of each parameter. Transformer Engine's and Apex's count in the parameter
group, and only where the group has parameters: on a pipeline stage of dense layers the groups of the experts
have no step. Common state is taken from the lowest rank, which may be on such a stage. So each rank tells,
with what it has written, the steps of its optimizers; the committer notes in the index those that its own
common state lacks, and a load fills them in.

A group without a step and one with step 0 are the same: Adam has not run. (Until then Holdfast wrote 0 for
groups that had no parameters on the lowest rank; the step of the other groups stands for them.)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import torch

from holdfast.errors import BadInput
from holdfast.integrations.megatron import mcore
from holdfast.layout.tensor import listed

log = logging.getLogger("holdfast")
NOTE = "optimizer_steps"
"""In the notes of the index: the step of each optimizer whose groups in the common state lack it."""
COMPLETE = "holdfast_steps"
"""In a loaded optimizer: its groups have the steps that they had on the ranks that saved."""


def optimizers(
    common: object, path: tuple[str, ...] = (), depth: int = 3
) -> Iterator[tuple[str, mcore.StateDict]]:
    """(path, state) of each optimizer whose state in a common state is fully reshardable."""
    # Three levels are enough: the optimizer's key, and the number of one in a chain.
    if not isinstance(common, dict) or not depth:
        return
    if common.get("param_state_sharding_type") == mcore.FULLY_RESHARDABLE:
        yield ".".join(path), common
        return
    for key, value in common.items():
        yield from optimizers(value, (*path, str(key)), depth - 1)


def groups_of(optimizer: mcore.StateDict) -> list[mcore.StateDict]:
    """The parameter groups in an optimizer's state dict."""
    inner = optimizer.get("optimizer")
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def step_of(group: mcore.StateDict) -> float:
    """The step of a parameter group; 0 if it has none."""
    step = group.get("step")
    return float(step.item() if isinstance(step, torch.Tensor) else step or 0)


def counted(common: object) -> dict[str, float]:
    """The step of each optimizer that has taken one; what a rank tells."""
    found = {
        path: max(map(step_of, groups_of(optimizer)), default=0.0) for path, optimizer in optimizers(common)
    }
    # Step 0 says no more than no step (see above), and would only be sent.
    return {path: step for path, step in found.items() if step}


def merge(told: Mapping[int, Mapping[str, float]], own: Mapping[str, float]) -> dict[str, float]:
    """The steps of optimizers of which this rank has none, `own` being its. Says it if ranks differ."""
    found: dict[str, tuple[int, float]] = {}
    # In the order of ranks, so that the lowest one that knows a step says it.
    for rank, steps in sorted(told.items()):
        for path, step in steps.items():
            first, known = found.setdefault(path, (rank, step))
            if step != known:
                log.warning(
                    "Rank %d has taken %g steps of the optimizer %r, rank %d %g.",
                    first,
                    known,
                    path,
                    rank,
                    step,
                )
    # What the stored common state has needs no note.
    return {path: step for path, (_, step) in found.items() if path not in own}


def complete(common: object, noted: object) -> None:
    """Fill into a loaded common state what the notes of its index say of steps."""
    if not isinstance(noted, dict):
        return  # an older checkpoint, or one of another kind
    for path, optimizer in optimizers(common):
        # From here on a group without a step had none on any rank, and does not take that of the others.
        optimizer[COMPLETE] = True
        step = noted.get(path)
        if isinstance(step, int | float) and not isinstance(step, bool) and step > 0:
            for group in groups_of(optimizer):
                group["step"] = int(step)


def comparable(common: object, depth: int = 3) -> object:
    """What of a common state is the same on all ranks: groups that are empty on a rank have no step there,
    and an optimizer without parameters leaves an empty container where the state of others is sharded."""
    if not isinstance(common, dict) or not depth:
        return common
    if common.get("param_state_sharding_type") == mcore.FULLY_RESHARDABLE and groups_of(common):
        groups = [{k: v for k, v in group.items() if k != "step"} for group in groups_of(common)]
        rest = {key: value for key, value in common.items() if key != "param_state"}
        return {**rest, "optimizer": {**common["optimizer"], "param_groups": groups}}
    return {key: comparable(value, depth - 1) for key, value in common.items()}


class Steps:
    """The steps in a checkpoint, from its parameter groups; the same on all ranks, and so is what it
    raises."""

    def __init__(self, saved: list[mcore.StateDict]) -> None:
        groups = [group for optimizer in saved for group in groups_of(optimizer)]
        # Without zeros: they stand for groups that were empty.
        known = sorted({step for step in map(step_of, groups) if step})
        if len(known) > 1:
            raise BadInput(
                f"The parameter groups in the checkpoint have different steps: "
                f"{listed([f'{step:g}' for step in known], str)}.",
                hint="megatron-core has one step for all groups. Load the model alone, and begin with a new "
                "optimizer.",
            )
        self.last = known[0] if known else 0.0
        """Of all groups that have one."""
        self._complete = all(optimizer.get(COMPLETE) for optimizer in saved)

    def of(self, group: mcore.StateDict) -> float:
        """The step for a group of this layout that has parameters, `group` being the saved one that stands
        for it."""
        return step_of(group) or (0.0 if self._complete else self.last)
