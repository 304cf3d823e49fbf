"""How costs grow: with ranks, tensors, steps and files. Exponents in the table, curves in docs/growth.svg.

An exponent of 1 is a cost in proportion to the size; fixed costs make it smaller.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.harness import Bench, Rank, attempt, main, run_ranks, scratch

PLOT = Path(__file__).resolve().parents[1] / "docs" / "growth.svg"
STEEPEST = 1.15
REPS = 3
"""Calls at each size, the same for all: the first of them pays for fresh memory."""


class Law(NamedTuple):
    """One curve: what was measured, at which sizes."""

    title: str
    unit: str
    of: str
    points: dict[int, float]

    @property
    def exponent(self) -> float:
        """The slope between the largest size and the one that is at least a tenth of it."""
        sizes = sorted(self.points)
        large = sizes[-1]
        small = next(size for size in sizes if 10 * size >= large)
        return math.log(self.points[large] / self.points[small]) / math.log(large / small)


def best(call: Callable[[], object], reps: int) -> float:
    """CPU seconds of the quickest of some calls."""
    seconds = []
    for _ in range(reps):
        begun = time.process_time()
        call()
        seconds.append(time.process_time() - begun)
    return min(seconds)


def of_tensors(sizes: list[int]) -> list[Law]:
    """Plan a save, commit it, and plan a load, of as many small tensors on one rank."""
    from bench.scale import FP32, Nowhere, merge_ranks, planned
    from holdfast._core.format.index import Index
    from holdfast._core.format.index_layout import encode
    from holdfast._core.io.file_reader import plan_read
    from holdfast._core.layout.box import whole
    from holdfast._core.layout.tensor import TensorSpec
    from holdfast._core.plan.shard_table import ShardTable

    save, commit, load = {}, {}, {}
    for size in sizes:
        table, nowhere = ShardTable(0), Nowhere()
        for number in range(size):
            name = f"model.layers.{number % 61}.experts.{number // 61}.w"
            table.add(TensorSpec(name, FP32, (64, 64)), whole((64, 64)), (0, 1), False, nowhere)
        replicas = [(0, 1)] * size
        embedded = b""

        def plan() -> None:
            nonlocal embedded
            embedded = encode(planned(table, replicas)[1], {"step": 1})  # noqa: B023

        save[size] = best(plan, REPS)
        data = b""

        def merge() -> None:
            nonlocal data
            data = merge_ranks([(0, embedded)])[0]  # noqa: B023

        commit[size] = best(merge, REPS)
        names = [spec.name for spec in table.specs]

        def read() -> None:
            index = Index(lambda start, length: data[start : start + length], len(data), "index")  # noqa: B023
            found, position = np.unique(index.find(names), return_inverse=True)  # noqa: B023
            plan_read(table, position, index.select(found), "index")  # noqa: B023

        load[size] = best(read, REPS)
    titles = ("plan a save", "commit", "plan a load")
    return [
        Law(title, "s CPU", "tensors", law) for title, law in zip(titles, (save, commit, load), strict=True)
    ]


def of_ranks(sizes: list[int]) -> Law:
    """Commit eight tensors that are sharded by rows over all ranks, and a replica of a ninth."""
    from bench.scale import FP32, Nowhere, planned
    from holdfast._core.format.index import Index
    from holdfast._core.format.index_layout import encode
    from holdfast._core.layout.box import Box
    from holdfast._core.layout.tensor import TensorSpec
    from holdfast._core.plan.merge import Merger
    from holdfast._core.plan.shard_table import ShardTable

    points = {}
    for world in sizes:
        merger, seconds, nowhere = Merger(), 0.0, Nowhere()
        for rank in range(world):
            table = ShardTable(rank)
            for number in range(8):
                spec = TensorSpec(f"layers.{number}.w", FP32, (world, 64))
                table.add(spec, Box((rank, 0), (1, 64)), (0, 1), False, nowhere)
            table.add(TensorSpec("norm", FP32, (64,)), Box((0,), (64,)), (rank, world), False, nowhere)
            replicas = [replica or (0, 1) for replica in table.replicas]
            data = encode(planned(table, replicas)[1], {"step": 1})
            begun = time.process_time()
            index = Index(
                lambda start, length, data=data: data[start : start + length], len(data), "", whole=True
            )  # type: ignore[misc]
            merger.add(rank, index.embedded())
            seconds += time.process_time() - begun
        seconds += best(lambda: encode(merger.finish(), {"step": 1}, narrow=True), 1)  # noqa: B023
        points[world] = seconds
    return Law("commit, simulated", "s CPU", "ranks", points)


def save_small(rank: Rank, folder: Path, reps: int) -> float:
    """CPU seconds of one rank in a save and a load of ten small tensors."""
    import torch

    import holdfast

    torch.set_num_threads(1)
    state = {f"w{number}": holdfast.PerRank(torch.ones(256)) for number in range(10)}
    seconds = []
    for step in range(reps):
        rank.barrier()
        begun = time.process_time()
        holdfast.save(state, folder / f"step-{step}", step=step)
        holdfast.load(state, folder / f"step-{step}")
        seconds.append(time.process_time() - begun)
    return min(seconds[1:])


def of_real_ranks(sizes: list[int]) -> Law:
    points = {}
    for world in sizes:
        with scratch("tmpfs") as folder:
            points[world] = sum(run_ranks(save_small, world, (folder, 4), limit_s=600.0))
    return Law("save and load, real processes", "s CPU of all", "ranks", points)


def of_steps(sizes: list[int]) -> Law:
    """Find the newest step of a run. Steps are hard links to the files of one."""
    import torch

    import holdfast

    points = {}
    with scratch("tmpfs") as folder:
        one = folder / "one"
        holdfast.save({"w": torch.ones(4)}, one, step=1, job=holdfast.Job(no_dist=True))
        files = [path for path in one.rglob("*") if path.is_file()]
        run, made = folder / "run", 0
        for size in sizes:
            for number in range(made, size):
                for file in files:
                    target = run / f"step-{number:08d}" / file.relative_to(one)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.link(file, target)
            made = size
            points[size] = best(lambda: holdfast.latest(run), 5)
    return Law("find the newest step", "s CPU", "steps", points)


def of_files(sizes: list[int]) -> Law:
    """Read back and commit one file of each rank, from storage."""
    from bench.scale import FP32
    from holdfast._core.base.deadline import REAL_CLOCK, Deadline
    from holdfast._core.base.options import Options
    from holdfast._core.io.file_writer import WriteRequest, write_files
    from holdfast._core.layout.box import Box
    from holdfast._core.layout.tensor import TensorSpec
    from holdfast._core.plan.save import plan_save
    from holdfast._core.plan.shard_table import ShardTable
    from holdfast._core.protocol.messages import Written
    from holdfast._core.saving.commit import Commit
    from holdfast._core.store.local import LocalStore

    class Row:
        data = np.ones(64, "f4")
        address = data.ctypes.data

        def gather(self, *args: object) -> None:
            raise NotImplementedError

        def scatter(self, *args: object) -> None:
            raise NotImplementedError

    points = {}
    for size in sizes:
        with scratch("tmpfs") as folder:
            store = LocalStore(folder / "step")
            about = {"step": 1, "grid": None, "notes": None, "attempt": "a", "ranks": size}
            written = {}
            for rank in range(size):
                table = ShardTable(rank)
                table.add(TensorSpec("w", FP32, (size, 64)), Box((rank, 0), (1, 64)), (0, 1), False, Row())
                request = WriteRequest(
                    store, table, plan_save(table, [(0, 1)], Options()), about, Options(), lambda _: None
                )
                written[rank] = Written(1, None, write_files(request), {})
            commit = Commit(
                store,
                "save",
                Deadline(600.0, REAL_CLOCK),
                dict(about),
                None,
                None,
                "",
                lambda _: [],
                lambda: None,
            )
            points[size] = best(lambda: commit.prepare(written), 1)  # noqa: B023
    return Law("read back and commit", "s CPU", "files", points)


def plot(laws: list[Law]) -> None:
    """Draw all curves, one panel for each size that grows."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "holdfast"
    kinds = list(dict.fromkeys(law.of for law in laws))
    figure, panels = pyplot.subplots(1, len(kinds), figsize=(3.4 * len(kinds), 3.2), layout="constrained")
    for panel, kind in zip(panels, kinds, strict=True):
        for law in (one for one in laws if one.of == kind):
            sizes = sorted(law.points)
            panel.loglog(
                sizes,
                [law.points[size] for size in sizes],
                "o-",
                ms=4,
                label=f"{law.title} (n^{law.exponent:.2f})",
            )
        low, high = panel.get_ylim()
        left, right = panel.get_xlim()
        panel.plot([left, right], [low, low * right / left], ":", color="gray", lw=1, label="in proportion")
        panel.set(xlim=(left, right), ylim=(low, max(high, low * 10)), xlabel=kind, ylabel="s CPU")
        panel.legend(fontsize=7, frameon=False)
        panel.grid(True, which="major", lw=0.3)
    figure.savefig(PLOT, metadata={"Date": None})


def run(bench: Bench) -> None:
    few = bench.quick
    found: list[Law] = []
    for what, call in (
        ("tensors", lambda: of_tensors([1000, 10_000] if few else [1000, 10_000, 100_000, 1_000_000])),
        ("ranks", lambda: [of_ranks([64, 640] if few else [64, 512, 4096, 10_240, 100_000])]),
        ("real ranks", lambda: [of_real_ranks([8, 16] if few else [8, 16, 32, 64])]),
        ("steps", lambda: [of_steps([10, 100, 1000] if few else [10, 100, 1000, 10_000])]),
        ("files", lambda: [of_files([10, 100] if few else [10, 100, 1000, 10_000])]),
    ):
        found += attempt(bench, what, call)
    for law in found:
        curve = ", ".join(f"{size:,}: {law.points[size]:.3g}" for size in sorted(law.points))
        bench.target(
            f"{law.title}, growth exponent with {law.of}",
            [law.exponent],
            STEEPEST,
            "",
            note=f"{law.unit} at {curve}",
        )
    if not few and found:
        plot(found)


if __name__ == "__main__":
    sys.exit(main("growth", run))
