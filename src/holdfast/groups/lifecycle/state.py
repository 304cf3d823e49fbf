"""What this process knows of its process groups."""

from __future__ import annotations

import os
from collections.abc import Callable
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from holdfast.groups.audit.hazards import NAMES, GroupFacts, ProcessFacts
from holdfast.options import all_variables
from holdfast.torch_private import is_eager, is_open, known_groups, timeout_of

# Weak, so that a group that was destroyed can go.
warm: WeakSet[dist.ProcessGroup] = WeakSet()
"""Groups that this process has warmed up."""
installed: list[Callable[[], tuple[str, ...]]] = []
"""Asked for what `holdfast.install` has replaced; the integrations put it there."""

opened: WeakKeyDictionary[dist.ProcessGroup, tuple[str, ...]] = WeakKeyDictionary()
"""Groups that `open_groups` gave, with their names there. The default group, which it did not make, says so
nowhere else."""


def facts() -> ProcessFacts:
    """What there is to know of this process, from this process alone."""
    up = dist.is_available() and dist.is_initialized()
    return ProcessFacts(
        os.getpid(),
        dist.get_rank() if up else None,
        dist.get_world_size() if up else None,
        str(torch.__version__),
        is_eager(),
        tuple(
            GroupFacts(
                known.name,
                known.description,
                known.ranks,
                dist.get_backend_config(known.group),
                timeout_of(known.group),
                is_open(known.group),
                known.group in warm,
            )
            for known in known_groups()
        ),
        {name: value for name, value in all_variables().items() if name.startswith(NAMES)},
        tuple(sentence for describe in installed for sentence in describe()),
    )
