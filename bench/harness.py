"""What every benchmark shares: arguments, medians, measured calls, and a runner for real ranks.

A side that fails is a row without a figure (`bench.rows`) and makes the benchmark exit 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from bench.machine import commit, this_machine
from bench.rows import Results, Row, number

# A TCPStore looks up the name of each client. A name server that drops a packet would hold it up for 5 s each.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

MIB = 1024 * 1024
GB = 1e9


class RankError(Exception):
    """A rank raised, died or ran past its time limit."""


# ---------------------------------------------------------------------------------------------- rows


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


@dataclass
class Bench:
    """Collects rows and errors; prints, writes JSON and exits."""

    name: str
    quick: bool
    json_path: Path | None = None
    rows: list[Row] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    blank: list[str] = field(default_factory=list)  # the sides that gave no figure
    begun: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    load: float = field(default_factory=lambda: round(os.getloadavg()[0], 1))

    @property
    def reps(self) -> int:
        return 3 if self.quick else 5

    def compare(
        self,
        metric: str,
        ours: Sequence[float],
        peer: Sequence[float],
        unit: str,
        *,
        limit: float | None = None,
        higher_is_better: bool = False,
        note: str = "",
        peer_optional: bool = False,
        first: float | None = None,
        peer_first: float | None = None,
    ) -> None:
        """Adds a row from the medians of two samples. A missing side is recorded as an error.

        `first` and `peer_first` are what the first call of this kind took, beside the medians of warm ones.
        """
        a, b = median(ours), median(peer)
        if a is None:
            self.blank.append(f"ours in '{metric}'")
        if b is None and not peer_optional:
            self.blank.append(f"the peer in '{metric}'")
        ratio = None
        if a is not None and b is not None:
            better, worse = (a, b) if higher_is_better else (b, a)
            ratio = better / worse if worse else None
        n = len(ours) or len(peer)
        self.rows.append(Row(metric, a, b, ratio, limit, unit, n, note, first, peer_first))

    def target(
        self,
        metric: str,
        ours: Sequence[float],
        target: float,
        unit: str,
        *,
        higher_is_better: bool = False,
        note: str = "",
        first: float | None = None,
    ) -> None:
        """Adds a row against an absolute target: the peer column is the target itself."""
        self.compare(
            f"{metric} / target",
            ours,
            [target],
            unit,
            limit=1.0,
            higher_is_better=higher_is_better,
            note=note,
            first=first,
        )

    def error(self, text: str) -> None:
        if text not in self.errors:
            self.errors.append(text)

    def finish(self) -> int:
        print_rows(self)
        if self.json_path is not None:
            folders = {kind: scratch_root(kind) for kind in ("tmpfs", "disk")}
            machine = this_machine(folders)
            Results(self.name, self.quick, self.begun, commit(), self.load, machine, self.rows).write(
                self.json_path
            )
        if self.blank:
            self.error(f"{len(self.blank)} sides gave no figure, the first: {self.blank[0]}")
        for text in self.errors:
            print(f"error: {text}", file=sys.stderr)
        return 1 if self.errors else 0


def attempt(bench: Bench, what: str, call: Callable[[], list[Any]]) -> list[Any]:
    """Call it; what it raises becomes an error of the benchmark, and the result an empty list."""
    try:
        return call()
    except Exception as error:
        bench.error(f"{what}: {type(error).__name__}: {error}")
        return []


def print_rows(bench: Bench) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=bench.name + (" (quick)" if bench.quick else ""), title_justify="left")
    figures = ("ours", "peer", "first", "its first", "ratio", "asked", "n")
    for heading in (
        "metric",
        "ours",
        "peer",
        "unit",
        "first",
        "its first",
        "ratio",
        "asked",
        "",
        "n",
        "note",
    ):
        table.add_column(heading, justify="right" if heading in figures else "left")
    words = {True: "met", False: "missed", None: ""}
    for row in bench.rows:
        table.add_row(
            row.metric,
            number(row.ours),
            number(row.peer),
            row.unit,
            number(row.first),
            number(row.peer_first),
            number(row.ratio),
            number(row.limit),
            words[row.met],
            str(row.n),
            row.note,
        )
    width = None if sys.stdout.isatty() else 180
    Console(width=width).print(table, markup=False)


def leave(signum: int, frame: Any) -> NoReturn:
    """End on a signal as on an exception, so that ranks and scratch folders go: on tmpfs they are memory."""
    signal.signal(signum, signal.SIG_IGN)  # a second one must not stop that
    sys.exit(128 + signum)


def main(name: str, run: Callable[[Bench], None]) -> int:
    """The command line of one benchmark."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}")
    parser.add_argument("--quick", action="store_true", help="small sizes, three repetitions, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    args = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # so that scratch folders go: on tmpfs they are memory
    bench = Bench(name, args.quick, args.json)
    try:
        run(bench)
    except Exception:
        traceback.print_exc()
        bench.error("the benchmark stopped: " + traceback.format_exc().strip().splitlines()[-1])
    return bench.finish()


# --------------------------------------------------------------------------------------------- places


def scratch_root(kind: str) -> Path:
    """The folder below which `scratch` makes its own: on `tmpfs`, or on `disk` (TMPDIR, else beside the repository)."""
    if kind == "tmpfs":
        return Path("/dev/shm")
    return Path(os.environ["TMPDIR"]) if "TMPDIR" in os.environ else Path(__file__).resolve().parents[2]


@contextmanager
def scratch(kind: str) -> Iterator[Path]:
    """A fresh folder on `tmpfs` or on `disk`, removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=scratch_root(kind)))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


# ----------------------------------------------------------------------------------- measuring a call


@dataclass(frozen=True)
class Sample:
    """One call on one rank."""

    wall: float
    cpu: float
    peak: int  # bytes of resident memory above what was resident before the call
    rchar: int  # bytes this process asked the kernel to read, sockets included


def cpu_seconds() -> float:
    """CPU time of this process and of the children it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def status_kib(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    raise KeyError(key)


def read_chars() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def measure(call: Callable[[], Any]) -> tuple[Sample, Any]:
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark of resident memory
    resident, chars = status_kib("VmRSS"), read_chars()
    cpu, wall = cpu_seconds(), time.perf_counter()
    value = call()
    wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    peak = max(4, status_kib("VmHWM") - resident) * 1024  # a page at least: what the kernel can tell
    return Sample(wall, cpu, peak, read_chars() - chars), value


# ------------------------------------------------------------------------------------------ the ranks


@dataclass(frozen=True)
class Rank:
    """What a rank function is given: who it is, and how to start together with the others."""

    index: int
    world: int

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier()

    def together(self, call: Callable[[], Any]) -> tuple[Sample, Any]:
        """Measures a call that all ranks begin at the same time and none leaves before the last."""
        self.barrier()
        result = measure(call)
        self.barrier()
        return result


def run_ranks(
    function: Callable[..., Any], world: int, args: tuple[Any, ...] = (), *, limit_s: float
) -> list[Any]:
    """Calls function(Rank, *args) in `world` processes with a gloo group; gives the results by rank."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.preload"])
    processes, pipes = [], []
    deadline = time.monotonic() + limit_s
    try:
        for index in range(world):
            here, there = context.Pipe(duplex=False)
            target = (function, Rank(index, world), store.port, limit_s, there, args)
            process = context.Process(target=_enter, args=target, name=f"rank{index}")
            process.start()
            there.close()
            processes.append(process)
            pipes.append(here)
        return _collect(processes, pipes, deadline, limit_s)
    finally:
        for process in processes:
            _end(process, grace=5.0)


def _enter(
    function: Callable[..., Any],
    rank: Rank,
    port: int,
    limit_s: float,
    pipe: Connection,
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    os.setsid()  # a group of its own: whatever this rank starts can be ended with it
    torch.set_num_threads(1)
    try:
        timeout = timedelta(seconds=limit_s)
        store = dist.TCPStore("127.0.0.1", port, rank.world, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank.index, world_size=rank.world, timeout=timeout)
        value = function(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
        pipe.send(("ok", value))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))


def _collect(processes: list[Any], pipes: list[Connection], deadline: float, limit_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    faults: list[str] = []
    while len(results) < len(pipes):
        open_pipes = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready and faults:
            break
        if not ready:
            missing = sorted(set(range(len(pipes))) - set(results))
            raise RankError(f"ranks {missing} ran past {limit_s:.0f} s")
        for pipe in ready:
            rank = open_pipes[pipe]  # type: ignore[index]
            good, results[rank] = _receive(pipe, rank, processes[rank])  # type: ignore[arg-type]
            faults += [] if good else [results[rank]]
        if faults and time.monotonic() < deadline:  # the first to fail may not be the cause: hear the others
            deadline = min(deadline, time.monotonic() + 1.0)
    if faults:
        raise RankError("\n".join(faults))
    return [results[rank] for rank in range(len(pipes))]


def _receive(pipe: Connection, rank: int, process: Any) -> tuple[bool, Any]:
    try:
        kind, value = pipe.recv()
    except EOFError:
        process.join(5)
        return False, f"rank {rank} (pid {process.pid}) died, exit code {process.exitcode}"
    return (True, value) if kind == "ok" else (False, f"rank {rank}: {value}")


def _end(process: Any, grace: float) -> None:
    """Lets a rank that has answered leave, then ends its process group, by its id."""
    deadline = time.monotonic() + grace
    while process.is_alive() and time.monotonic() < deadline:
        process.join(0.1)
        if process.exitcode is None and sys.exc_info()[0] is not None:
            break
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()  # not yet in a group of its own, or already gone
    process.join(5)
