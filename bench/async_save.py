"""Asynchronous saves: what training pays, beside a plain copy, torch DCP's and megatron-core's asynchronous modes.

Eight ranks, 64 tensors cut over them, 2 GB in all. Blocking time is that of the call, after which the optimizer may step. All
sides run on the same ranks in turns. Peers' background work is waited for outside of the measurement.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.harness import MIB, Bench, Rank, attempt, main, measure, run_ranks, scratch

RANKS, TENSORS = 8, 64
BYTES = 2 << 30
COPY, PEERS, COMMIT, LOOP = 1 / 1.15, 2.0, 1 / 1.5, 1 / 1.1
PLAIN = ((11_000, 16 << 10, 0.5), (16, 64 << 20, 1.0))
"""Tensors of one rank, bytes of each, and what is asked beside a loop that copies them."""
FIRST = 0.3


def local_state(rank: int, nbytes: int) -> dict[str, Any]:
    """`nbytes` of them on this rank."""
    import torch

    rows = nbytes // TENSORS // 4096
    made = torch.Generator().manual_seed(rank)
    return {f"w{number}": torch.randn(rows, 1024, generator=made) for number in range(TENSORS)}


def sides(rank: Rank, folder: str, nbytes: int, reps: int, which: str) -> dict[str, list[float]]:
    """Seconds, and MiB above the state, of each measurement on this rank, which has `nbytes`."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    import holdfast

    state = local_state(rank.index, nbytes)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {name: DTensor.from_local(value, mesh, [Shard(0)]) for name, value in state.items()}
    warm = {name: torch.empty_like(value).copy_(value) for name, value in state.items()}
    found: dict[str, list[float]] = {}

    def note(what: str, value: float, rep: int) -> None:
        """The first round warms up, and is kept beside the others."""
        found.setdefault(what if rep else f"first {what}", []).append(value)

    def timed(call: Any) -> float:
        rank.barrier()
        return measure(call)[0].wall

    def asynchronous(who: str, call: Any, wait: Any, rep: int) -> None:
        """A save that is waited for: when its call came back, when it was committed, and the most memory until then."""

        def save_and_wait() -> float:
            begun = time.perf_counter()
            pending = call()
            blocked = time.perf_counter() - begun
            wait(pending)
            return blocked

        rank.barrier()
        sample, blocked = measure(save_and_wait)
        note(f"{who} blocked", blocked, rep)
        note(f"{who} commit", sample.wall, rep)
        note(f"{who} memory", sample.peak / MIB, rep)

    def copy() -> None:
        for name, value in state.items():
            warm[name].copy_(value)

    def clean(path: str) -> None:
        rank.barrier()
        if rank.index == 0:
            shutil.rmtree(path, ignore_errors=True)
        rank.barrier()

    theirs = PEER[which](tensors, state, rank) if which else None
    for rep in range(reps + 1):
        note("copy", timed(copy), rep)
        path = f"{folder}/ours-{rep}"
        asynchronous(
            "ours",
            lambda: holdfast.async_save(tensors, path, job=holdfast.Job(timeout=300)),  # noqa: B023
            lambda pending: pending.committed(),
            rep,
        )
        clean(path)
        note("sync", timed(lambda: holdfast.save(tensors, path, job=holdfast.Job(timeout=300))), rep)  # noqa: B023
        clean(path)
        if theirs is not None:
            path = f"{folder}/theirs-{rep}"
            os.makedirs(path, exist_ok=True)
            asynchronous("theirs", lambda: theirs(path), lambda wait: wait(), rep)  # noqa: B023
            clean(path)
    return found


def plain(rank: Rank, folder: str, count: int, each: int, reps: int) -> dict[str, list[float]]:
    """Seconds for which plain tensors of one rank block, beside a loop of copies into warm memory."""
    import torch

    import holdfast

    state = {f"w{number}": torch.full((each // 4,), float(number)) for number in range(count)}
    warm = {name: value.clone() for name, value in state.items()}

    def copy() -> None:
        for name, value in state.items():
            warm[name].copy_(value)

    found: dict[str, list[float]] = {}
    for rep in range(reps + 1):
        path = Path(folder) / f"plain-{count}-{rep}"
        sample, pending = measure(lambda: holdfast.async_save(state, path))  # noqa: B023
        pending.committed(300)
        shutil.rmtree(path)
        for what, wall in (("ours", sample.wall), ("loop", measure(copy)[0].wall)):
            found.setdefault(what if rep else f"first {what}", []).append(wall)
    return found


def dcp(process: bool) -> Any:
    def make(tensors: dict[str, Any], state: dict[str, Any], rank: Rank) -> Any:
        import torch.distributed as dist
        import torch.distributed.checkpoint as checkpoint
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        group = dist.new_group(backend="gloo")

        def save(path: str) -> Any:
            future = checkpoint.async_save(
                dict(tensors), checkpoint_id=path, process_group=group, async_checkpointer_type=kind
            )
            return future.result  # type: ignore[union-attr]

        return save

    return make


def mcore(tensors: dict[str, Any], state: dict[str, Any], rank: Rank) -> Any:
    from bench.peers import mcore_on_cpu

    mcore_on_cpu()
    import multiprocessing

    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    parallel_state.initialize_model_parallel()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    queue = AsyncCallsQueue()

    def save(path: str) -> Any:
        sharded: Any = {
            name: ShardedTensor.from_rank_offsets(name, value, (0, rank.index, RANKS))
            for name, value in state.items()
        }
        queue.schedule_async_request(dist_checkpointing.save(sharded, path, async_sharded_save=True))
        return lambda: queue.maybe_finalize_async_calls(blocking=True)

    return save


PEER: dict[str, Any] = {"DCP, thread": dcp(False), "DCP, process": dcp(True), "mcore": mcore}


def loop(seconds: float) -> float:
    """Steps a second of a loop that does nothing but compute."""
    import torch

    a = torch.randn(256, 256)
    steps, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        a = torch.tanh(a @ a) * 0.1
        steps += 1
    return steps / (time.perf_counter() - begun)


WRITE = """
import os, sys, time
path, size = sys.argv[1], int(sys.argv[2])
data = memoryview(bytearray(os.urandom(1 << 20) * 64))
sys.stdout.write("ready\\n"); sys.stdout.flush(); sys.stdin.readline()
fd, at = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), 0
while at < size:
    at += os.pwritev(fd, [data[:min(len(data), size - at)]], at)
os.fsync(fd)
"""


def training(rank: Rank, folder: str, nbytes: int, reps: int) -> dict[str, list[float]]:
    """A loop that computes, beside nothing, beside our background save, and beside a process that writes as many bytes."""
    import torch

    import holdfast

    state = {"w": torch.randn(nbytes // 4)}
    found: dict[str, list[float]] = {"alone": [], "ours": [], "raw": []}
    holdfast.async_save(state, f"{folder}/warm", job=holdfast.Job(no_dist=True)).committed()
    shutil.rmtree(f"{folder}/warm")
    for _ in range(reps):
        found["alone"].append(loop(1.0))
        pending = holdfast.async_save(state, f"{folder}/ours", job=holdfast.Job(no_dist=True))
        found["ours"].append(beside(pending.done))
        pending.committed()
        shutil.rmtree(f"{folder}/ours")
        process = subprocess.Popen(
            [sys.executable, "-c", WRITE, f"{folder}/raw", str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        process.stdin.write(b"go\n")
        process.stdin.flush()
        found["raw"].append(beside(lambda process=process: process.poll() is not None))
        process.communicate()
        os.unlink(f"{folder}/raw")
    return found


def beside(is_done: Any) -> float:
    """Steps a second of the loop until something else is done."""
    import torch

    a = torch.randn(256, 256)
    steps, begun = 0, time.perf_counter()
    while not is_done():
        for _ in range(10):
            a = torch.tanh(a @ a) * 0.1
        steps += 10
    return steps / (time.perf_counter() - begun)


def slowest(results: list[dict[str, list[float]]], what: str) -> list[float]:
    """Of each repetition the slowest rank: training waits for it."""
    return [max(values) for values in zip(*(result.get(what, []) for result in results), strict=True)]


def first_of(results: list[dict[str, list[float]]], what: str) -> float | None:
    """The slowest rank in the round that warms up."""
    return max(slowest(results, f"first {what}"), default=None)


def writer_start(folder: Path) -> tuple[float, float]:
    """Seconds until a new writer process has taken its first job, and the MiB of memory that are its own."""
    import psutil
    import torch

    import holdfast

    here = psutil.Process()

    def new_writer(path: Path) -> tuple[float, Any]:
        before, begun = set(here.children()), time.perf_counter()
        holdfast.async_save({"w": torch.zeros(1)}, path, job=holdfast.Job(no_dist=True)).committed()
        took = time.perf_counter() - begun
        (writer,) = set(here.children()) - before
        return took, writer

    _, first = new_writer(folder / "a")  # also imports what a save needs
    first.kill()
    while first.status() != psutil.STATUS_ZOMBIE:  # holdfast is its parent, and must find out itself
        time.sleep(0.01)
    took, writer = new_writer(folder / "b")
    return took, writer.memory_full_info().uss / MIB


def from_gpu(folder: Path, reps: int, nbytes: int) -> tuple[list[float], list[float]]:
    """Seconds that a save of one GPU's tensors blocks, and those of a plain copy of them into pinned memory."""
    import torch

    import holdfast

    state = {f"w{number}": torch.randn(nbytes // 64 // 4, device="cuda") for number in range(64)}
    pinned = {name: torch.empty_like(value, device="cpu", pin_memory=True) for name, value in state.items()}
    ours, copies = [], []
    for rep in range(reps + 1):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        pending = holdfast.async_save(state, folder / "gpu", job=holdfast.Job(no_dist=True))
        ours.append(time.perf_counter() - begun)
        pending.committed()
        begun = time.perf_counter()
        for name, value in state.items():
            pinned[name].copy_(value, non_blocking=True)
        torch.cuda.synchronize()
        copies.append(time.perf_counter() - begun)
        if rep == 0:  # bit for bit, before the times count
            back = {name: torch.zeros_like(value) for name, value in state.items()}
            holdfast.load(back, folder / "gpu", job=holdfast.Job(no_dist=True))
            assert all(torch.equal(back[name], state[name]) for name in state)
            del back
    return ours[1:], copies[1:]


def run(bench: Bench) -> None:
    nbytes = BYTES // 16 if bench.quick else BYTES
    with scratch("tmpfs") as folder:
        for number, which in enumerate(PEER):
            found = attempt(
                bench,
                which,
                lambda: run_ranks(
                    sides,
                    RANKS,
                    (str(folder), nbytes // RANKS, bench.reps, which),  # noqa: B023
                    limit_s=500,
                ),
            )
            if not found:
                continue
            blocked, first = slowest(found, "ours blocked"), first_of(found, "ours blocked")
            if number == 0:
                size = f"{nbytes / 2**30:.3g} GiB over {RANKS} ranks"
                bench.compare(
                    f"blocking time, {size} / plain copy into warm memory",
                    blocked,
                    slowest(found, "copy"),
                    "s",
                    limit=COPY,
                    first=first,
                    peer_first=first_of(found, "copy"),
                    note="first: fresh pages, and the start of the writer process",
                )
                bench.compare(
                    "from the call to the commit / synchronous save",
                    slowest(found, "ours commit"),
                    slowest(found, "sync"),
                    "s",
                    limit=COMMIT,
                    first=first_of(found, "ours commit"),
                    peer_first=first_of(found, "sync"),
                )
            bench.compare(
                f"blocking time / {which}",
                blocked,
                slowest(found, "theirs blocked"),
                "s",
                limit=PEERS,
                first=first,
                peer_first=first_of(found, "theirs blocked"),
            )
            bench.compare(
                f"peak memory above what was resident, worst rank, from the call to the commit / {which}",
                slowest(found, "ours memory"),
                slowest(found, "theirs memory"),
                "MiB",
                first=first_of(found, "ours memory"),
                peer_first=first_of(found, "theirs memory"),
                note="of the ranks, not of processes they start; memory that the first save keeps is resident later",
            )
        cores = len(os.sched_getaffinity(0))
        alone = attempt(
            bench,
            "as many ranks as cores",
            lambda: run_ranks(sides, cores, (str(folder), nbytes // RANKS, bench.reps, ""), limit_s=300),
        )
        if alone:
            bench.compare(
                f"blocking time, as many ranks ({cores}) as cores, {nbytes // RANKS / 2**20:.0f} MiB each / plain copy into warm memory",
                slowest(alone, "ours blocked"),
                slowest(alone, "copy"),
                "s",
                limit=COPY,
                first=first_of(alone, "ours blocked"),
                peer_first=first_of(alone, "copy"),
                note="the same, where ranks that are done first take no core from those that still copy",
            )
        for count, each, limit in PLAIN:
            count = count // 10 if bench.quick else count
            what = f"{count:,} x {each // 1024:,} KiB, 1 rank"
            found_plain = attempt(
                bench,
                what,
                lambda: run_ranks(plain, 1, (str(folder), count, each, bench.reps), limit_s=120),  # noqa: B023
            )
            if found_plain:
                bench.compare(
                    f"blocking time, {what} / loop of copies into warm memory",
                    found_plain[0]["ours"],
                    found_plain[0]["loop"],
                    "s",
                    limit=limit,
                )
                if each > 1 << 20:
                    size = f"{count * each / 2**30:.2g} GiB"
                    bench.target(f"first save of {size}", found_plain[0]["first ours"], FIRST, "s")
        beside_raw = attempt(
            bench,
            "training loop",
            lambda: run_ranks(training, 1, (str(folder), nbytes // 4, bench.reps), limit_s=300),
        )
        if beside_raw:
            only = beside_raw[0]
            bench.compare(
                "steps of a computing loop beside the background save / beside a raw pwrite of the same bytes",
                only["ours"],
                only["raw"],
                "steps/s",
                limit=LOOP,
                higher_is_better=True,
                note=f"alone {sorted(only['alone'])[len(only['alone']) // 2]:,.0f} steps/s",
            )
        import torch

        if torch.cuda.is_available():
            ours, pinned = from_gpu(folder, bench.reps, (1 if bench.quick else 10) * 10**9)
            bench.compare(
                "blocking time of a warm save of a GPU's tensors / copy into pinned memory",
                ours,
                pinned,
                "s",
                limit=0.9,
            )
        seconds, memory = writer_start(folder)
        bench.target("first job of a new writer process, start included", [seconds], 0.3, "s")
        bench.target("memory of a writer process of its own", [memory], 60.0, "MiB")


if __name__ == "__main__":
    raise SystemExit(main("async_save", run))
