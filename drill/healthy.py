"""Healthy jobs, in which nothing is dead, and each of which is late, silent or gone in its own way for longer
than every limit that `install()` is given: python -m drill.healthy JOB HOW FOLDER SECONDS LIMIT.

HOW is `stock`, `install`, or `default`, which is `install()` alone. SECONDS is how long the job is late or busy, LIMIT what every
limit is shortened to. What it is to do, a job writes to its folder; what its ranks found, to the terminal.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

import holdfast
from drill.agent import AGENT
from tests.frameworks.megatron.cpu import use_cpu

GROUP_S = 3600.0
"""Timeout of collectives, on both sides: a job that is healthy does not come near it."""
PIECE, PAUSE = 1 << 16, 0.2
"""Bytes of a slow file that are written at once, and seconds between two."""
STEPS = 20
"""Steps whose CPU time is measured at once."""
SAID = "found: "
"""Before what a rank has found, on the terminal: it is to be the same on both sides."""


def limits(seconds: float) -> dict[str, Any]:
    """What `install` is given: every limit there is, but for the wish to give up ranks that live."""
    return {
        "job": holdfast.Job(timeout=seconds, report_after=seconds / 2, lost_after=seconds),
        "after_end": seconds,
        "guard": ["drill.healthy.save_model"],
    }


class Here(NamedTuple):
    """One rank of a job."""

    rank: int
    world: int
    folder: Path
    seconds: float


def begin_world(number: int = 0) -> None:
    """Groups as Megatron makes them, where `install` begins to watch; and a first step."""
    from megatron.core import parallel_state

    how: dict[str, Any] = {}
    if number:  # torch finds what the first world has left under the same keys of torchrun's store
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        how["store"] = dist.PrefixStore(f"world {number}", dist.TCPStore(*place, is_master=False))
        how |= {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_S), **how)
    parallel_state.initialize_model_parallel(2)
    step()


def step() -> float:
    value = torch.ones(1)
    dist.all_reduce(value)
    return float(value)


def find(text: object) -> None:
    os.write(1, f"{SAID}{text}\n".encode())  # in one piece: ranks share a terminal


def write_slowly(path: Path, seconds: float) -> None:
    """Write a file piece by piece, as to storage that is slow."""
    ends = time.monotonic() + seconds
    with path.with_suffix(".part").open("wb") as file:
        while time.monotonic() < ends:
            file.write(bytes(PIECE))
            file.flush()
            time.sleep(PAUSE)
    path.with_suffix(".part").rename(path)


def save_model(here: Here, busy: Callable[[], object] = lambda: None) -> None:
    """A function that `install` guards: rank 0 writes, or does something else, while the others wait for it."""
    if here.rank == 0:
        busy()
    dist.barrier()


# -- the jobs --------------------------------------------------------------------------------------


def writes(here: Here) -> None:
    save_model(here, lambda: write_slowly(here.folder / "model", here.seconds))
    find(step())


def late(here: Here) -> None:
    if here.rank == 1:
        time.sleep(here.seconds)
    save_model(here)
    find(step())


def holds_the_gil(here: Here) -> None:
    save_model(here, lambda: blend(here.seconds))
    find(step())


def blend(seconds: float) -> None:
    """megatron-core's own building of a data set, in C++ that keeps the GIL, for so long or longer."""
    import numpy as np
    from megatron.core.datasets import helpers_cpp

    # So many that few samples take long: they are in memory.
    weights, samples, took = np.full(4096, 1 / 4096), 1 << 10, 0.0
    while took < seconds:  # in the last call alone
        samples = int(samples * (min(max(1.2 * seconds / took, 1.5), 8.0) if took else 1.0))
        index, sample = np.zeros(samples, dtype=np.int16), np.zeros(samples, dtype=np.int64)
        begun = time.monotonic()
        helpers_cpp.build_blending_indices(index, sample, weights, len(weights), samples, False)
        took = time.monotonic() - begun


def compiles(here: Here) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(here.folder / f"cache-{here.rank}")
    value = torch.zeros(1)
    save_model(here, lambda: value.fill_(compiled()))
    dist.all_reduce(value)
    find(round(float(value), 3))


def compiled() -> float:
    @torch.compile
    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.softmax(x @ x.T, dim=-1) + torch.layer_norm(x, x.shape[-1:])
        return x

    return float(function(torch.eye(16)).sum())


class Slow(torch.utils.data.Dataset[int]):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds / 4)
        return index


def loads_slowly(here: Here) -> None:
    data = torch.utils.data.DataLoader(Slow(here.seconds if here.rank == 1 else 0.0), batch_size=2)
    find([batch.tolist() for batch in data if step()])


def exports(here: Here) -> None:
    find(step())
    if here.rank == 0:
        write_slowly(here.folder / "model", here.seconds)


def uploads(here: Here) -> None:
    place = here.folder / f"upload-{here.rank}"
    threading.Thread(target=write_slowly, args=(place, here.seconds), name="uploader").start()
    find(step())


def ends_early(here: Here) -> None:
    find(step())
    if here.rank == here.world - 1:
        sys.exit(0)
    ends = time.monotonic() + here.seconds
    while time.monotonic() < ends:
        torch.ones(64, 64).sum()
        time.sleep(0.01)


def emergency(here: Here) -> NoReturn:
    """The scheduler ends the job: the user's own handler saves, each rank as long as it takes."""

    def save(number: int, frame: object) -> None:
        write_slowly(here.folder / f"emergency-{here.rank}", here.seconds if here.rank == 0 else 0.1)
        sys.exit(0)

    signal.signal(signal.SIGTERM, save)
    everyone = pids(here)
    if here.rank == 0:
        send(*everyone, what="-TERM {all}")
    while True:
        time.sleep(0.05)


def debugged(here: Here) -> None:
    everyone = pids(here)
    if here.rank == 0:
        send(everyone[1], what=f"-STOP {{all}}; sleep {here.seconds}; kill -CONT {{all}}")
    for _ in range(20):
        step()
        time.sleep(0.05)
    find(step())


def paused(here: Here) -> None:
    everyone = [*pids(here), int(os.environ[AGENT])]
    if here.rank == 0:
        send(*everyone, what=f"-STOP {{all}}; sleep {here.seconds}; kill -CONT {{all}}")
    for _ in range(20):
        step()
        time.sleep(0.05)
    find(step())


def pids(here: Here) -> list[int]:
    """The processes of all ranks."""
    mine = torch.zeros(here.world, dtype=torch.int64)
    mine[here.rank] = os.getpid()
    dist.all_reduce(mine)
    return [int(pid) for pid in mine]


def send(*to: int, what: str) -> None:
    """Have signals sent by a process that is none of the job's."""
    words = what.format(all=" ".join(map(str, to)))
    subprocess.Popen(["sh", "-c", f"sleep 0.3; kill {words}"], start_new_session=True)


def checkpoints(here: Here) -> None:
    """Save with torch's own function, which `install` replaces, and load it."""
    import torch.distributed.checkpoint as dcp

    # Of several pieces on each rank, so that there are several writes.
    names = [f"w{number}" for number in range(8)]
    state = {f"{name}.{here.rank}": torch.full((1 << 16,), float(here.rank)) for name in names}
    dcp.save(state, checkpoint_id=here.folder / "step-1")
    back = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.load(back, checkpoint_id=here.folder / "step-1")
    find(all(torch.equal(back[name], value) for name, value in state.items()))


def storage_is_slow(here: Here) -> None:
    with slow_writes([here.seconds / 8] * 8):
        checkpoints(here)


def storage_stands_still(here: Here) -> None:
    with slow_writes([here.seconds] if here.rank == 1 else []):
        checkpoints(here)


@contextmanager
def slow_writes(pauses: list[float]) -> Iterator[None]:
    """Writes of checkpoints that take longer: the first ones, each by one of these pauses. Holdfast writes with
    `pwritev`, one tensor or several at a time, torch through a stream."""
    from torch.distributed.checkpoint.filesystem import FileSystem

    left = list(pauses)

    def pause() -> None:
        if left:
            time.sleep(left.pop())

    pwritev, create_stream = os.pwritev, FileSystem.create_stream

    def slow_pwritev(fd: int, buffers: Any, offset: int) -> int:
        written = 0
        for buffer in buffers:
            pause()
            written += pwritev(fd, [buffer], offset + written)
        return written

    @contextmanager
    def slow_stream(self: Any, path: Any, mode: str) -> Iterator[Any]:
        with create_stream(self, path, mode) as stream:
            if mode == "wb":
                for _ in list(left):
                    pause()
            yield stream

    os.pwritev, FileSystem.create_stream = slow_pwritev, slow_stream  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        os.pwritev, FileSystem.create_stream = pwritev, create_stream  # type: ignore[method-assign]


def worlds(here: Here) -> None:
    """Three, one after another, in one process; the last is late at its end."""
    from megatron.core import parallel_state

    for number in range(3):
        if number:
            begin_world(number)
        save_model(here, lambda: write_slowly(here.folder / f"model-{number}", here.seconds / 3))  # noqa: B023
        find(step())
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    time.sleep(here.seconds if here.rank == 1 else 0.0)


def loader_workers(here: Here) -> None:
    for context in ("fork", "spawn"):
        data = torch.utils.data.DataLoader(
            Slow(here.seconds / 2),
            batch_size=2,
            num_workers=2 if context == "fork" else 1,
            multiprocessing_context=context,
        )
        find([batch.tolist() for batch in data if step()])


def subprocesses(here: Here) -> None:
    """Evaluations that inherit all variables: those of torchrun, and those of `holdfast run`."""
    program = (
        "import os, sys, time, torch, torch.distributed as dist;"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1);"
        f"time.sleep({here.seconds}); dist.barrier(); print(os.environ['RANK'], 'evaluated')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    find(f"{done.stdout.strip()}, {done.returncode}, {step()}")


def steps(here: Here) -> None:
    """Train, and find the CPU time of a step, and how much of it threads of Holdfast's take."""
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))
    data = torch.randn(64, 512)
    costs, own, ends = [], cpu_of_holdfast(), time.monotonic() + here.seconds
    before = time.process_time()
    while step() and not over(ends):
        begun = time.process_time()
        for _ in range(STEPS):
            model(data).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            model.zero_grad()
        costs.append((time.process_time() - begun) / STEPS)
    share = (cpu_of_holdfast() - own) / (time.process_time() - before)
    find(f"{median(costs)} {share}")


def over(ends: float) -> bool:
    """Have all ranks come to that time?"""
    passed = torch.tensor(float(time.monotonic() >= ends))
    dist.all_reduce(passed, op=dist.ReduceOp.MIN)
    return bool(passed)


def cpu_of_holdfast() -> float:
    """Seconds that all threads of Holdfast's have computed."""
    ids = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("holdfast")]
    return sum(int(Path(f"/proc/self/task/{one}/schedstat").read_text().split()[0]) for one in ids) / 1e9


class Job(NamedTuple):
    scenario: str
    run: Callable[[Here], None]
    world: int = 2
    files: tuple[str, ...] = ()
    """What it leaves in its folder."""
    found: int = 1
    """How many lines each rank finds."""
    copies: int = 1
    """How many run on this host at a time."""
    by_command: bool = False
    """Is it started by the real `torchrun`, and `holdfast run` in place of the line?"""


JOBS = {
    "writes": Job("rank 0 writes a model, the others wait in a guarded barrier", writes, 4, ("model",)),
    "late": Job("a late rank, the others wait in a guarded barrier", late, 4),
    "gil": Job(
        "rank 0 builds a data set in C++ that holds the GIL (`build_blending_indices`)", holds_the_gil
    ),
    "compiles": Job("rank 0 compiles (`torch.compile`, with nothing in its cache)", compiles),
    "loader": Job("a data loader that sleeps, the others are in a collective", loads_slowly),
    "exports": Job("an export by rank 0 alone, the others have ended", exports, 4, ("model",)),
    "uploads": Job("an upload by a thread after the end", uploads, files=("upload-0", "upload-1")),
    "early": Job("an early end of rank 3 on purpose, the others work on", ends_early, 4),
    "emergency": Job(
        "SIGTERM to all, a handler of the user's saves; rank 0 takes longer",
        emergency,
        4,
        tuple(f"emergency-{rank}" for rank in range(4)),
        found=0,
    ),
    "debugger": Job("a rank is stopped as by a debugger, the others are in a collective", debugged),
    "container": Job("all ranks and torchrun are stopped, as a container is paused", paused),
    "slow storage": Job("slow storage, with progress (`torch.distributed.checkpoint`)", storage_is_slow),
    "still storage": Job("storage that stands still for one rank", storage_stands_still),
    "two jobs": Job("two jobs on one host", writes, files=("model",), copies=2),
    "worlds": Job(
        "three worlds in one process, one after another",
        worlds,
        files=("model-0", "model-1", "model-2"),
        found=3,
    ),
    "workers": Job("workers of a DataLoader, forked and spawned", loader_workers, found=2),
    "subprocess": Job(
        "a subprocess that inherits the environment (`holdfast run`)", subprocesses, by_command=True
    ),
    "steps": Job("training, step by step", steps, 4),
}


def main() -> None:
    name, how, folder, seconds, limit = sys.argv[1:]
    torch.set_num_threads(1)
    if how == "install":
        holdfast.install(**limits(float(limit)))
    elif how == "default":
        holdfast.install(guard=["drill.healthy.save_model"])
    use_cpu()
    begin_world()
    JOBS[name].run(Here(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(folder), float(seconds)))


if __name__ == "__main__":
    # The guarded function must be found where a program of a user's would have it: in a module.
    from drill import healthy

    healthy.main()
