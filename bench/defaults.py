"""What the default of `check_replicas` costs: plain tensors that two ranks hold are hashed by both.

CPU seconds over both ranks, on tmpfs. A save with `check_replicas="off"` hashes every byte once, on the rank that writes
it; what the others hash besides is the difference.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch

from bench.harness import GB, MIB, Bench, Rank, main, run_ranks, scratch
from bench.turns import Figures, Outcome, order, turn

MODES = ("off", "sample", "auto")
RANKS, TENSOR, REPS = 2, 4 * MIB, 9
TARGET_S = 0.1


def job(rank: Rank, tensors: int, reps: int, root: Path) -> Outcome:
    import holdfast

    out = Outcome()
    made = torch.Generator().manual_seed(0)  # the same on both ranks: undeclared replicas
    state = {f"w{at}": torch.randn(TENSOR // 4, generator=made) for at in range(tensors)}
    options = {mode: holdfast.Options(check_replicas=mode) for mode in MODES}
    for rep in range(reps + 1):
        for mode in order(MODES, rep):
            path = root / f"{mode}-{rep}"
            call = lambda: holdfast.save(state, path, job=holdfast.Job(options=options[mode]))  # noqa: B023, E731
            turn(rank, out, ("save", mode), call, keep=rep > 0)
            if rank.index == 0:
                shutil.rmtree(path, ignore_errors=True)
    return out


def run(bench: Bench) -> None:
    tensors = 16 if bench.quick else 128
    with scratch("tmpfs") as root:
        figures = Figures(run_ranks(job, RANKS, (tensors, REPS, root), limit_s=300.0))
    for mode in MODES:
        if (fault := figures.fault(("save", mode))) is not None:
            bench.error(f"{mode}: {fault}")
    size = tensors * TENSOR / GB
    what = f"of {size:.2f} GB of plain tensors that {RANKS} ranks hold"
    pairs = zip(figures.cpu("save", "auto"), figures.cpu("save", "off"), strict=True)
    more = [(auto - off) / (size * (RANKS - 1)) for auto, off in pairs]
    bench.target(f'check_replicas="auto" {what}, above "off"', more, TARGET_S, "s CPU/GB")
    for mode in MODES[1:]:
        bench.compare(
            f'save {what}, check_replicas="{mode}" / "off"',
            figures.wall("save", mode),
            figures.wall("save", "off"),
            "s",
            first=figures.first_wall("save", mode),
            peer_first=figures.first_wall("save", "off"),
        )


if __name__ == "__main__":
    sys.exit(main("defaults", run))
