"""What one tensor costs in CPU time: many small tensors and a few large ones, on tmpfs.

CPU seconds over all ranks, children included. Ours writes digests and checks them on load; of the peers
none verifies, and safetensors does not fsync. The floor is pwritev and preadv of views made beforehand. All loads
end in the live tensors and are compared.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.harness import GB, Bench, Rank, main, run_ranks, scratch
from bench.moe_state import State, poison
from bench.peers import PLAIN, Plain
from bench.turns import Figures, Outcome, order, turn

TARGET_US, TARGET_SAVED, TARGET_LOADED = 40.0, 1.2, 2.3
PEERS = ("DCP", "safetensors", "floor")


@dataclass(frozen=True)
class Case:
    label: str
    count: int  # tensors a rank
    size: int  # bytes a tensor
    world: int

    @property
    def small(self) -> bool:
        return self.size < 1 << 20

    @property
    def total(self) -> int:
        return self.count * self.world


def base(case: Case) -> torch.Tensor:
    return torch.arange(case.size // 4, dtype=torch.int32) * 40_503


def build(case: Case, rank: int) -> State:
    first = base(case)
    return {f"r{rank}.t{i}": first + (rank * case.count + i) for i in range(case.count)}


def check(case: Case, rank: int, state: State) -> None:
    first, right = base(case), torch.empty(case.size // 4, dtype=torch.int32)
    for i, (name, tensor) in enumerate(state.items()):
        torch.add(first, rank * case.count + i, out=right)
        if not torch.equal(tensor, right):
            raise ValueError(f"{name} holds a wrong value")


def job(rank: Rank, case: Case, reps: int, root: Path, names: tuple[str, ...]) -> Outcome:
    """Saves and loads of the sides of these names, in turns."""
    out = Outcome()
    state = build(case, rank.index)
    sides = {name: PLAIN[name](state) for name in names}
    for rep in range(reps + 1):  # the first round warms up
        for name in order(sides, rep):
            path = root / f"{name}-{rep}"
            if not round_trip(rank, out, case, state, sides[name], path, keep=rep > 0):
                del sides[name]
            if rank.index == 0:
                shutil.rmtree(path, ignore_errors=True)
            rank.barrier()
    return out


def round_trip(
    rank: Rank, out: Outcome, case: Case, state: State, side: Plain, path: Path, *, keep: bool
) -> bool:
    if not turn(rank, out, ("save", side.name), lambda: side.save(path), keep=keep):
        return False
    poison(state)
    return turn(
        rank,
        out,
        ("load", side.name),
        lambda: side.load(path),
        keep=keep,
        check=lambda: check(case, rank.index, state),
    )


def rows(bench: Bench, case: Case, figures: Figures) -> None:
    for verb in ("save", "load"):
        what = f"{verb} {case.count:,} x {case.label}, {case.world} rank{'s' if case.world > 1 else ''}"
        ours = cost(case, figures, verb, "holdfast")
        for name in (*PEERS, "holdfast"):
            if (fault := figures.fault((verb, name))) is not None:
                bench.error(f"{what}, {name}: {fault}")
        unit = "us CPU/tensor" if case.small else "GB/s-core"
        for peer in PEERS:
            bench.compare(
                f"{what} / {peer}",
                ours,
                cost(case, figures, verb, peer),
                unit,
                higher_is_better=not case.small,
                note=NOTES[peer],
                first=first_cost(case, figures, verb, "holdfast"),
                peer_first=first_cost(case, figures, verb, peer),
            )
        target = TARGET_US if case.small else TARGET_SAVED if verb == "save" else TARGET_LOADED
        bench.target(
            what,
            ours,
            target,
            unit,
            higher_is_better=not case.small,
            first=first_cost(case, figures, verb, "holdfast"),
        )


NOTES = {
    "DCP": "peer unverified",
    "safetensors": "peer unsynced, unverified",
    "floor": "plain pwritev and preadv of views made beforehand",
}


def cost(case: Case, figures: Figures, verb: str, side: str) -> list[float]:
    return [in_unit(case, seconds) for seconds in figures.cpu(verb, side)]


def first_cost(case: Case, figures: Figures, verb: str, side: str) -> float | None:
    seconds = figures.first_cpu(verb, side)
    return None if seconds is None else in_unit(case, seconds)


def in_unit(case: Case, seconds: float) -> float:
    """CPU seconds as microseconds a tensor, or as gigabytes a second of one core."""
    return seconds / case.total * 1e6 if case.small else case.total * case.size / GB / seconds


def run(bench: Bench) -> None:
    small, large = (1_000, 32) if bench.quick else (12_000, 128)
    for world in (1, 4):
        for case in (Case("16 KiB", small, 16 << 10, world), Case("4 MiB", large, 4 << 20, world)):
            with scratch("tmpfs") as root:
                outcomes = run_ranks(
                    job,
                    world,
                    (case, bench.reps, root, tuple(PLAIN)),
                    limit_s=300.0 if bench.quick else 900.0,
                )
            rows(bench, case, Figures(outcomes))


if __name__ == "__main__":
    sys.exit(main("per_tensor", run))
