"""Planning and committing at sizes that no laptop can hold: the numbers are real, the tensors are not there.

A rank's holding is made of names, shapes and boxes only; everything that runs on it is what a real
save runs: the plan, the embedded index, the merge, the coverage check, the encoded index.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.shapes import ADAM, DEEPSEEK_V3_671B, QWEN3_30B_A3B, Catalog, Model, catalog
from holdfast._core.base.options import Options
from holdfast._core.format.columns import Columns
from holdfast._core.format.index import Index
from holdfast._core.format.index_layout import encode
from holdfast._core.io.file_writer import embedded_columns
from holdfast._core.layout.box import whole
from holdfast._core.layout.tensor import CODE_OF, TensorSpec
from holdfast._core.plan.merge import Merger
from holdfast._core.plan.save import plan_save
from holdfast._core.plan.shard_table import SavePlan, ShardTable

DTYPE = {"weight": CODE_OF["bfloat16"]}
FP32 = CODE_OF["float32"]


class Nowhere:
    """Memory of a tensor that is not there."""

    address = 0

    def gather(self, *args: object) -> None:
        raise NotImplementedError

    def scatter(self, *args: object) -> None:
        raise NotImplementedError


def holding(
    cat: Catalog, rank: int, rows: np.ndarray, expert_replica: tuple[int, int], dense_replica: tuple[int, int]
) -> tuple[ShardTable, list[tuple[int, int]]]:
    """What a rank holds: whole per-expert tensors, replicated over its expert-data-parallel group, and
    dense ones, replicated over its data-parallel group."""
    table, nowhere = ShardTable(rank), Nowhere()
    for row in rows.tolist():
        name, shape = cat.names[row], cat.shapes[row]
        dtype = DTYPE.get(name.split(".", 1)[0], FP32)
        replica = dense_replica if cat.experts[row] < 0 else expert_replica
        table.add(TensorSpec(name, dtype, shape), whole(shape), replica, False, nowhere)
    return table, [replica or (0, 1) for replica in table.replicas]


def planned(table: ShardTable, replicas: list[tuple[int, int]]) -> tuple[SavePlan, Columns]:
    """The rank's plan and the index of the file it would write, with digests of zero."""
    plan = plan_save(table, replicas, Options())
    columns, order = embedded_columns(table, plan, plan.chunks, f"data/x-r{table.rank:05d}.safetensors", True)
    starts = np.cumsum(plan.chunks.nbytes) - plan.chunks.nbytes
    columns.position[:] = 4096 + starts[order]
    columns.file_size[:] = 4096 + int(plan.chunks.nbytes.sum())
    return plan, columns


def ranks_of(
    model: Model, world: int, stages: int, ep: int
) -> Iterator[tuple[Catalog, int, np.ndarray, tuple[int, int], tuple[int, int]]]:
    """Every rank of a world of pipeline stages x expert-data-parallel x expert-parallel ranks."""
    cat = catalog(model)
    per_stage = world // stages
    copies = per_stage // ep
    for stage in range(stages):
        for place in range(ep):
            rows = cat.rows(place, ep, stage, stages)
            for copy in range(copies):
                rank = (stage * copies + copy) * ep + place
                yield cat, rank, rows, (copy, copies), (copy * ep + place, per_stage)


def plan_one_rank(reps: int) -> list[float]:
    """CPU seconds to plan a save of Qwen3-30B-A3B with Adam state on one of 32 ranks, EP 8."""
    seconds = []
    _, rank, rows, expert, dense = next(ranks_of(QWEN3_30B_A3B, 32, 1, 8))
    cat = catalog(QWEN3_30B_A3B, ADAM)
    for _ in range(reps):
        begun = time.process_time()
        table, replicas = holding(cat, rank, rows, expert, dense)
        table.check()
        planned(table, replicas)
        seconds.append(time.process_time() - begun)
    return seconds


def merge_ranks(files: list[tuple[int, bytes]]) -> tuple[bytes, Columns]:
    """What the committer does with the embedded indexes of all ranks."""
    merger = Merger()
    for rank, data in files:
        index = Index(
            lambda start, length, data=data: data[start : start + length], len(data), f"rank {rank}"
        )  # type: ignore[misc]
        merger.add(rank, index.embedded())
    columns = merger.finish()
    return encode(columns, {"step": 1}, narrow=True), columns


def merge_qwen(reps: int) -> tuple[list[float], int]:
    """CPU seconds of the commit's merge of 32 ranks, and how many chunks it has."""
    files = []
    for cat, rank, rows, expert, dense in ranks_of(QWEN3_30B_A3B, 32, 1, 8):
        files.append((rank, encode(planned(*holding(cat, rank, rows, expert, dense))[1], {"step": 1})))
    seconds = []
    for _ in range(reps):
        begun = time.process_time()
        _, columns = merge_ranks(files)
        seconds.append(time.process_time() - begun)
    return seconds, len(columns.file)


def simulate_large(world: int, stages: int, out: Path) -> dict[str, float]:
    """The index of DeepSeek-V3 671B over a whole world; only the committer's work is timed."""
    merger, seconds, total = Merger(), 0.0, 0
    for cat, rank, rows, expert, dense in ranks_of(DEEPSEEK_V3_671B, world, stages, 64):
        data = encode(planned(*holding(cat, rank, rows, expert, dense))[1], {"step": 1})
        total += len(data)
        begun = time.process_time()
        index = Index(
            lambda start, length, data=data: data[start : start + length], len(data), f"rank {rank}"
        )  # type: ignore[misc]
        merger.add(rank, index.embedded())
        seconds += time.process_time() - begun
    begun = time.process_time()
    columns = merger.finish()
    encoded = encode(columns, {"step": 1}, narrow=True)
    seconds += time.process_time() - begun
    out.write_bytes(encoded)
    return {
        "seconds": seconds,
        "chunks": len(columns.file),
        "tensors": len(columns.names),
        "index_mb": len(encoded) / 1e6,
        "read_mb": total / 1e6,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def large_in_a_process(world: int, stages: int, out: Path) -> dict[str, float]:
    """`simulate_large` in a process of its own, so that its peak memory is its own."""
    words = [sys.executable, "-m", "bench.scale", str(world), str(stages), str(out)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    found: dict[str, float] = json.loads(done.stdout)
    return found


def open_file(path: Path) -> Index:
    """The index, each time from a freshly opened file."""
    import os

    fd = os.open(path, os.O_RDONLY)
    return Index(lambda start, length: os.pread(fd, length, start), os.fstat(fd).st_size, str(path))


def partial_read(path: Path, ep: int) -> tuple[float, float]:
    """(share of the index's tensors that a rank wants, share of its bytes that it reads for them)."""
    cat = catalog(DEEPSEEK_V3_671B)
    rows = cat.rows(3, ep, 5, 16)
    index = open_file(path)
    found = index.find([cat.names[row] for row in rows.tolist()])
    if (found < 0).any():
        raise ValueError("a name is not found")
    index.select(np.unique(found))
    return len(rows) / index.tensors, index.bytes_read / index.size


def million(path: Path, chunks: int) -> list[str]:
    """Write an index of as many one-chunk tensors; returns some of its names."""
    names = sorted(f"model.layers.{at % 61}.mlp.experts.{at // 61}.w" for at in range(chunks))
    ones = np.arange(1, chunks + 1, dtype="<i8")
    shape = np.full((chunks, 2), 64, "<i8")
    columns = Columns(
        names=names,
        dtype=np.full(chunks, FP32, "u1"),
        kind=np.zeros(chunks, "u1"),
        ndim=np.full(chunks, 2, "u1"),
        shape=shape,
        chunk_end=ones,
        offset=np.zeros((chunks, 2), "<i8"),
        size=shape,
        file=np.zeros(chunks, "<i4"),
        position=(ones - 1) * 64 * 64 * 4,
        block=np.full(chunks, 64 * 64 * 4, "<i8"),
        digest_end=ones,
        digests=np.zeros(chunks, "<u8"),
        file_names=["data/x-r00000.safetensors"],
        file_size=np.asarray([chunks * 64 * 64 * 4], "<i8"),
        file_rank=np.zeros(1, "<i4"),
        witness_offset=np.zeros((0, 2), "<i8"),
        witness_size=np.zeros((0, 2), "<i8"),
    )
    path.write_bytes(encode(columns, {"step": 1}, narrow=True))
    return [names[chunks // 3], names[-1], names[0], names[chunks // 2], names[chunks // 7]]


def find_in_million(path: Path, names: list[str]) -> list[float]:
    """Wall milliseconds to open the index and find one tensor's chunk, a new file descriptor each time."""
    out = []
    for name in names:
        begun = time.perf_counter()
        index = open_file(path)
        row = index.find_one(name)
        found = index.select(np.asarray([row]))
        out.append((time.perf_counter() - begun) * 1e3)
        if found.names != [name] or len(found.position) != 1:
            raise ValueError(f"{name} was not found")
    return out


if __name__ == "__main__":
    print(json.dumps(simulate_large(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))
