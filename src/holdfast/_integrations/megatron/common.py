"""Comparison of common state between ranks, by digests. (megatron-core broadcasts the state, and warns.)

Common state is stored once, from the lowest participant; different values on other ranks are lost. So with
`validate_access_integrity` each rank sends a digest of each value with its report on what it has written. The
committer compares them with its own, and warns as megatron-core does. No rank waits for this, and no save
fails because of it.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping

import numpy as np
import torch

from holdfast._format.digest import digest
from holdfast._integrations.reporting import warn_once

log = logging.getLogger("holdfast")
MOST_KEYS = 64
"""Of more keys a rank sends one digest: the committer gets the messages of 10,000 ranks."""
LONG = 1024
"""A longer list is digested as a whole, because a digest of each part takes too long."""


def digests(common: object) -> dict[str, str]:
    """Digest common state, by key; empty if it can't be compared."""
    try:
        # repr, so that 1 and "1" stay two keys.
        if isinstance(common, dict) and len(common) <= MOST_KEYS:
            return {repr(key): _digest(value) for key, value in common.items()}
        return {"(all)": _digest(common)}
    except Exception as error:  # a repr that raises, a dict that contains itself
        log.warning("The common state can't be compared between ranks: %s: %s", type(error).__name__, error)
        return {}


def compare(by_rank: Mapping[int, Mapping[str, str]]) -> None:
    """Warn of the first key at which ranks differ from the lowest one. by_rank: their `digests`."""
    lead = min(by_rank)
    own = by_rank[lead]
    ranks_of: dict[str, list[int]] = {}
    for rank, theirs in sorted(by_rank.items()):
        if own and theirs and theirs != own:
            first = min(key for key in own.keys() | theirs.keys() if own.get(key) != theirs.get(key))
            ranks_of.setdefault(first, []).append(rank)
    for key, ranks in ranks_of.items():
        who = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} others" if len(ranks) > 8 else "")
        log.warning(
            "Rank%s %s common state dict differs from rank %d common state dict. First differing key: %s",
            "s" if len(ranks) > 1 else "",
            who,
            lead,
            key,
        )


def _digest(value: object) -> str:
    """Digest a value. The order of keys does not matter, a list equals a tuple, and 1 equals 1.0 and True."""
    if isinstance(value, dict):
        parts = ["dict", *sorted(f"{key!r}={_digest(part)}" for key, part in value.items())]
    elif isinstance(value, argparse.Namespace):
        parts = ["namespace", _digest(vars(value))]
    elif isinstance(value, list | tuple) and len(value) <= LONG:
        parts = ["list", *map(_digest, value)]
    elif isinstance(value, set | frozenset):
        parts = ["set", *sorted(map(_digest, value))]
    elif isinstance(value, int | float):
        whole = isinstance(value, int) or value.is_integer()
        parts = ["number", repr(int(value)) if whole else repr(float(value))]
    elif isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type != "meta":
        # As bytes: NumPy has no bfloat16 and no float8.
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        parts = ["tensor", str(value.dtype), repr(tuple(value.shape)), f"{digest(data.data):x}"]
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        parts = ["array", value.dtype.str, repr(value.shape), f"{digest(value.tobytes()):x}"]
    else:
        kind, text = f"{type(value).__module__}.{type(value).__qualname__}", repr(value)
        if " at 0x" in text:  # its place in memory differs on each rank
            warn_once(f"What is a {kind} in the common state is not compared between ranks.")
            text = ""
        parts = [kind, text]
    # 32 bits are enough for a warning.
    return f"{digest(chr(0).join(parts).encode(errors='surrogatepass')) & 0xFFFFFFFF:08x}"
