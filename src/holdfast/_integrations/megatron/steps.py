"""The steps of optimizers, which the lowest rank alone may not know.

PyTorch's Adam counts steps in the state of each parameter. Transformer Engine's and Apex's count in the
parameter group, and only if the group has parameters: on a pipeline stage of dense layers, the groups of the
experts have no step. Common state is taken from the lowest rank, which may be on such a stage. So each rank
sends the steps of its optimizers with its report. The committer notes in the index those that its own common
state does not have, and a load fills them in.

A group without a step and one with step 0 are the same: Adam has not run. (In older checkpoints, groups
without parameters on the lowest rank have step 0; the step of the other groups is used for them.)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import torch

from holdfast._integrations.megatron import mcore
from holdfast._layout.tensor import listed
from holdfast.errors import BadInput

log = logging.getLogger("holdfast")
NOTE = "optimizer_steps"
"""Key in the notes of the index: the step of each optimizer whose groups in common state have none."""
COMPLETE = "holdfast_steps"
"""Key in a loaded optimizer: its groups have the same steps as on the ranks that saved."""


def optimizers(
    common: object, path: tuple[str, ...] = (), depth: int = 3
) -> Iterator[tuple[str, mcore.StateDict]]:
    """Yield (path, state) of each optimizer in a common state whose format is fully reshardable."""
    # Three levels are enough: the optimizer's key, and the number of one in a chain.
    if not isinstance(common, dict) or not depth:
        return
    if common.get("param_state_sharding_type") == mcore.FULLY_RESHARDABLE:
        yield ".".join(path), common
        return
    for key, value in common.items():
        yield from optimizers(value, (*path, str(key)), depth - 1)


def groups_of(optimizer: mcore.StateDict) -> list[mcore.StateDict]:
    inner = optimizer.get("optimizer")
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def step_of(group: mcore.StateDict) -> float:
    """Return the step of a parameter group; 0 if it has none."""
    step = group.get("step")
    return float(step.item() if isinstance(step, torch.Tensor) else step or 0)


def counted(common: object) -> dict[str, float]:
    """Return the step of each optimizer that has taken one."""
    steps = {
        path: max(map(step_of, groups_of(optimizer)), default=0.0) for path, optimizer in optimizers(common)
    }
    # Step 0 means the same as no step (see above), and need not be sent.
    return {path: step for path, step in steps.items() if step}


def merge(reports: Mapping[int, Mapping[str, float]], own: Mapping[str, float]) -> dict[str, float]:
    """Return the steps of optimizers that are not in `own`, this rank's steps; warn if ranks differ."""
    merged: dict[str, tuple[int, float]] = {}
    # In the order of ranks, so that the lowest rank with a step wins.
    for rank, steps in sorted(reports.items()):
        for path, step in steps.items():
            first, known = merged.setdefault(path, (rank, step))
            if step != known:
                log.warning(
                    "Rank %d has taken %g steps of the optimizer %r, rank %d %g.",
                    first,
                    known,
                    path,
                    rank,
                    step,
                )
    # The stored common state has the steps in `own`.
    return {path: step for path, (_, step) in merged.items() if path not in own}


def complete(common: object, noted: object) -> None:
    """Fill the steps from the notes of the index into a loaded common state."""
    if not isinstance(noted, dict):
        return  # an older checkpoint, or one without optimizers
    for path, optimizer in optimizers(common):
        # From here on, a group without a step had none on any rank, and must not take another group's.
        optimizer[COMPLETE] = True
        step = noted.get(path)
        if isinstance(step, int | float) and not isinstance(step, bool) and step > 0:
            for group in groups_of(optimizer):
                group["step"] = int(step)


def comparable(common: object, depth: int = 3) -> object:
    """Remove from a common state what may differ between ranks: the step, which groups without parameters on
    a rank do not have, and the empty `param_state` of an optimizer without parameters."""
    if not isinstance(common, dict) or not depth:
        return common
    if common.get("param_state_sharding_type") == mcore.FULLY_RESHARDABLE and groups_of(common):
        groups = [{k: v for k, v in group.items() if k != "step"} for group in groups_of(common)]
        rest = {key: value for key, value in common.items() if key != "param_state"}
        return {**rest, "optimizer": {**common["optimizer"], "param_groups": groups}}
    return {key: comparable(value, depth - 1) for key, value in common.items()}


class SavedSteps:
    """The steps in a checkpoint's parameter groups. All ranks get the same steps, or the same error."""

    def __init__(self, saved: list[mcore.StateDict]) -> None:
        groups = [group for optimizer in saved for group in groups_of(optimizer)]
        # Without zeros, which groups without parameters may have.
        known = sorted({step for step in map(step_of, groups) if step})
        if len(known) > 1:
            raise BadInput(
                f"The parameter groups in the checkpoint have different steps: "
                f"{listed([f'{step:g}' for step in known], str)}.",
                hint="megatron-core has one step for all groups. Load the model alone, and begin with a new "
                "optimizer.",
            )
        self.last = known[0] if known else 0.0
        """The step of all groups that have one."""
        self._complete = all(optimizer.get(COMPLETE) for optimizer in saved)

    def of(self, group: mcore.StateDict) -> float:
        """Return the step for a group of this layout that has parameters. group: the saved one for it."""
        return step_of(group) or (0.0 if self._complete else self.last)
