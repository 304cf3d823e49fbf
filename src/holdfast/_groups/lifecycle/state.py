"""State that this process keeps about its process groups."""

from __future__ import annotations

import os
from collections.abc import Callable
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from holdfast._core.base.options import all_variables
from holdfast._core.torch_private import is_eager, is_open, known_groups, timeout_of
from holdfast._groups.audit.hazards import NAMES, GroupFacts, ProcessFacts

# Weak, so that destroyed groups can be freed.
warm: WeakSet[dist.ProcessGroup] = WeakSet()
"""Groups that this process has warmed up."""
installed: list[Callable[[], tuple[str, ...]]] = []
"""Functions, added by the integrations, that describe the replacements by `holdfast.install`."""
opened: WeakKeyDictionary[dist.ProcessGroup, tuple[str, ...]] = WeakKeyDictionary()
"""Groups that `open_groups` returned, with their names there. Other groups carry them in their description;
the default group, which `open_groups` did not make, does not."""


def facts() -> ProcessFacts:
    """Collect the input of an audit from this process alone."""
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
