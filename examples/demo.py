"""The demo: a mixture-of-experts run loses a rank in the middle of a save, and nothing is lost but the save.

    python -m examples.demo [--out demo-out]

A  8 processes (experts over 4 ranks, data parallel 2) train without interruption.
B  The same run again, with saves. One rank is killed with SIGKILL while it writes its part of a checkpoint.
C  A start on 4 processes (experts over 2 ranks) from the newest committed checkpoint, trained to the end.
D  A start on the first layout from the same checkpoint, trained to the end: must repeat A bit for bit.

Everything that is claimed is checked; the exit code is 0 only if every check passed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:  # torch takes seconds to import; the fork server does it once for all the ranks
    from examples.moe.phase import Job

console = Console(highlight=False)

STEPS, SAVE_EVERY, GOOD_STEP, KILL_STEP, VICTIM = 24, 6, 12, 18, 5
STALL_TIMEOUT = 8.0  # Holdfast's: a rank without a sign of life for this long has failed
REPORT_SLACK = 7.0  # what we grant on top of it until all the others have returned, on a busy 2-core machine
PHASE_LIMIT = 150.0  # seconds; then the phase's processes are killed and the demo fails
FIRST_LOSS_TOLERANCE = 1e-5  # C's first step starts from A's very weights; only the order of sums differs
LOSS_TOLERANCE = 2e-2  # later a token may be routed to another expert because of such a difference


# --- processes ----------------------------------------------------------------------------------------------


@dataclass
class PhaseResult:
    """What the ranks of a phase reported."""

    job: Job
    started: dict[int, dict[str, Any]] = field(default_factory=dict)
    losses: dict[int, dict[int, float]] = field(default_factory=dict)  # step -> rank -> loss
    probes: dict[int, dict[int, float]] = field(default_factory=dict)  # step -> rank -> random number
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    restored: dict[int, int] = field(default_factory=dict)  # rank -> step
    saved: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)  # step -> rank -> report
    failed: dict[int, dict[str, Any]] = field(default_factory=dict)
    dying: dict[str, Any] | None = None
    crashed: dict[int, str] = field(default_factory=dict)
    exits: dict[int, int | None] = field(default_factory=dict)
    overdue: list[int] = field(default_factory=list)  # ranks we had to kill at the phase's limit
    seconds: float = 0.0

    def loss(self, step: int) -> float | None:
        return self.losses.get(step, {}).get(0)

    def take(self, message: dict[str, Any]) -> None:
        kind, rank = message["kind"], message["rank"]
        if kind == "step":
            self.losses.setdefault(message["step"], {})[rank] = message["loss"]
            self.probes.setdefault(message["step"], {})[rank] = message["probe"]
        elif kind == "saved":
            self.saved.setdefault(message["step"], {})[rank] = message
        elif kind == "digests":
            self.digests[message["label"]] = message["digests"]
        elif kind == "restored":
            self.restored[rank] = message["step"]
        elif kind == "started":
            self.started[rank] = message
        elif kind == "failed":
            self.failed[rank] = message
        elif kind == "dying":
            self.dying = message
        elif kind == "crashed":
            self.crashed[rank] = message["traceback"]
        if rank == 0 and kind == "step":
            console.print(f"  step {message['step']:>2}  loss {message['loss']:.6f}", style="dim")
        elif rank == 0 and kind == "saved":
            console.print(f"  step {message['step']:>2}  saved in {message['seconds']:.2f} s", style="cyan")


def run_phase(context: mp.context.ForkServerContext, job: Job) -> PhaseResult:
    """Start the ranks, collect what they report, and leave no process behind."""
    import torch.distributed as dist

    from examples.moe.phase import run_rank

    console.rule(f"{job.name}: {job.layout}", align="left")
    result = PhaseResult(job)
    begin = time.monotonic()
    # Like torchrun's agent: the store lives in the parent of the ranks, on a port that is free for certain.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    processes: dict[int, BaseProcess] = {}
    pipes: dict[Connection, int] = {}
    try:
        for rank in range(job.layout.world):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=run_rank, args=(rank, job, store.port, writer), daemon=True)
            process.start()
            writer.close()  # ours; the pipe then ends when the rank does
            processes[rank], pipes[reader] = process, rank
        _collect(pipes, result, begin + PHASE_LIMIT)
    finally:
        _reap(processes, result, begin + PHASE_LIMIT)
    result.seconds = time.monotonic() - begin
    if result.overdue:
        console.print(f"killed at the limit of {PHASE_LIMIT:.0f} s: ranks {result.overdue}", style="red")
    for rank, text in sorted(result.crashed.items()):
        console.print(f"rank {rank} crashed:\n{text}", style="red", markup=False)
    return result


def _collect(pipes: dict[Connection, int], result: PhaseResult, deadline: float) -> None:
    while pipes and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(pipes), timeout=left):
            assert isinstance(pipe, Connection)
            try:
                result.take(pipe.recv())
            except (EOFError, OSError):
                del pipes[pipe]
                pipe.close()
        # After a crash the others wait for a collective that never comes; give them a little to report.
        if result.crashed:
            deadline = min(deadline, time.monotonic() + 5.0)


def _reap(processes: dict[int, BaseProcess], result: PhaseResult, deadline: float) -> None:
    if result.crashed:
        deadline = 0.0
    for process in processes.values():
        process.join(max(0.1, deadline - time.monotonic()))
    # All at once: a rank that sees another one killed by us would report an error of our making.
    result.overdue = [rank for rank, process in processes.items() if process.is_alive()]
    for rank in result.overdue:
        processes[rank].kill()
    for rank, process in processes.items():
        process.join()
        result.exits[rank] = process.exitcode


# --- checks -------------------------------------------------------------------------------------------------


class Checks:
    """PASS and FAIL lines, and the exit code."""

    def __init__(self) -> None:
        self.results: list[tuple[str, bool]] = []

    def __call__(self, claim: str, ok: bool, detail: str = "") -> bool:
        self.results.append((claim, ok))
        word = "[bold green]PASS[/]" if ok else "[bold red]FAIL[/]"
        console.print(f"{word} {claim}" + (f"  [dim]({detail})[/]" if detail else ""), soft_wrap=True)
        return ok

    @property
    def all_true(self) -> bool:
        return bool(self.results) and all(ok for _, ok in self.results)


def check_clean(checks: Checks, result: PhaseResult, last_step: int) -> None:
    """For a phase in which nothing goes wrong: all ranks done, no rank sees another loss than the others."""
    world = result.job.layout.world
    clean = all(result.exits.get(r) == 0 for r in range(world)) and not (result.failed or result.crashed)
    checks(
        f"{result.job.name}: {world} ranks trained to step {last_step} and exited cleanly",
        clean and len(result.losses.get(last_step, {})) == world,
        f"{result.seconds:.1f} s",
    )
    for rank, message in sorted(result.failed.items()):
        console.print(f"rank {rank}: {message['error']}: {message['message']}", style="red", markup=False)


def check_kill(checks: Checks, result: PhaseResult) -> None:
    """B: rank VICTIM is gone in the middle of its write; the other seven know it and are not stuck."""
    dying = result.dying
    if not checks("B: the rank was killed in the middle of its write", dying is not None) or dying is None:
        return
    pid, host = result.started[VICTIM]["pid"], result.started[VICTIM]["host"]
    console.print(
        f"  rank {VICTIM} (pid {pid}) got SIGKILL in the save of step {dying['step']}, "
        f"{dying['bytes_done']:,} of its {dying['bytes_total']:,} bytes written",
        soft_wrap=True,
    )
    checks(f"B: rank {VICTIM} ended by signal 9", result.exits[VICTIM] == -9, f"exit {result.exits[VICTIM]}")
    others = [r for r in range(result.job.layout.world) if r != VICTIM]
    checks(
        "B: save raised an error on each of the other seven",
        sorted(result.failed) == others,
        f"ranks {sorted(result.failed)}",
    )
    waits = [m["at"] - dying["at"] for m in result.failed.values()]
    limit = STALL_TIMEOUT + REPORT_SLACK
    checks(
        f"B: all of them within {limit:.0f} s of the kill",
        bool(waits) and max(waits) <= limit,
        f"{min(waits, default=0):.1f} to {max(waits, default=0):.1f} s, stall_timeout {STALL_TIMEOUT:g} s",
    )
    wrong = [r for r, m in result.failed.items() if not names_victim(m, host, pid)]
    checks(
        "B: each error names the rank, its host, its pid, its phase and how long it has been silent",
        not wrong and sorted(result.failed) == others,
        f"not so on ranks {wrong}" if wrong else "",
    )
    checks(
        "B: the seven exited cleanly, none hung in destroy_process_group",
        all(result.exits[r] == 0 for r in others) and not result.overdue,
        f"{result.seconds:.1f} s in all",
    )
    if result.failed:
        first = min(result.failed)
        message = result.failed[first]
        console.print(
            f"  What rank {first} said ({message['error']}, after {message['seconds']:.1f} s in save):"
        )
        console.print(f"  {message['message']}", style="yellow", markup=False, soft_wrap=True)


def names_victim(message: dict[str, Any], host: str, pid: int) -> bool:
    """The fields as a program reads them, and the text as a person does."""
    missing = message["missing"]
    if [info["rank"] for info in missing] != [VICTIM]:
        return False
    info, text = missing[0], message["message"]
    fields_ok = info["host"] == host and info["pid"] == pid and bool(info["phase"])
    fields_ok = fields_ok and (info["seconds_since_seen"] or 0) > 0 and message["step"] == KILL_STEP
    return fields_ok and all(s in text for s in (f"rank {VICTIM}", host, str(pid), info["phase"]))


def check_folder(checks: Checks, run: Path) -> None:
    """The half-written step is neither counted nor found; the step before it is."""
    import holdfast

    leftover = [
        p for p in sorted(run.rglob("*")) if p.is_file() and f"{KILL_STEP:08d}" in str(p.relative_to(run))
    ]
    size = sum(p.stat().st_size for p in leftover)
    console.print(f"  left of step {KILL_STEP}: {len(leftover)} files, {size:,} bytes")
    checks(f"B: step {KILL_STEP} has no index", not any(p.name.startswith("index") for p in leftover))
    steps = sorted(holdfast.Checkpoints(run).steps())
    checks("B: only the complete steps count as checkpoints", steps == [6, GOOD_STEP], f"steps {steps}")
    latest = holdfast.latest(run)
    checks(
        f"B: the newest committed step is {GOOD_STEP}",
        latest is not None and Path(latest).name.endswith(f"{GOOD_STEP:08d}"),
        str(latest),
    )


def check_restored(checks: Checks, result: PhaseResult, saved: dict[str, str]) -> None:
    """Found the right step by itself, and every logical tensor is what B saved, byte for byte."""
    name, world = result.job.name, result.job.layout.world
    checks(
        f"{name}: found step {GOOD_STEP} by itself, on all {world} ranks",
        result.restored == dict.fromkeys(range(world), GOOD_STEP),
    )
    got = result.digests.get("restored", {})
    differing = [n for n in saved.keys() | got.keys() if saved.get(n) != got.get(n)]
    checks(
        f"{name}: all {len(saved)} tensors have the digests that B recorded at the save",
        bool(saved) and not differing,
        f"{len(differing)} differ, for instance {sorted(differing)[0]}" if differing else "SHA-256",
    )


def check_against_a(checks: Checks, a: PhaseResult, other: PhaseResult, first: int, last: int) -> None:
    """Losses of another run of the same layout: the same bits, on every rank."""
    steps = range(first, last + 1)
    same = all(s in a.losses and a.losses[s] == other.losses.get(s) for s in steps)
    checks(f"{other.job.name}: losses of steps {first} to {last} are bit-identical to A's on all ranks", same)


def check_c_close(checks: Checks, a: PhaseResult, c: PhaseResult) -> None:
    differences = {s: abs((a.loss(s) or 0.0) - loss) for s in a.losses if (loss := c.loss(s)) is not None}
    complete = sorted(differences) == list(range(GOOD_STEP + 1, STEPS + 1))
    first = differences.get(GOOD_STEP + 1, float("inf"))
    checks("C: first loss on the new layout agrees with A's", first <= FIRST_LOSS_TOLERANCE, f"{first:.1e}")
    largest = max(differences.values(), default=float("inf"))
    checks(
        "C: so do the losses to the end",
        complete and largest <= LOSS_TOLERANCE,
        f"at most {largest:.1e} apart",
    )


# --- table and plots ----------------------------------------------------------------------------------------


def print_table(a: PhaseResult, b: PhaseResult, c: PhaseResult, d: PhaseResult) -> None:
    table = Table(title="Loss (nats a byte)")
    table.add_column("step", justify="right")
    for title in ("A uninterrupted", "B killed", "C 4 ranks", "D 8 ranks", "C - A", "D - A"):
        table.add_column(title, justify="right")
    for step in range(1, STEPS + 1):
        losses = [r.loss(step) for r in (a, b, c, d)]
        cells = ["" if loss is None else f"{loss:.7f}" for loss in losses]
        cells += [_difference(losses[0], losses[2]), _difference(losses[0], losses[3])]
        table.add_row(str(step), *cells, end_section=step in (GOOD_STEP, KILL_STEP))
    console.print(table)


def _difference(base: float | None, other: float | None) -> str:
    if base is None or other is None:
        return ""
    return "0" if base == other else f"{other - base:+.1e}"


def _curve(result: PhaseResult) -> tuple[list[int], list[float]]:
    points = {s: loss for s in sorted(result.losses) if (loss := result.loss(s)) is not None}
    return list(points), list(points.values())


def draw_png(path: Path, a: PhaseResult, b: PhaseResult, c: PhaseResult, d: PhaseResult) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(*_curve(a), color="0.75", linewidth=7, label="A: 8 ranks, uninterrupted")
    axes.plot(*_curve(b), color="tab:red", linewidth=2, label=f"B: 8 ranks, rank {VICTIM} killed in a save")
    axes.plot(*_curve(c), color="tab:blue", marker="o", linestyle="", label="C: on with 4 ranks")
    axes.plot(*_curve(d), color="black", marker="x", linestyle="", label="D: on with 8 ranks")
    axes.axvline(GOOD_STEP, color="tab:green", linestyle=":", label=f"last committed step ({GOOD_STEP})")
    if (loss := b.loss(KILL_STEP)) is not None:
        axes.plot([KILL_STEP], [loss], color="tab:red", marker="X", markersize=13, linestyle="")
    axes.set(xlabel="step", ylabel="loss (nats a byte)", title="A rank dies in the middle of a save")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def draw_terminal(a: PhaseResult, b: PhaseResult, c: PhaseResult, d: PhaseResult) -> None:
    import plotext  # type: ignore[import-untyped]

    figure = plotext.figure
    figure.clear()
    figure.plot_size(min(console.width, 100), 22)
    figure.title("loss: A line, B +, C o, D x (X marks the kill)")
    for result, marker in ((a, "hd"), (b, "+"), (c, "o"), (d, "x")):
        steps, losses = _curve(result)
        if steps:
            figure.draw(figure.signal(steps, losses, marker=marker))
    if (loss := b.loss(KILL_STEP)) is not None:
        figure.draw(figure.signal([KILL_STEP], [loss], marker="X"))
    figure.show(colorless=not console.is_terminal)


# --- main ---------------------------------------------------------------------------------------------------


def make_jobs(out: Path) -> dict[str, Job]:
    from examples.moe.phase import Job
    from examples.moe.train import Layout, TrainConfig

    eight, four = Layout(dp=2, ep=4), Layout(dp=2, ep=2)
    base = TrainConfig(steps=STEPS, save_every=SAVE_EVERY, timeout=45.0, stall_timeout=STALL_TIMEOUT)
    run = str(out / "run")
    go_on = replace(base, resume_from=run)
    return {
        "A": Job("A", eight, base, digest_end=True),
        "B": Job("B", eight, replace(base, save_to=run), GOOD_STEP, victim=VICTIM, kill_step=KILL_STEP),
        # C and D write into folders of their own, so that both find what B left behind.
        "C": Job("C", four, replace(go_on, save_to=str(out / "run-c"))),
        "D": Job("D", eight, replace(go_on, save_to=str(out / "run-d")), digest_end=True),
    }


def run_demo(out: Path) -> bool:
    out.mkdir(parents=True, exist_ok=True)
    for name in ("run", "run-c", "run-d"):
        shutil.rmtree(out / name, ignore_errors=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here; no name service needed
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # eight processes share few cores
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["examples.moe.phase", "holdfast"])
    checks = Checks()
    jobs = make_jobs(out)

    a = run_phase(context, jobs["A"])
    check_clean(checks, a, STEPS)
    b = run_phase(context, jobs["B"])
    check_kill(checks, b)
    check_against_a(checks, a, b, 1, KILL_STEP)
    check_folder(checks, out / "run")
    saved = b.digests.get("saved", {})
    c = run_phase(context, jobs["C"])
    check_restored(checks, c, saved)
    check_clean(checks, c, STEPS)
    check_c_close(checks, a, c)
    d = run_phase(context, jobs["D"])
    check_restored(checks, d, saved)
    check_clean(checks, d, STEPS)
    check_against_a(checks, a, d, GOOD_STEP + 1, STEPS)
    checks(
        "D: random numbers after the restart are A's on every rank",
        all(a.probes.get(s) == d.probes.get(s) and s in a.probes for s in range(GOOD_STEP + 1, STEPS + 1)),
    )
    checks(
        "D: weights and optimizer after the last step are bit-identical to A's",
        bool(a.digests.get("end")) and a.digests.get("end") == d.digests.get("end"),
    )

    console.rule("E: all losses", align="left")
    print_table(a, b, c, d)
    draw_terminal(a, b, c, d)
    draw_png(out / "loss.png", a, b, c, d)
    losses = {r.job.name: r.losses for r in (a, b, c, d)}
    (out / "losses.json").write_text(json.dumps(losses, indent=1))
    console.print(f"plot: {out / 'loss.png'}")
    return checks.all_true


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for checkpoints and plots")
    begin = time.monotonic()
    good = run_demo(parser.parse_args(argv).out)
    word = "[bold green]DEMO PASSED[/]" if good else "[bold red]DEMO FAILED[/]"
    console.print(f"{word} in {time.monotonic() - begin:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
