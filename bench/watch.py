"""What the watch costs a healthy job, and how long a roll call of a large world takes.

Eight ranks train a small network with ten process groups, and with `install()`. A look is what the heart's thread does
once a second: its CPU time is read from that thread's clock, and its wall time is what a step may wait for the GIL. The
steps are also timed with the watch and without it, in turns. Then the answers of a thousand simulated ranks, each as
large as a real one's, are put into a TCPStore, collected from there, judged, and told.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

from bench.harness import Bench, Rank, Sample, attempt, main, run_ranks, scratch
from bench.standing import Training
from bench.turns import Figures, Outcome, order, turn

RANKS = 8
GROUPS = 8
"""Beside that of all ranks, each with all ranks: a look reads two numbers of each."""
LOOKS = 200
WORLD = 1000
SIDES = ("without", "watch")


def job(rank: Rank, steps: int, reps: int, root: Path) -> Outcome:
    """Steps of both sides in turns, and looks of the watch between them; the first round warms up."""
    import torch.distributed as dist

    import holdfast
    from holdfast._core.process.heart import heart
    from holdfast._frameworks import install

    groups = [dist.new_group() for _ in range(GROUPS)]
    out, training = Outcome(), Training(rank, root)
    holdfast.install()
    installation = install._current
    assert installation is not None
    watch = installation.roll_call
    assert watch is not None
    heart.end(watch)
    for rep in range(reps + 1):
        for group in groups:
            dist.barrier(group)
        for side in order(SIDES, rep):
            if side == "watch":
                heart.begin(watch)
            turn(rank, out, ("train", side), lambda: training.steps(steps), keep=rep > 0)
            heart.end(watch)
        looks: list[Sample] = out.samples.setdefault(("look", "watch"), [])
        for _ in range(LOOKS // reps):
            cpu, wall = time.thread_time(), time.perf_counter()
            watch.beat()
            looks.append(Sample(time.perf_counter() - wall, time.thread_time() - cpu, 0, 0))
            time.sleep(0.005)
    holdfast.uninstall()
    return out


def answer(number: int, late: bool) -> dict[str, Any]:
    """What a rank answers, with the stack of this process under another number."""
    import msgspec

    from holdfast._watch.answering import Answer
    from holdfast._watch.evidence import Frame, GroupOperation, Rank, SourceLine, Stack
    from holdfast._watch.own_stacks import stacks_here

    here = SourceLine("roll call")
    train = Frame("train", "train.py", 80 if late else 90)
    torchs = "torch/distributed/distributed_c10d.py"
    inner = (Frame("plan", "plan.py", 5),) if late else (Frame("all_reduce", torchs, 3000),)
    outer = stacks_here()[0]
    stack = Stack("MainThread", (*inner, train, *outer.calls), here)
    later = msgspec.structs.replace(stack, calls=(Frame("plan", "plan.py", 9), *stack.calls[1:]))
    operation = GroupOperation(
        "0:default_pg",
        6 if late else 7,
        "all_reduce",
        "completed" if late else "started",
        here,
        (1, 1),
        calls=stack.calls,
    )
    found = Rank(number, (operation,), stacks=(stack,), later=(later if late else stack,), busy=0.9)
    members = {"0:default_pg": tuple(range(WORLD))} if number == 0 else {}
    return msgspec.to_builtins(Answer(found, members, WORLD, number))  # type: ignore[no-any-return]


def called() -> list[tuple[float, float]]:
    """Seconds to collect, judge and tell, and the bytes of one answer."""
    import msgspec
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from holdfast._core.roster.beacon import beacon_of
    from holdfast._core.roster.torch_store import TorchRoster
    from holdfast._watch.answering import Answering, Asked, summary
    from holdfast._watch.diagnose import diagnose

    late = WORLD * 613 // 1000
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    roster = TorchRoster(store, 0, WORLD)
    for number in range(WORLD):
        roster.put(f"roll/0/{number}", answer(number, number == late))
    size = len(msgspec.json.encode(answer(1, False)))
    began = time.perf_counter()
    asked = Asked(0, "a benchmark asks", 1.0, time.time())
    caller = Answering(roster, beacon_of(roster), 0, asked, threading.Event())
    evidence = caller._gather().evidence()
    found = diagnose(evidence)
    summary("a benchmark asks", found, evidence, "")
    seconds = time.perf_counter() - began
    if found.who is None or found.who.ranks != (late,):
        raise ValueError(f"the late rank was not found: {found.who}")
    return [(seconds, float(size))]


def run(bench: Bench) -> None:
    steps = 3 if bench.quick else 10
    with scratch("tmpfs") as root:
        figures = Figures(run_ranks(job, RANKS, (steps, bench.reps, root), limit_s=300.0))
    for side in SIDES:
        if (fault := figures.fault(("train", side))) is not None:
            bench.error(f"{side}: {fault}")
    note = f"one look a second, {GROUPS + 1} groups, the slowest of {RANKS} ranks"
    cpu = figures.per_rep(("look", "watch"), max, lambda sample: sample.cpu)
    bench.target("CPU time of the watch, of a core", cpu, 0.001, "core", note=note)
    bench.target(
        "wall time of the watch, of a step", figures.wall("look", "watch"), 0.005, "share", note=note
    )
    bench.compare(
        f"wall time of {steps} steps of {RANKS} ranks, with the watch / without",
        figures.wall("train", "watch"),
        figures.wall("train", "without"),
        "s",
        note="includes the noise of the machine",
    )
    calls = [one for _ in range(bench.reps) for one in attempt(bench, "roll call", called)]
    bench.target(
        f"roll call of {WORLD:,} simulated ranks: collected from a TCPStore, judged and told",
        [seconds for seconds, _ in calls],
        10.0,
        "s",
        note=f"an answer has {calls[0][1] / 1024:.1f} KiB" if calls else "",
    )


if __name__ == "__main__":
    sys.exit(main("watch", run))
