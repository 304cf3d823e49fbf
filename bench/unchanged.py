"""What `Options(link_unchanged=True)` saves where nine tenths of a state stay as they are, and costs where all changes.

`floor` is what can't be avoided: hashing what is unchanged, and a save of the rest alone. Bytes are those that the ranks
report as written. Each save follows one of the same side, whose step is then removed.
"""

from __future__ import annotations

import ctypes
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.harness import MIB, Bench, Rank, main, median, run_ranks, scratch
from bench.turns import Figures, Outcome, order, turn

RANKS, REPS, TENTHS = 2, 7, 10
ASKED_BYTES = 0.11
SIDES = ("linked", "all", "floor")


@dataclass(frozen=True)
class Case:
    label: str
    count: int
    """Tensors of a rank."""
    nbytes: int
    """Of a tensor."""
    frozen: bool
    """Does all but a tenth stay as it is?"""


def job(rank: Rank, case: Case, reps: int, root: Path) -> tuple[Outcome, list[int]]:
    """Also returns the bytes that this rank has written: the first time, and then once a repetition."""
    import holdfast
    from holdfast._core.format.digest import MAX_BLOCK, digest

    out, wrote = Outcome(), list[int]()
    state = {f"rank{rank.index}.w{at}": torch.zeros(case.nbytes // 4) for at in range(case.count)}
    frozen = set(list(state)[case.count // TENTHS :] if case.frozen else [])
    rest: dict[str, Any] = {name: value for name, value in state.items() if name not in frozen}
    options = {side: holdfast.Options(link_unchanged=side == "linked") for side in SIDES}
    block = min(MAX_BLOCK, case.nbytes)

    def save(side: str, path: Path) -> None:
        if side == "floor":
            for name in frozen:
                for low in range(0, case.nbytes, block):
                    digest((ctypes.c_ubyte * block).from_address(state[name].data_ptr() + low))
        saved = rest if side == "floor" else state
        report = holdfast.save(saved, path, job=holdfast.Job(options=options[side]))
        if side == "linked":
            wrote.append(report.bytes_written)

    for rep in range(reps + 2):
        for value in rest.values():
            value.add_(1)
        for side in order(SIDES, rep):
            call = lambda: save(side, root / side / f"step-{rep}")  # noqa: B023, E731
            if rep == 0:  # it writes all
                rank.together(call)
            else:
                turn(rank, out, (case.label, side), call, keep=rep > 1)
            if rank.index == 0 and rep:
                shutil.rmtree(root / side / f"step-{rep - 1}")
    return out, wrote


def run(bench: Bench) -> None:
    counts = (40, 400) if bench.quick else (100, 5000)
    for place in ("tmpfs", "disk"):
        for count, label, nbytes in zip(counts, ("4 MiB", "16 KiB"), (4 * MIB, 16 << 10), strict=True):
            for frozen in (True, False):
                case = Case(label, count, nbytes, frozen)
                with scratch(place) as root:
                    found = run_ranks(job, RANKS, (case, REPS, root), limit_s=300.0)
                rows(bench, case, place, Figures([out for out, _ in found]), [wrote for _, wrote in found])


def rows(bench: Bench, case: Case, place: str, figures: Figures, wrote: list[list[int]]) -> None:
    for side in SIDES:
        if (fault := figures.fault((case.label, side))) is not None:
            bench.error(f"{case}, {place}, {side}: {fault}")
    state = "nine tenths unchanged" if case.frozen else "all of it changed"
    what = f"second save of {case.count} x {case.label} a rank, {RANKS} ranks, {state}, {place}"
    if case.frozen and place == "tmpfs":
        first, *later = map(sum, zip(*wrote, strict=True))
        bench.target(
            f"{what}: bytes written / those of the first", [each / first for each in later], ASKED_BYTES, "x"
        )
    for peer, words in (("all", "without the option"), ("floor", "floor")):
        if case.frozen or peer == "all":
            bench.compare(
                f"{what} / {words}",
                figures.wall(case.label, "linked"),
                figures.wall(case.label, peer),
                "s",
                first=figures.first_wall(case.label, "linked"),
                peer_first=figures.first_wall(case.label, peer),
                note="CPU, all ranks: " + " and ".join(cpu(figures, case, side) for side in ("linked", peer)),
            )


def cpu(figures: Figures, case: Case, side: str) -> str:
    found = median(figures.cpu(case.label, side))
    return "none" if found is None else f"{found:.3g} s"


if __name__ == "__main__":
    sys.exit(main("unchanged", run))
