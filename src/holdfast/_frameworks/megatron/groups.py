"""Matches saved parameter groups of optimizers to live ones, and checks that each has the settings it needs.

megatron-core identifies a group by multipliers, and groups of Muon and Adam may have the same ones. So a
group also has a kind: the settings that its optimizer needs to step (Adam's `betas` and `eps`, Muon's
`momentum`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from holdfast._frameworks.megatron import mcore
from holdfast.errors import BadInput


def find_group(
    own: mcore.StateDict, groups: list[mcore.StateDict], inner: torch.optim.Optimizer
) -> mcore.StateDict:
    """Find the saved parameter group for one of this layout; `is_expert_parallel` may differ.

    groups: the saved groups; the first match is taken. inner: the optimizer of `own`.
    Raises BadInput if none matches.
    """
    keys = [key for key in own if key.removeprefix("pre_") in mcore.GROUP_KEYS]
    needed = [key for part in _parts(inner) for key in _settings(part) if key in own]
    of_kind = [group for group in groups if all(key in group for key in needed)]
    # Without expert parallelism, experts are in dense groups: if no group is equal, only this may differ.
    for ignored in ((), ("is_expert_parallel",)):
        wanted = [key for key in keys if key not in ignored]
        for group in of_kind:
            if all(group.get(key, own[key]) == own[key] for key in wanted):
                classes = {key: value for key, value in own.items() if isinstance(value, type)}
                return {**group, **classes, **{key: own[key] for key in keys}}
    if groups and not of_kind:
        lacking = min(
            ([key for key in needed if key not in group] for group in groups), key=lambda one: len(one)
        )
        raise BadInput(
            f"The checkpoint has no parameter group of {type(inner).__name__}: none has "
            f"{' and '.join(lacking)}.",
            hint="Build the optimizer of the kind that was saved, or load the model alone.",
        )
    raise BadInput(
        f"The checkpoint has no parameter group with { {key: own[key] for key in keys} }.",
        hint="Build the optimizer with the same weight-decay and learning-rate multipliers as when it was "
        "saved.",
    )


def check_kinds(optimizer: mcore.DistributedOptimizer) -> None:
    """Raise BadInput if a group of this optimizer, or of one in a chain, was loaded with the settings of
    another kind of optimizer. (Its next step would fail with a KeyError.)"""
    for inner in _inner(optimizer):
        for number, group in enumerate(inner.param_groups):
            if lacking := [key for key in _settings(inner) if key not in group]:
                raise BadInput(
                    f"Parameter group {number} of {type(inner).__name__} was loaded without "
                    f"{' and '.join(lacking)}: the loaded state is that of another kind of optimizer.",
                    hint="Build the optimizers in the kinds and the order that were saved, or load the model "
                    "alone.",
                )


def _inner(optimizer: object) -> Iterator[torch.optim.Optimizer]:
    """Yield the PyTorch optimizers inside a megatron-core optimizer, or inside a chain of them."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        for part in chained:
            yield from _inner(part)
    elif isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        yield from _parts(inner)


def _parts(inner: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that step: the parts of an offloaded one, or the optimizer itself."""
    parts: list[torch.optim.Optimizer] = getattr(inner, "sub_optimizers", [inner])
    return parts


def _settings(inner: torch.optim.Optimizer) -> list[str]:
    """Return the settings that a step reads from each group.

    Switches (None or a bool) are left out: PyTorch fills in any that a group of an older version lacks.
    """
    return [
        key
        for key, value in inner.defaults.items()
        if value is not None and not isinstance(value, bool | str | type)
    ]
