"""Thousands of ranks wait for one, as real clients of a real TCPStore; then the store's host is killed.

    python -m bench.clients [RANKS]

A rank is a thread with a roster and connections of its own, in one of four processes: processes by the thousand do not
fit on a laptop, and the store can't tell. What is counted are the requests that they send.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from typing import Any

RANKS = 2000
PROCESSES = 4
LATE = 80.0
"""Seconds that all wait for the last rank."""
SETTLED = 60.0
"""Seconds after which all have come, also where two cores start two thousand ranks; requests are counted from then on."""
DEADLINE = 60.0
"""Seconds after the last rank in which all are back."""


def ranks(port: int, world: int, process: int, begin: float, kind: str) -> None:
    """Run a share of the ranks; print one line of JSON."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    import holdfast
    from holdfast._core.protocol.call import begin_call
    from holdfast._core.protocol.operation import agree
    from holdfast._core.roster.tcp_client import TcpClient
    from holdfast._core.roster.torch_store import TorchRoster

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threading.stack_size(512 << 10)
    sent: list[float] = []
    send = TcpClient._send

    def counted(self: Any, data: bytes) -> None:
        sent.append(time.monotonic())
        send(self, data)

    TcpClient._send = counted  # type: ignore[method-assign]
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    mine = range(process, world, PROCESSES)
    ended: dict[int, float] = {}
    errors: dict[str, int] = {}

    def one(rank: int) -> None:
        last = rank == world - 1
        time.sleep(max(0.0, begin + (LATE if last else 0.0) - time.monotonic()))
        if last and kind == "killed":
            return
        try:
            roster = TorchRoster(store, rank, world)
            call = begin_call(
                holdfast.Job(roster=roster, timeout=LATE + DEADLINE, stall_timeout=LATE + DEADLINE)
            )
            agree("choice", "bench", lambda values: len(values), call, rank)
        except holdfast.errors.HoldfastError as error:
            errors[type(error).__name__] = errors.get(type(error).__name__, 0) + 1
        ended[rank] = time.monotonic()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    quiet = [at for at in sent if begin + SETTLED <= at < begin + LATE]
    usage = resource.getrusage(resource.RUSAGE_SELF)
    report = {"asked": len(quiet), "ended": max(ended.values()), "count": len(ended), "errors": errors}
    print(json.dumps(report | {"cpu": usage.ru_utime + usage.ru_stime}), flush=True)


SERVER = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def measure(world: int, kind: str) -> dict[str, Any]:
    """One round. kind: "late": the last rank comes after LATE seconds; "killed": the store is killed then."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline())
        begin = time.monotonic() + 15.0
        command = [sys.executable, "-m", "bench.clients", "ranks", str(port), str(world)]
        workers = [
            subprocess.Popen([*command, str(number), str(begin), kind], stdout=subprocess.PIPE, text=True)
            for number in range(PROCESSES)
        ]
        if kind == "killed":
            time.sleep(max(0.0, begin + LATE - time.monotonic()))
            os.kill(server.pid, signal.SIGKILL)
        found = [json.loads(worker.communicate(timeout=300)[0].splitlines()[-1]) for worker in workers]
    finally:
        server.kill()
    errors: dict[str, int] = {}
    for one in found:
        for name, count in one["errors"].items():
            errors[name] = errors.get(name, 0) + count
    return {
        "kind": kind,
        "ranks": world,
        "requests a second and waiting rank": sum(one["asked"] for one in found) / (LATE - SETTLED) / world,
        "seconds until all are back": round(max(one["ended"] for one in found) - begin - LATE, 2),
        "back": sum(one["count"] for one in found),
        "errors": errors,
        "cpu seconds": round(sum(one["cpu"] for one in found), 1),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["ranks"]:
        ranks(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), sys.argv[6])
    else:
        world = int(sys.argv[1]) if len(sys.argv) > 1 else RANKS
        for kind in ("late", "killed"):
            print(json.dumps(measure(world, kind)), flush=True)
