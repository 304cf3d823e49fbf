"""Planning: is every chunk there exactly once, and how does the answer's cost grow.

The peer is torch DCP's own check of a global plan, on Megatron's stacked fc1 key of Qwen3-30B-A3B.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bench.harness import Bench, attempt, main, scratch
from bench.shapes import Shape, stacked_fc1_chunks

FASTER, EXPONENT = 1000.0, 1.1


# ----------------------------------------------------------------------------------------------- ours


def ours_coverage(shape: Shape, offsets: np.ndarray, sizes: np.ndarray) -> bool:
    """WIRED HERE, and only here: True if the chunks cover the shape exactly once."""
    from holdfast._core.layout.coverage import first_problem

    tensors = np.zeros(len(offsets), np.int64)
    return first_problem(np.asarray([shape], np.int64), tensors, offsets, sizes) is None


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


def plan_rows(bench: Bench) -> None:
    """Save planning of one rank, and the commit's merge, for Qwen3-30B-A3B with Adam state."""
    from bench.scale import merge_qwen, plan_one_rank

    bench.target(
        "plan a save of one rank of Qwen3-30B-A3B with Adam, EP 8 of 32 ranks",
        attempt(bench, "save planning", lambda: plan_one_rank(bench.reps)),
        0.5,
        "s CPU",
        note="10,956 tensors: replicas, plan, header and embedded index",
    )
    merged = attempt(bench, "commit merge", lambda: [*merge_qwen(bench.reps)])
    bench.target(
        "merge and check 32 ranks of Qwen3-30B-A3B with Adam at the commit",
        merged[0] if merged else [],
        3.0,
        "s CPU",
        note=f"{merged[1]:,} chunks" if merged else "",
    )


def large_rows(bench: Bench) -> None:
    """The index of a 671B model over 10,240 simulated ranks, and what a loading rank reads of it."""
    from bench.scale import large_in_a_process, partial_read

    world = 1024 if bench.quick else 10_240
    with scratch("disk") as folder:
        path = folder / "large.safetensors"
        found = attempt(bench, "large index", lambda: [large_in_a_process(world, 16, path)])
        what = f"DeepSeek-V3 671B over {world:,} simulated ranks"
        note = ""
        if found:
            note = (
                f"{found[0]['chunks']:,.0f} chunks of {found[0]['tensors']:,.0f} tensors; {found[0]['read_mb']:.0f} MB of "
                f"embedded indexes read, index {found[0]['index_mb']:.0f} MB"
            )
        bench.target(f"build the index of {what}", [f["seconds"] for f in found], 60.0, "s CPU", note=note)
        bench.target("peak memory of that", [f["peak_gib"] for f in found], 8.0, "GiB")
        shares = attempt(bench, "partial read", lambda: [*partial_read(path, 8)]) if found else []
        note = f"the rank wants {shares[0]:.2%} of the tensors" if shares else ""
        bench.target("share of that index which one loading rank reads", shares[1:], 0.1, "", note=note)


def million_rows(bench: Bench) -> None:
    from bench.scale import find_in_million, million

    with scratch("disk") as folder:
        path = folder / "million.safetensors"
        times = attempt(bench, "million", lambda: find_in_million(path, million(path, 1_000_000)))
        bench.target(
            "open an index of 1,000,000 chunks and find one tensor", times, 20.0, "ms", note="warm page cache"
        )


def start_rows(bench: Bench) -> None:
    """Wall time of commands, as a user waits for them."""
    import holdfast

    with scratch("disk") as folder:
        import torch

        holdfast.Checkpoints(folder, asynchronous=False).save(
            1, {f"w{at}": torch.zeros(4) for at in range(20)}
        )
        step = str(folder / "step-00000001")
        for words in (["--help"], ["latest", str(folder)], ["inspect", step]):
            times = attempt(bench, f"holdfast {words[0]}", lambda: [command(words) for _ in range(7)])  # noqa: B023
            bench.target(
                f"`holdfast {words[0]}` starts and ends",
                times,
                200.0,
                "ms",
                note="wall, interpreter included",
            )


def command(words: list[str]) -> float:
    program = Path(sys.executable).with_name("holdfast")
    begun = time.perf_counter()
    subprocess.run([str(program), *words], check=True, capture_output=True, timeout=30)
    return (time.perf_counter() - begun) * 1e3


def run(bench: Bench) -> None:
    coverage_rows(bench)
    plan_rows(bench)
    large_rows(bench)
    million_rows(bench)
    start_rows(bench)


if __name__ == "__main__":
    sys.exit(main("planning", run))
