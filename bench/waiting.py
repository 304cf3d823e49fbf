"""What ranks that wait ask of the message store: of a simulated world, and of real clients at one TCPStore.

    python -m bench.waiting [BEFORE] [--clients 500]

The committer's round and the wait of one rank run on a clock of their own, with reports that come in a random order over
a minute; what they ask is counted as requests of a TCPStore. BEFORE, a commit or a folder, is measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import threading
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
    from holdfast._deadline import Deadline
    from holdfast._protocol.effects import Context
    from holdfast._protocol.phases import CHOICE_TRANSITIONS

    deadline = Deadline(1800.0, clock, moves=True)
    return Context(rank, tuple(range(world)), "K", "choice", deadline, transitions=CHOICE_TRANSITIONS)


def drive(steps: Any, clock: Clock, comes: dict[str, float], until: float) -> tuple[int, int]:
    """Run a protocol of one rank; return its requests and its waits. comes: when each key is there."""
    from holdfast._protocol.effects import Claim, Do, Get, Look, Pause, Put
    from holdfast._roster.presence import Seen

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
    from holdfast._protocol.messages import Outcome, Said
    from holdfast._protocol.rounds import collect, wait_for

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


def real(clients: int, world: int, seconds: float) -> dict[str, float]:
    """Clients that wait for rank 0, each a thread with a connection of its own; the store is in another process."""
    from torch.distributed import TCPStore

    from holdfast._deadline import REAL_CLOCK
    from holdfast._protocol.messages import Outcome
    from holdfast._protocol.rounds import wait_for
    from holdfast._protocol.runner import Cancel, perform
    from holdfast._roster.beacon import Presence
    from holdfast._roster.torch_store import TorchRoster

    program = (
        "import sys, time; from torch.distributed import TCPStore\n"
        "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(store.port, flush=True)\n"
        "for line in sys.stdin: print(time.process_time(), flush=True)"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None
    assert server.stdout is not None
    port = int(server.stdout.readline())

    def cpu() -> float:
        server.stdin.write("\n")  # type: ignore[union-attr]
        server.stdin.flush()  # type: ignore[union-attr]
        return float(server.stdout.readline())  # type: ignore[union-attr]

    ended: list[float] = []

    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    here = threading.Semaphore(0)

    def wait(rank: int) -> None:
        roster = TorchRoster(store, rank, world)
        with roster.hold():
            roster.get(["K/outcome"])  # which connects
            here.release()
            steps = wait_for(context(rank, world, REAL_CLOCK), "K/outcome", "answer", Outcome)
            perform(steps, roster, Presence(roster, "wait"), Cancel())
        ended.append(time.monotonic())

    threads = [threading.Thread(target=wait, args=(rank,), daemon=True) for rank in range(1, clients + 1)]
    try:
        for thread in threads:
            thread.start()
        for _ in threads:
            here.acquire()
        time.sleep(2.0)
        before, mine = cpu(), time.process_time()
        time.sleep(seconds)
        found = {
            "CPU of the store, s a second": (cpu() - before) / seconds,
            "CPU of all clients, s a second": (time.process_time() - mine) / seconds,
        }
        roster = TorchRoster(store, 0, world)
        begun = time.monotonic()
        roster.claim("K/outcome", {"state": "agreed", "rank": 0})
        for thread in threads:
            thread.join(30.0)
        found["seconds until the last one has the answer"] = max(ended) - begun
        found["clients that had it"] = len(ended)
    finally:
        server.kill()
    return {f"{clients} real clients of a world of {world:,}: {what}": value for what, value in found.items()}


def measured(clients: int) -> dict[str, float]:
    found = {f"{world:,}: {what}": value for world in SIZES for what, value in simulated(world).items()}
    for world in (clients + 1, SIZES[0]):
        found |= real(clients, world, 10.0)
    return found


def measured_of(where: str, clients: int) -> dict[str, float]:
    program = f"import json; from bench.waiting import measured; print(json.dumps(measured({clients})))"
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
    parser.add_argument("--clients", type=int, default=500)
    given = parser.parse_args()
    now = measured_of(str(ROOT), given.clients)
    before = measured_of(given.before, given.clients) if given.before else {}
    for what, value in now.items():
        print(f"{what:<95} {before.get(what, float('nan')):>10.4g} {value:>10.4g}")


if __name__ == "__main__":
    main()
