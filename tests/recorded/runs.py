"""The files of a run of a thousand simulated ranks: what they record, and one roll call of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from holdfast._core.process.recording import BEGUN, EVENTS, EventLine
from holdfast._watch.evidence import Frame, GroupOperation, Rank, SourceLine, Stack
from holdfast._watch.read import ROLL_CALLS

HOSTILE = '</script><script>document.title="owned"</script><img src=x onerror=document.title="owned">\x1b[31m'
BEGIN = 1_795_490_000.0
SLOW, GONE, STUCK = 613, 77, 401
"""Ranks that write slowly, do not come to the last save, and hang before a collective."""


def simulated(folder: Path, world: int = 1000, saves: int = 20) -> Path:
    """Write what `world` ranks record in `saves` saves and as many evals, and one roll call of them."""
    (folder / EVENTS).mkdir(parents=True)
    encode = msgspec.json.Encoder().encode_lines
    for rank in range(world):
        (folder / EVENTS / f"rank-{rank}.jsonl").write_bytes(encode(list(lines(rank, world, saves))))
    called = folder / ROLL_CALLS / time.strftime("%Y%m%d-%H%M%S-0", time.gmtime(BEGIN + 54 * saves + 45))
    called.mkdir(parents=True)
    for rank in range(world):
        (called / f"rank-{rank}.json").write_bytes(msgspec.json.encode(answer(rank, world)))
    return folder


def lines(rank: int, world: int, saves: int) -> Any:
    """What one rank records."""
    yield EventLine(BEGUN, BEGIN, fields={"world": world, "host": f"node{rank // 8:03}", "pid": 4000 + rank})
    at = BEGIN
    for step in range(100, 100 * saves + 1, 100):
        last = step == 100 * saves
        yield EventLine("phase.left", at + 40, fields={"phase": "train", "seconds": 40.0})
        begun = at = at + 40 + (rank * 7 % 11) / 100
        if last and rank == GONE:
            return
        writing = (3.0 + rank % 5 / 10) * (6 if rank == SLOW and step == 500 else 1)
        longest = 3.4 * (6 if step == 500 else 1)
        for name, later, moved in (
            ("entered", 0.0, 0),
            ("writing", 0.2, 0),
            ("written", 0.2 + writing, 4e9),
            *((("committing", 0.3 + longest, 4e9),) if rank == 0 and not last else ()),
            *(() if last else (("committed", 0.6 + longest, 4e9),)),
        ):
            fields = {"seconds": at + later - begun, "bytes": moved} if name != "entered" else {}
            yield EventLine(f"save.{name}", at + later, step, "run/step", fields)
        if last and rank == 0:
            fields = {"ranks": [GONE], "waited": 30.0, "what": "enter the call", "left": 570.0}
            yield EventLine("save.late", at + 31, step, "run/step", fields)
        at += 0.6 + longest
        if not last:
            yield EventLine("phase.left", at + 10, fields={"phase": "eval", "seconds": 10.0})
            at += 10


def answer(rank: int, world: int) -> Any:
    """What one rank answers: all wait, and one is at work."""
    here = SourceLine("roll call")
    program = (
        Frame("evaluate", "/job/eval.py", 88),
        Frame("main", "/job/train.py", 40),
        Frame("<module>", "/job/train.py", 51),
    )
    waits = (Frame("all_reduce", "/lib/torch/distributed/distributed_c10d.py", 3000), *program)
    works = (Frame("tokenize", "/job/data.py", 17), Frame("evaluate", "/job/eval.py", 80), *program[1:])
    stuck = rank == STUCK
    stack = Stack("MainThread", works if stuck else waits, here)
    operation = GroupOperation(
        "0:default_pg", 8 if stuck else 9, "all_reduce", "completed" if stuck else "started", here, (1, 1)
    )
    found = Rank(rank, (operation,), stacks=(stack,), later=(stack,), busy=0.0, phase="eval")
    members = {"0:default_pg": list(range(world))} if rank == 0 else {}
    return {"roll_call": found, "members": members, "world_size": world, "by": rank}
