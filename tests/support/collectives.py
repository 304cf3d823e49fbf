"""Which collectives are issued: what saves and loads must not do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def counted(action: Callable[[], object]) -> list[str]:
    """Return the names of the collectives that an action issues, seen at every door of torch.distributed."""
    names = [
        name
        for name in dir(distributed_c10d)
        if name.startswith(
            (
                "all_",
                "reduce",
                "broadcast",
                "gather",
                "scatter",
                "barrier",
                "send",
                "recv",
                "isend",
                "irecv",
                "batch_",
                "monitored",
            )
        )
        and callable(getattr(distributed_c10d, name))
    ]
    assert {"all_reduce", "all_gather_object", "barrier", "broadcast_object_list", "gather_object"} <= set(
        names
    )
    seen: list[str] = []
    real = {name: getattr(distributed_c10d, name) for name in names}

    def spy(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return real[name](*args, **kwargs)

        return call

    group = distributed_c10d._get_default_group()
    before = (
        group._get_sequence_number_for_group() if hasattr(group, "_get_sequence_number_for_group") else None
    )
    try:
        for name in names:
            setattr(distributed_c10d, name, spy(name))
            if hasattr(dist, name):
                setattr(dist, name, getattr(distributed_c10d, name))
        action()
    finally:
        for name in names:
            setattr(distributed_c10d, name, real[name])
            if hasattr(dist, name):
                setattr(dist, name, real[name])
    after = group._get_sequence_number_for_group() if before is not None else None
    if before != after and not seen:
        seen.append(f"sequence number {before} -> {after}")
    return seen
