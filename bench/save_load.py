"""Eight ranks save and load a mixture-of-experts state with Adam; ours beside the peers and raw I/O.

One job a peer: ours and the peer take turns on the same ranks with the same state, so a figure is always
compared with what the machine gave at the same time. Raw I/O takes turns with DCP, in calls of the size that
was best for it on that file system just before. A load is checked element by element.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.harness import GB, MIB, Bench, Rank, main, median, run_ranks, scratch
from bench.moe_state import Layout, Piece, State, build, pieces, poison, total, unique_bytes, wrong
from bench.peers import BATCHES, SIDES, Raw
from bench.rows import number
from bench.shapes import SMALL_MOE, TINY_MOE, Model
from bench.turns import Figures, Outcome, agree, describe, middle, order, turn

RAW = ("raw", "verified")
PEERS = ("DCP", "mcore", "torch_checkpointing")
FASTER = {"DCP": 2.5, "mcore": 4.0, "torch_checkpointing": None}
FASTER_LOAD = {"DCP": 2.5, "mcore": 2.5, "torch_checkpointing": None}
SAVE_OVER_RAW, LOAD_OVER_RAW, AMPLIFICATION, PEAK_MIB = 1.35, 1.3, 1.02, 64
SIZES = ", ".join(str(size // MIB) for size in BATCHES)


@dataclass(frozen=True)
class Plan:
    """What one job does on every rank."""

    model: Model
    saved: Layout
    loaded: tuple[Layout, ...]
    sides: tuple[str, ...]
    reps: int
    root: Path
    load: bool
    raw: int  # bytes that a raw call writes


def raw_saves(rank: Rank, plan: Plan) -> dict[int, list[float]]:
    """Seconds of raw saves on this rank, by the size of their calls, in turns."""
    own = pieces(plan.model, plan.saved, rank.index)
    state = build(own)
    sides = {size: Raw(size) for size in BATCHES}
    for side in sides.values():
        side.prepare(plan.model, plan.saved, own, state)
    found: dict[int, list[float]] = {size: [] for size in BATCHES}
    for rep in range(4):  # the first round warms up
        for size in (*BATCHES[rep % len(BATCHES) :], *BATCHES[: rep % len(BATCHES)]):
            path = plan.root / f"raw-{size}"
            sample, _ = rank.together(lambda: sides[size].save(path))  # noqa: B023
            found[size] += [sample.wall] if rep else []
            if rank.index == 0:
                shutil.rmtree(path)
    return found


def best_raw(plan: Plan, limit_s: float) -> int:
    """The size of the calls with which raw saves are fastest here: that is the limit to compare with."""
    found = run_ranks(raw_saves, plan.saved.world, (plan,), limit_s=limit_s)
    walls = {
        size: median([max(reps) for reps in zip(*(one[size] for one in found), strict=True)])
        for size in BATCHES
    }
    return min(BATCHES, key=lambda size: walls[size] or 0.0)


def job(rank: Rank, plan: Plan) -> Outcome:
    """The rank's side of a job. All ranks take the same turns; a side that fails is dropped by all."""
    out = Outcome()
    own = pieces(plan.model, plan.saved, rank.index)
    state = build(own)
    sides = {
        name: side
        for name in plan.sides
        if (side := prepare(rank, name, None, plan, plan.saved, own, state, out)) is not None
    }
    for rep in range(plan.reps + 1):  # the first round warms up; the loads read what the last one saved
        for name in order(sides, rep):
            key = ("save", name)
            path = saved_path(plan, name, rep)
            if not turn(rank, out, key, lambda: sides[name].save(path), keep=rep > 0):  # noqa: B023
                del sides[name]
            if rank.index == 0 and (rep < plan.reps or not plan.load):
                shutil.rmtree(path, ignore_errors=True)
    if plan.load:
        for layout in plan.loaded:
            for side in sides.values():  # the old state goes before the new one comes
                side.release()
            del own, state
            own = pieces(plan.model, layout, rank.index)
            state = build(own)
            load_all(rank, plan, layout, own, state, sides, out)
    return out


def saved_path(plan: Plan, name: str, rep: int) -> Path:
    return plan.root / f"{name}-{rep}"


def load_all(
    rank: Rank,
    plan: Plan,
    layout: Layout,
    own: list[Piece],
    state: State,
    saved: dict[str, Any],
    out: Outcome,
) -> None:
    where = str(layout)
    out.needed[where] = total(own)
    sides = {
        name: side
        for name, old in saved.items()
        if (side := prepare(rank, name, old, plan, layout, own, state, out)) is not None
    }
    for rep in range(plan.reps + 1):
        for name in order(sides, rep):
            if not load_one(rank, plan, where, own, state, sides[name], out, keep=rep > 0):
                del sides[name]


def load_one(
    rank: Rank, plan: Plan, where: str, own: list[Piece], state: State, side: Any, out: Outcome, *, keep: bool
) -> bool:
    def check() -> None:
        bad = wrong([p for p in own if not isinstance(side, Raw) or side.exact(p)], state)
        if bad:
            raise ValueError(f"{len(bad)} of {len(own)} tensors hold wrong values, first {bad[0]}")

    path = saved_path(plan, side.name, plan.reps)
    poison(state)
    return turn(rank, out, ("load", side.name, where), lambda: side.load(path), keep=keep, check=check)


def prepare(
    rank: Rank, name: str, side: Any, plan: Plan, layout: Layout, own: list[Piece], state: State, out: Outcome
) -> Any:
    """The side, ready for this layout; None where it cannot do it."""
    key = ("save", name) if side is None else ("load", name, str(layout))
    try:
        if side is None:
            side = SIDES[name](plan.raw) if name in RAW else SIDES[name]()
        side.prepare(plan.model, layout, own, state)
        fault = None
    except Exception as error:
        out.failed[key] = fault = describe(error)
    return side if agree(rank, fault is None) else None


# --------------------------------------------------------------------------------- from ranks to rows


def cpu_note(figures: Figures, *keys: tuple[str, ...]) -> str:
    parts = []
    for key in keys:
        cpu, wall = figures.cpu(*key), figures.wall(*key)
        if cpu:
            parts.append(f"{key[1]} [{min(wall):.2f}-{max(wall):.2f}], CPU {middle(cpu)} s")
    return "; ".join(parts)


def memory_row(
    bench: Bench, what: str, figures: Figures, ours: tuple[str, ...], theirs: tuple[str, ...]
) -> None:
    bench.target(
        f"{what}: peak memory above the state, worst rank",
        figures.peak_mib(*ours),
        PEAK_MIB,
        "MiB",
        first=figures.first_peak_mib(*ours),
        note=f"DCP {middle(figures.peak_mib(*theirs))} MiB, first {number(figures.first_peak_mib(*theirs))} MiB",
    )


def save_rows(
    bench: Bench, place: str, layout: Layout, figures: Figures, peer: str, size: int, batch: int
) -> None:
    ours, theirs, raw = ("save", "holdfast"), ("save", peer), ("save", "raw")
    report_faults(bench, figures, place, ours, theirs)
    what = f"save {size / GB:.2f} GB, {layout}, {place}"
    reason = figures.excuse(theirs)
    bench.compare(
        f"{what} / {peer}",
        figures.wall(*ours),
        figures.wall(*theirs),
        "s",
        limit=FASTER[peer],
        note=reason or cpu_note(figures, ours, theirs) + fsync_note(peer),
        peer_optional=reason is not None,
        first=figures.first_wall(*ours),
        peer_first=figures.first_wall(*theirs),
    )
    if peer == "DCP":
        bench.compare(
            f"{what} / raw pwritev + fsync",
            figures.wall(*ours),
            figures.wall(*raw),
            "s",
            limit=1 / SAVE_OVER_RAW,
            note=f"{cpu_note(figures, ours, raw)}; raw calls of {batch // MIB} MiB, the best of {SIZES}",
            first=figures.first_wall(*ours),
            peer_first=figures.first_wall(*raw),
        )
        memory_row(bench, what, figures, ours, theirs)


def load_rows(bench: Bench, place: str, saved: Layout, layout: Layout, figures: Figures, peer: str) -> None:
    where = str(layout)
    ours, theirs, raw = (("load", name, where) for name in ("holdfast", peer, "raw"))
    report_faults(bench, figures, place, ours, theirs, *([raw] if peer == "DCP" else []))
    size = sum(out.needed.get(where, 0) for out in figures.outcomes)
    what = f"load {size / GB:.2f} GB, {saved} -> {where}, {place}"
    reason = figures.excuse(theirs)
    bench.compare(
        f"{what} / {peer}",
        figures.wall(*ours),
        figures.wall(*theirs),
        "s",
        limit=FASTER_LOAD[peer],
        note=reason or cpu_note(figures, ours, theirs),
        peer_optional=reason is not None,
        first=figures.first_wall(*ours),
        peer_first=figures.first_wall(*theirs),
    )
    if reason is None:
        bench.compare(
            f"{what}: bytes read / needed / {peer}",
            figures.amplification(*ours),
            figures.counted(*theirs),
            "x",
            note=f"ours by the kernel's count {middle(figures.counted(*ours))}; sockets included",
        )
    if peer == "DCP":
        bench.compare(
            f"{what} / raw preadv",
            figures.wall(*ours),
            figures.wall(*raw),
            "s",
            limit=1 / LOAD_OVER_RAW,
            note=cpu_note(figures, ours, raw),
            first=figures.first_wall(*ours),
            peer_first=figures.first_wall(*raw),
        )
        bench.compare(
            f"{what} / raw preadv and a digest of each 128 KiB",
            figures.wall(*ours),
            figures.wall("load", "verified", where),
            "s",
            note=cpu_note(figures, ours, ("load", "verified", where)),
        )
        bench.target(f"{what}: bytes read / needed", figures.amplification(*ours), AMPLIFICATION, "x")
        memory_row(bench, what, figures, ours, theirs)


def column_rows(
    bench: Bench, saved: Layout, layouts: tuple[Layout, ...], figures: Figures, size: int
) -> None:
    """The same with `Options(columns=)`: what it costs everywhere, and what it saves a slice along columns."""
    side, where = "holdfast in columns", str(layouts[-1])
    save, same, cut = ("save", side), ("load", side, str(layouts[0])), ("load", side, where)
    report_faults(bench, figures, "tmpfs", save, same, cut)
    note = "down_proj and o_proj stored as column panels"
    for what, key in (
        (f"save {size / GB:.2f} GB, {saved}, tmpfs, in columns", save),
        (f"load {saved} -> {same[2]}, tmpfs, in columns", same),
        (f"load {saved} -> {where}, tmpfs, in columns", cut),
    ):
        for peer, name in (("DCP", "DCP"), ("without columns", "holdfast")):
            theirs = (key[0], name, *key[2:])
            bench.compare(
                f"{what} / {peer}",
                figures.wall(*key),
                figures.wall(*theirs),
                "s",
                first=figures.first_wall(*key),
                peer_first=figures.first_wall(*theirs),
                note=note,
            )
    what = f"load {saved} -> {where}, tmpfs, in columns: bytes read / needed"
    bench.target(what, figures.amplification(*cut), AMPLIFICATION, "x", note=note)


def report_faults(bench: Bench, figures: Figures, place: str, *keys: tuple[str, ...]) -> None:
    for key in keys:
        if (reason := figures.excuse(key)) is not None:
            print(f"{' '.join(key)} on {place} does not run: {reason}", file=sys.stderr)
        elif (fault := figures.fault(key)) is not None:
            bench.error(f"{' '.join(key)} on {place}: {fault}")


def fsync_note(peer: str) -> str:
    return "; peer does not fsync: its callback does here" if peer == "torch_checkpointing" else ""


# -------------------------------------------------------------------------------------------- the run


def model_for(bench: Bench, peers: tuple[str, ...]) -> Model:
    """torch_checkpointing writes and buffers replicas: with the whole state it would not fit in 24 GiB."""
    if bench.quick:
        return TINY_MOE
    return replace(SMALL_MOE, layers=2) if "torch_checkpointing" in peers else SMALL_MOE


def run(bench: Bench) -> None:
    saved = Layout(2, 2) if bench.quick else Layout(2, 4)
    loaded = (saved, Layout(1, 4), Layout(1, 2, 2)) if bench.quick else (saved, Layout(1, 8), Layout(2, 2, 2))
    groups = [PEERS] if bench.quick else [(peer,) for peer in PEERS]
    limit = 400.0 if bench.quick else 900.0
    for place in ("tmpfs", "disk"):
        for group in groups:
            if place == "disk" and bench.quick:
                group = ("DCP",)
            model = model_for(bench, group)
            size = unique_bytes(model)
            columns = ("holdfast in columns",) if "DCP" in group and place == "tmpfs" else ()
            with scratch(place) as root:
                raw = (RAW if place == "tmpfs" else RAW[:1]) if "DCP" in group else ()
                sides = (*raw, "holdfast", *columns, *group)
                plan = Plan(model, saved, loaded, sides, bench.reps, root, place == "tmpfs", BATCHES[0])
                if raw:
                    plan = replace(plan, raw=best_raw(plan, limit))
                figures = Figures(run_ranks(job, saved.world, (plan,), limit_s=limit))
            for peer in group:
                save_rows(bench, place, saved, figures, peer, size, plan.raw)
                for layout in plan.loaded if plan.load else ():
                    load_rows(bench, place, saved, layout, figures, peer)
            if columns:
                column_rows(bench, saved, loaded, figures, size)


if __name__ == "__main__":
    sys.exit(main("save_load", run))
