"""What ranks that wait ask of the message store, in a simulated world.

    python -m bench.waiting [BEFORE]

The committer's round and the wait of one rank run on a clock of their own, with reports that come in a random order over
a minute; what they ask is counted as requests of a TCPStore. BEFORE, a commit or a folder, is measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from typing import Any

from bench.before_after import ROOT, environment, source_tree

SIZES = (10_240, 100_000)
MINUTE = 60.0


class Clock:
    time = 0.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


def context(rank: int, world: int, clock: Any) -> Any:
    from holdfast._core.base.deadline import Deadline
    from holdfast._core.protocol.effects import Context
    from holdfast._core.protocol.phases import CHOICE_TRANSITIONS

    deadline = Deadline(1800.0, clock, moves=True)
    return Context(rank, tuple(range(world)), "K", "choice", deadline, transitions=CHOICE_TRANSITIONS)


def drive(steps: Any, clock: Clock, comes: dict[str, float], until: float) -> tuple[int, int]:
    """Run a protocol of one rank; return its requests and its waits. comes: when each key is there."""
    from holdfast._core.protocol.effects import Claim, Do, Get, Look, Pause, Put
    from holdfast._core.roster.lost import Seen

    asked = waits = 0
    answer: Any = None
    while clock.time < until:
        try:
            effect = steps.send(answer)
        except StopIteration:
            break
        answer = None
        match effect:
            case Get(keys):
                asked += len(keys)
                answer = [{"value": 1} if comes.get(key, 1e9) <= clock.time else None for key in keys]
            case Look(ranks):
                asked += 2 * len(ranks)
                answer = {rank: Seen() for rank in ranks}
            case Pause(key, seconds):
                # Begun, and given up again where the key does not come.
                at = max(comes.get(key, 1e9), clock.time)
                answer = at <= clock.time + seconds
                asked += 1 if answer else 2
                waits += 1
                clock.time = at if answer else clock.time + seconds
            case Put() | Claim():
                asked += 2
                answer = effect.message if isinstance(effect, Claim) else None
            case Do(_, action):
                answer = action()
    return asked, waits


def simulated(world: int) -> dict[str, float]:
    from holdfast._core.protocol.messages import Outcome, Said
    from holdfast._core.protocol.rounds import collect, wait_for

    found: dict[str, float] = {}
    for order, seconds in (("over a minute", MINUTE), ("at once", 0.0)):
        draw = random.Random(world)
        comes = {f"K/asked/{rank}": draw.random() * seconds for rank in range(1, world)}
        clock = Clock()
        begun = time.process_time()
        asked, waits = drive(
            collect(context(0, world, clock), "asked", Said(0), range(world)), clock, comes, 1e9
        )
        found[f"committer, reports {order}: CPU s"] = time.process_time() - begun
        found[f"committer, reports {order}: requests for each rank"] = asked / world
        found[f"committer, reports {order}: waits"] = waits
    for seconds in (10.0, MINUTE, 600.0):
        clock = Clock()
        asked, _ = drive(
            wait_for(context(4711, world, clock), "K/outcome", "answer", Outcome), clock, {}, seconds
        )
        found[f"waiting rank, first {seconds:.0f} s: requests a second"] = asked / seconds
    return found


def measured() -> dict[str, float]:
    return {f"{world:,}: {what}": value for world in SIZES for what, value in simulated(world).items()}


def measured_of(where: str) -> dict[str, float]:
    program = "import json; from bench.waiting import measured; print(json.dumps(measured()))"
    with source_tree(where) as tree:
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment(tree), cwd=ROOT, capture_output=True, text=True
        )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("before", nargs="?")
    given = parser.parse_args()
    now = measured_of(str(ROOT))
    before = measured_of(given.before) if given.before else {}
    for what, value in now.items():
        print(f"{what:<95} {before.get(what, float('nan')):>10.4g} {value:>10.4g}")


if __name__ == "__main__":
    main()
