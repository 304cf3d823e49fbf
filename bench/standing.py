"""What install() and a session cost a healthy job that they never have to help: threads, descriptors, CPU time.

Eight ranks train a small network and save it by torch's DCP, with and without install() and a session, in turns in the
same processes. CPU time is user and system time of all ranks together, of the steps and the save; the start of a session
is not in it. The more often a machine lets ranks wait for a core, the more beats fall on one step: one a second and rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.before_after import ROOT, environment, source_tree
from bench.harness import Bench, Rank, Sample, attempt, main, median, run_ranks, scratch
from bench.turns import Figures, Outcome, order, turn

RANKS = 8
BEFORE = "28feac5"
"""The last commit at which each part had a thread of its own."""
SIDES = ("stock", "holdfast")
SETTLE = 3.0
"""Seconds until what ends after a save has ended."""
WIDTH, LAYERS, BATCH = 512, 4, 256


class Training:
    """One rank of a data-parallel job."""

    def __init__(self, rank: Rank, folder: Path) -> None:
        import torch

        torch.manual_seed(rank.index)
        self.rank, self.folder, self.saved = rank, folder, 0
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(BATCH, WIDTH)

    def steps(self, count: int) -> None:
        import torch.distributed as dist

        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(self.batch).square().mean().backward()
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
            self.optimizer.step()

    def save(self) -> None:
        import torch.distributed.checkpoint as dcp

        self.saved += 1
        state = {f"rank{self.rank.index}": self.model.state_dict()}
        dcp.save(state, checkpoint_id=self.folder / str(self.saved))


def installed() -> ExitStack:
    """Everything that Holdfast has standing beside a job, until this is closed."""
    import holdfast

    standing = ExitStack()
    holdfast.install()
    standing.callback(holdfast.uninstall)
    standing.enter_context(holdfast.session(warm=False))
    return standing


def count() -> tuple[int, int, int]:
    """Threads of the kernel, of them Holdfast's, and descriptors of this process."""
    ours = sum(thread.name.startswith("holdfast") for thread in threading.enumerate())
    return len(os.listdir("/proc/self/task")), ours, len(os.listdir("/proc/self/fd"))


def cpu_of_own_threads() -> float | None:
    """CPU time of the threads of Holdfast's that stand beside a job; None if there are none."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("holdfast")]
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in ours if thread.ident is not None]
    return sum(map(time.clock_gettime, clocks)) if clocks else None


def counting(rank: Rank, root: Path) -> dict[str, tuple[int, int, int]]:
    training, found = Training(rank, root), {}
    for side in SIDES:
        with installed() if side == "holdfast" else ExitStack():
            training.steps(2)
            training.save()
            time.sleep(SETTLE)
            rank.barrier()
            found[side] = count()
            rank.barrier()
    return found


def counted() -> list[dict[str, tuple[int, int, int]]]:
    """By rank, what stands beside a job with each side."""
    with scratch("tmpfs") as root:
        return run_ranks(counting, RANKS, (root,), limit_s=120.0)


def counted_before() -> list[dict[str, tuple[int, int, int]]]:
    """The same of the commit `BEFORE`."""
    with source_tree(BEFORE) as tree:
        program = "import json; from bench.standing import counted; print(json.dumps(counted()))"
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment(tree),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=240.0,
            check=True,
        )
    return list(json.loads(done.stdout.splitlines()[-1]))


def job(rank: Rank, steps: int, reps: int, root: Path) -> Outcome:
    """Both sides in turns; the first round warms up."""
    out, training = Outcome(), Training(rank, root)
    own: list[Sample] = []
    out.samples["train", "threads"] = own

    def work() -> None:
        before = cpu_of_own_threads()
        training.steps(steps)
        training.save()
        if before is not None and rep:
            own.append(Sample(0.0, (cpu_of_own_threads() or 0.0) - before, 0, 0))

    for rep in range(reps + 1):
        for side in order(SIDES, rep):
            with installed() if side == "holdfast" else ExitStack():
                turn(rank, out, ("train", side), work, keep=rep > 0)
    return out


def run(bench: Bench) -> None:
    now = attempt(bench, "standing threads", counted)
    before = attempt(bench, f"standing threads of {BEFORE}", counted_before)
    for what, which in (("threads of Holdfast's", 1), ("all threads", 0), ("descriptors", 2)):
        bench.compare(
            f"{what} beside a job, install() and session / commit {BEFORE}",
            [one["holdfast"][which] for one in now],
            [one["holdfast"][which] for one in before],
            "a process",
            peer_optional=True,
        )
    for what, which in (("all threads", 0), ("descriptors", 2)):
        bench.compare(
            f"{what} beside a job, install() and session / stock",
            [one["holdfast"][which] for one in now],
            [one["stock"][which] for one in now],
            "a process",
        )
    steps = 10 if bench.quick else 60
    with scratch("tmpfs") as root:
        figures = Figures(run_ranks(job, RANKS, (steps, bench.reps, root), limit_s=900.0))
    for side in SIDES:
        if (fault := figures.fault(("train", side))) is not None:
            bench.error(f"{side}: {fault}")
    sides: dict[str, Any] = {side: figures.cpu("train", side) for side in SIDES}
    each = [ours / stock for ours, stock in zip(sides["holdfast"], sides["stock"], strict=True)]
    bench.compare(
        f"CPU time of {steps} steps and a save of {RANKS} ranks, with install() and session / stock",
        sides["holdfast"],
        sides["stock"],
        "s",
        limit=0.98,
        note=f"in single turns {min(each):.3f} to {max(each):.3f} of stock's, the median {median(each):.3f}"
        if each
        else "",
    )
    bench.compare(
        f"CPU time of {steps} steps and a save of {RANKS} ranks, of it in Holdfast's threads / 2 % of stock's",
        figures.cpu("train", "threads"),
        [0.02 * seconds for seconds in sides["stock"]],
        "s",
        limit=1.0,
        note="read from the clocks of these threads, so that the noise of the machine is not in it",
    )
    bench.compare(
        f"wall time of {steps} steps and a save of {RANKS} ranks, with install() and session / stock",
        figures.wall("train", "holdfast"),
        figures.wall("train", "stock"),
        "s",
    )


if __name__ == "__main__":
    sys.exit(main("standing", run))
