"""Comparison of common state between ranks, by digests. (megatron-core broadcasts the state, and warns.)

Common state is stored once, from the lowest participant; different values on other ranks are lost. So with
`validate_access_integrity` each rank sends a digest of each value with its report on what it has written. The
committer compares them with its own, and warns as megatron-core does. No rank waits for this, and no save
fails because of it.
"""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Mapping
from contextlib import suppress

import numpy as np
import torch

from holdfast._core.format.digest import digest
from holdfast._frameworks.megatron import mcore

log = logging.getLogger("holdfast")


def digests(common: mcore.StateDict) -> dict[str, str]:
    """Digest each value of common state, by key."""
    found: dict[str, str] = {}
    for key, value in common.items():
        # A value that can't be compared (a tensor on the meta device) must not fail the save.
        with suppress(Exception):
            # 32 bits are enough for a warning.
            found[repr(key)] = f"{digest(_canonical(value).encode(errors='replace')) & 0xFFFFFFFF:08x}"
    return found


def compare(by_rank: Mapping[int, Mapping[str, str]]) -> None:
    """Warn of the first key at which ranks differ from the lowest one. by_rank: their `digests`."""
    lead = min(by_rank)
    ranks_of: dict[str, list[int]] = {}
    for rank, theirs in sorted(by_rank.items()):
        if differing := {key for key, _ in theirs.items() ^ by_rank[lead].items()}:
            ranks_of.setdefault(min(differing), []).append(rank)
    for key, ranks in ranks_of.items():
        log.warning(
            "Rank%s %s common state dict differs from rank %d common state dict. First differing key: %s",
            "s" if len(ranks) > 1 else "",
            ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else ""),
            lead,
            key,
        )


def _canonical(value: object) -> str:
    """Return the same text for equal values, on every rank."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{key!r}: {_canonical(part)}' for key, part in value.items()))}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_canonical, value)))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_canonical, value))}]"
    if isinstance(value, torch.Tensor):
        # As bytes: NumPy has no bfloat16 and no float8.
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{value.dtype} {tuple(value.shape)} {digest(data.data):x}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {digest(value.tobytes()):x}"
    # Without an object's address in memory, which differs on each rank.
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
