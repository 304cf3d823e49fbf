"""Planning: is every chunk there exactly once, and how does the answer's cost grow.

The peer is torch DCP's own check of a global plan, on Megatron's stacked fc1 key of Qwen3-30B-A3B.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from bench.harness import Bench, main
from bench.shapes import Shape, stacked_fc1_chunks

FASTER, EXPONENT = 1000.0, 1.1


# ----------------------------------------------------------------------------------------------- ours


def ours_coverage(shape: Shape, offsets: np.ndarray, sizes: np.ndarray) -> bool:
    """WIRED HERE, and only here: True if the chunks cover the shape exactly once."""
    from holdfast.layout.coverage import tiles

    return tiles(shape, offsets, sizes)


# ---------------------------------------------------------------------------------------------- peers


def dcp_plan(shape: Shape, offsets: Sequence[Shape], size: Shape) -> Callable[[], bool]:
    """DCP's check of one key, with its metadata made beforehand."""
    import torch
    from torch.distributed.checkpoint.default_planner import _validate_global_plan
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner import SavePlan

    chunks = [ChunkStorageMetadata(torch.Size(offset), torch.Size(size)) for offset in offsets]
    stored = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size(shape), chunks)
    metadata = Metadata({"experts.linear_fc1.weight": stored})
    plans = [SavePlan([]), SavePlan([])]  # only their number is looked at
    return lambda: not _validate_global_plan(plans, metadata)


# --------------------------------------------------------------------------------------------- timing


def timed(call: Callable[[], bool], expected: bool = True) -> float:
    start = time.process_time()
    answer = call()
    seconds = time.process_time() - start
    if answer is not expected:
        raise ValueError(f"the check said {answer}, expected {expected}")
    return seconds


def ours_seconds(layers: int, reps: int) -> list[float]:
    shape, listed, size = stacked_fc1_chunks(layers)
    offsets = np.asarray(listed, np.int64)
    sizes = np.broadcast_to(np.asarray(size, np.int64), offsets.shape).copy()
    ours_coverage(shape, offsets, sizes)  # warms up
    times = [timed(lambda: ours_coverage(shape, offsets, sizes)) for _ in range(reps)]
    gap, double = offsets[:-1], offsets.copy()
    double[-1] = double[0]
    for bad in (gap, double):  # a check that never says no is not a check
        timed(lambda: ours_coverage(shape, bad, sizes[: len(bad)]), expected=False)  # noqa: B023
    return times


def chunks_in(layers: int) -> int:
    return len(stacked_fc1_chunks(layers)[1])


def exponent(small: float, large: float, growth: float) -> float:
    return math.log(large / small) / math.log(growth)


def attempt(bench: Bench, what: str, call: Callable[[], list[float]]) -> list[float]:
    try:
        return call()
    except Exception as error:
        bench.error(f"{what}: {type(error).__name__}: {error}")
        return []


def coverage_rows(bench: Bench) -> None:
    layers = 12 if bench.quick else 48
    quarter = layers // 4
    shape, offsets, size = stacked_fc1_chunks(layers)
    ours = attempt(bench, "coverage, ours", lambda: ours_seconds(layers, 5))
    peer_small = attempt(bench, "coverage, DCP", lambda: [timed(dcp_plan(*stacked_fc1_chunks(quarter)))])
    peer = attempt(bench, "coverage, DCP", lambda: [timed(dcp_plan(shape, offsets, size))])
    bench.compare(
        f"coverage of {len(offsets):,} chunks / DCP _validate_global_plan",
        ours,
        peer,
        "s CPU",
        limit=FASTER,
        note="peer once; each in its own form, made beforehand",
    )

    few, many = 12, 1172  # 3,072 and 300,032 chunks
    sizes = [attempt(bench, "coverage growth, ours", lambda: ours_seconds(n, 5)) for n in (few, many)]  # noqa: B023
    grown = [exponent(min(sizes[0]), min(sizes[1]), many / few)] if all(sizes) else []
    what = f"coverage, growth exponent {chunks_in(few):,} to {chunks_in(many):,} chunks"
    note = f"{min(sizes[0]):.4f} s to {min(sizes[1]):.3f} s CPU" if all(sizes) else ""
    bench.target(what, grown, EXPONENT, "", note=note)
    peer_grown = [exponent(peer_small[0], peer[0], 4)] if peer_small and peer and peer_small[0] else []
    bench.compare(
        "coverage, growth exponent / DCP",
        grown,
        peer_grown,
        "",
        note=f"peer from {chunks_in(quarter):,} to {len(offsets):,} chunks",
    )


def run(bench: Bench) -> None:
    coverage_rows(bench)
    # TO WIRE, once the internals exist (shapes: QWEN3_30B_A3B.held_by, DEEPSEEK_V3_671B.adam_specs):
    # save planning of one Qwen3-30B-A3B rank, commit merge of 32 ranks, index of 10,000 simulated ranks,
    # partial index read, opening 1,000,000 chunks, start of the command line.


if __name__ == "__main__":
    sys.exit(main("planning", run))
