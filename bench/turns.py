"""Sides taking turns on the same ranks, and what came of it.

A side that fails on one rank is dropped by all, so that the others go on; the failure is kept. Samples
are keyed by a tuple of words: what was done, which side did it, and in which layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bench.harness import MIB, Rank, Sample

MAY_FAIL = ("torch_checkpointing",)  # 0.1, and made for CUDA: where it fails, the row's note says why


@dataclass
class Outcome:
    """What one rank measured. Keys: ("save", side) and ("load", side, layout)."""

    samples: dict[tuple[str, ...], list[Sample]] = field(default_factory=dict)
    read: dict[tuple[str, ...], tuple[int, int]] = field(default_factory=dict)  # (read, needed) by report
    needed: dict[str, int] = field(default_factory=dict)  # by layout
    failed: dict[tuple[str, ...], str] = field(default_factory=dict)
    first: dict[tuple[str, ...], Sample] = field(default_factory=dict)  # the call that warmed up


def turn(rank: Rank, out: Outcome, key: tuple[str, ...], call: Any, *, keep: bool, check: Any = None) -> bool:
    """One measured call on all ranks; False where it failed on any of them."""
    fault = None

    def guarded() -> Any:
        nonlocal fault
        try:
            return call()
        except Exception as error:
            fault = describe(error)
        return None

    sample, report = rank.together(guarded)
    if fault is None and check is not None:
        try:
            check()
        except ValueError as error:
            fault = describe(error)
    if fault is not None:
        out.failed[key] = fault
    elif not keep:
        out.first[key] = sample
    else:
        out.samples.setdefault(key, []).append(sample)
        if hasattr(report, "bytes_needed"):
            out.read[key] = (report.bytes_read, report.bytes_needed)
    return agree(rank, fault is None)


def order(names: Iterable[str], rep: int) -> list[str]:
    """Another side begins each round, so that none always runs in the same one's wake."""
    listed = list(names)
    start = rep % len(listed) if listed else 0
    return listed[start:] + listed[:start]


def agree(rank: Rank, good: bool) -> bool:
    import torch
    import torch.distributed as dist

    flag = torch.tensor([int(good)])
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def describe(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300] if text else ''}"


class Figures:
    """The outcomes of all ranks of one job, as samples over repetitions."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes

    def per_rep(self, key: tuple[str, ...], reduce: Any, pick: Any) -> list[float]:
        if self.fault(key) is not None:
            return []
        columns = [[pick(sample) for sample in out.samples.get(key, [])] for out in self.outcomes]
        return [reduce(values) for values in zip(*columns, strict=True)]

    def wall(self, *key: str) -> list[float]:
        return self.per_rep(key, max, lambda s: s.wall)

    def cpu(self, *key: str) -> list[float]:
        return self.per_rep(key, sum, lambda s: s.cpu)

    def peak_mib(self, *key: str) -> list[float]:
        return self.per_rep(key, max, lambda s: s.peak / MIB)

    def amplification(self, *key: str) -> list[float]:
        """Bytes read over bytes needed: from the report, else from what the kernel counted."""
        if all(key in out.read for out in self.outcomes):
            read, needed = (sum(out.read[key][i] for out in self.outcomes) for i in (0, 1))
            return [read / needed]
        needed = sum(out.needed[key[2]] for out in self.outcomes if key[2] in out.needed)
        return [chars / needed for chars in self.per_rep(key, sum, lambda s: s.rchar)]

    def counted(self, *key: str) -> list[float]:
        needed = sum(out.needed[key[2]] for out in self.outcomes if key[2] in out.needed)
        return [chars / needed for chars in self.per_rep(key, sum, lambda s: s.rchar)]

    def fault(self, key: tuple[str, ...]) -> str | None:
        for rank, out in enumerate(self.outcomes):
            if key in out.failed:
                return f"rank {rank}: {out.failed[key]}"
        return None

    def excuse(self, key: tuple[str, ...]) -> str | None:
        """Why a peer that may fail did: what goes in the row's note instead of an error."""
        if key[1] not in MAY_FAIL or self.samples(key):
            return None
        return self.fault(key) or self.fault(("save", key[1])) or "no figure"

    def samples(self, key: tuple[str, ...]) -> bool:
        return self.fault(key) is None and all(key in out.samples for out in self.outcomes)

    def first_wall(self, *key: str) -> float | None:
        return self._first(key, max, lambda s: s.wall)

    def first_cpu(self, *key: str) -> float | None:
        return self._first(key, sum, lambda s: s.cpu)

    def first_peak_mib(self, *key: str) -> float | None:
        return self._first(key, max, lambda s: s.peak / MIB)

    def _first(self, key: tuple[str, ...], reduce: Any, pick: Any) -> float | None:
        """The same of the call that warmed up, which `per_rep` leaves out; None where no rank has one."""
        samples = [out.first[key] for out in self.outcomes if key in out.first]
        return reduce(pick(sample) for sample in samples) if samples else None


def middle(values: list[float]) -> str:
    return f"{sorted(values)[len(values) // 2]:.3g}" if values else "-"
