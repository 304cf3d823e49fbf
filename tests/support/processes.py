"""Worlds of real processes that can be killed, stopped, and asked what they are doing.

    with ProcessWorld(8) as world:
        results = world.run(job, "run/step-1", timeout=60)      # job(rank, "run/step-1") on each rank
        world.start(job, ...); world.signal(5, signal.SIGKILL); results = world.collect(timeout=20)

Processes come from a forkserver that has imported torch once, so a world of eight starts in
about a second. Each has a gloo process group over a TCPStore that this process hosts (as
torchrun's agent does), or that rank 0 hosts. Every call has a hard limit: what is still running
by then has its stacks dumped and is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from tests.support.forkservers import SharedForkServer

BASE = (
    *("torch", "torch.distributed", "torch.distributed.tensor"),
    *("holdfast._core.run.checkpoints", "holdfast._frameworks.install"),
    # What most jobs import: their modules have tests, too.
    *("pytest", "safetensors.torch", "encodings.idna"),
)
PRELOAD = [*BASE]
_servers: dict[str, SharedForkServer] = {}
"""By what they have imported."""


@dataclass(frozen=True)
class Result:
    """How a job ended on one rank."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    seconds: float = 0.0
    died: int | None = None
    """The exit code of a process that ended without an answer."""

    def get(self) -> Any:
        """The value, or the error raised here."""
        if self.error is not None:
            self.error.add_note(f"on rank {self.rank}:\n{self.trace}")
            raise self.error
        if self.died is not None:
            raise RuntimeError(f"rank {self.rank} died with exit code {self.died}")
        return self.value


class ProcessWorld:
    """`size` ranks, each a process; see the module."""

    def __init__(
        self, size: int, *, store_host: str = "launcher", env: dict[str, str] | None = None, preload: str = ""
    ) -> None:
        """preload: a module of `tests.support.preloads`; ranks find imported what it imports."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        if store_host not in ("launcher", "rank 0"):
            raise ValueError("store_host is 'launcher' or 'rank 0'")
        self.size = size
        context = mp.get_context("forkserver")
        self.store = (
            TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            if store_host == "launcher"
            else None
        )
        port = self.store.port if self.store is not None else 0
        self._stacks = tempfile.mkdtemp(prefix="holdfast-world-")
        self._port_file = os.path.join(self._stacks, "port")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._busy: set[int] = set()
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, size, port, self._port_file, self._stacks, theirs, dict(env or {})),
                daemon=True,
            )
            with forked_after(preload):
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for result in self._gather(range(size), 60.0):
            result.get()

    def pid(self, rank: int) -> int:
        return int(self._processes[rank].pid)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to one rank's process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid(rank), number)

    def start(self, job: Callable[..., Any], *args: Any, ranks: Iterable[int] | None = None) -> None:
        """Begin `job(rank, *args)` on ranks (default all); `job` must be importable."""
        for rank in range(self.size) if ranks is None else ranks:
            _send(self._pipes[rank], (job, args))
            self._busy.add(rank)

    def collect(self, timeout: float, ranks: Iterable[int] | None = None) -> list[Result]:
        """The answers of some busy ranks (default all), by rank; kills and reports those that give none
        in time."""
        return self._gather(sorted(self._busy) if ranks is None else ranks, timeout)

    def collect_some(self, timeout: float, ranks: Iterable[int] | None = None) -> list[Result]:
        """The answers of some busy ranks (default all) that arrive in time; others go on undisturbed."""
        return self._receive(set(self._busy) if ranks is None else set(ranks), timeout)

    def run(
        self, job: Callable[..., Any], *args: Any, ranks: Iterable[int] | None = None, timeout: float = 60.0
    ) -> list[Any]:
        """`start`, `collect`, and the values; the first error is raised."""
        self.start(job, *args, ranks=ranks)
        return [result.get() for result in self.collect(timeout)]

    def _receive(self, ranks: set[int], timeout: float) -> list[Result]:
        ends = time.monotonic() + timeout
        missing, found = set(ranks), []
        while missing and time.monotonic() < ends:
            for pipe in wait([self._pipes[rank] for rank in missing], max(0.0, ends - time.monotonic())):
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                missing.discard(rank)
                self._busy.discard(rank)
                try:
                    found.append(_receive(self._pipes[rank]))
                except (EOFError, ConnectionError):
                    self._processes[rank].join(5.0)
                    found.append(Result(rank, died=self._processes[rank].exitcode))
        return found

    def _gather(self, ranks: Iterable[int], timeout: float) -> list[Result]:
        wanted = set(ranks)
        found = {result.rank: result for result in self._receive(wanted, timeout)}
        missing = sorted(wanted - set(found))
        if missing:
            dump = self.stacks(missing)
            self.close()
            raised = "".join(
                f"--- rank {rank} raised\n{r.trace}" for rank, r in sorted(found.items()) if r.trace
            )
            raise TimeoutError(
                f"ranks {missing} gave no answer within {timeout} s and were killed.\n{raised}{dump}"
            )
        return [found[rank] for rank in sorted(found)]

    def stacks(self, ranks: Iterable[int]) -> str:
        """The Python stacks of all threads of some ranks."""
        ranks = sorted(ranks)
        for rank in ranks:
            self.signal(rank, signal.SIGCONT)
            self.signal(rank, signal.SIGUSR1)
        time.sleep(0.5)
        parts = []
        for rank in ranks:
            with (
                contextlib.suppress(OSError),
                open(os.path.join(self._stacks, f"rank{rank}"), encoding="utf-8") as file,
            ):
                parts.append(f"--- rank {rank}\n{file.read()}")
        return "\n".join(parts)

    def close(self) -> None:
        """End every process; kill by pid what does not end by itself."""
        for rank, pipe in enumerate(self._pipes):
            if rank in self._busy:  # it would hear of its end after its job, whose answer nobody waits for
                self._processes[rank].kill()
                continue
            self.signal(rank, signal.SIGCONT)
            with contextlib.suppress(OSError, ValueError):
                _send(pipe, None)
        ends = time.monotonic() + 3.0
        for process in self._processes:
            process.join(max(0.0, ends - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(5.0)
        for pipe in self._pipes:
            pipe.close()
        for name in os.listdir(self._stacks) if os.path.isdir(self._stacks) else ():
            os.unlink(os.path.join(self._stacks, name))
        with contextlib.suppress(OSError):
            os.rmdir(self._stacks)

    def __enter__(self) -> ProcessWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _send(pipe: Connection, message: object) -> None:
    """Send a copy. `pipe.send` shares the memory of a tensor by a descriptor, which the receiver keeps open as long as
    the tensor."""
    pipe.send_bytes(pickle.dumps(message))


def _receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


@contextlib.contextmanager
def forked_after(preload: str) -> Iterator[None]:
    """Inside, processes start from the forkserver that has imported this module of `preloads`; without one, from the
    usual one."""
    # `multiprocessing` knows one forkserver; its processes ask this function of the module for a new one.
    usual = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = shared(preload).connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = usual


def shared(preload: str = "") -> SharedForkServer:
    """Return the forkserver that has imported this module of `preloads`; without one, the usual one."""
    if preload not in _servers:
        modules = [*BASE, f"tests.support.preloads.{preload}"] if preload else [*PRELOAD]
        _servers[preload] = SharedForkServer(preload or "usual", [*modules, "tests.support.frozen"])
    return _servers[preload]


def _serve(
    rank: int, size: int, port: int, port_file: str, stacks: str, pipe: Connection, env: dict[str, str]
) -> None:
    """A rank: set up, then run jobs until told to end."""
    path = os.path.join(stacks, f"rank{rank}")
    dump = open(path, "w", encoding="utf-8")  # noqa: SIM115 (lives as long as the process)
    faulthandler.register(signal.SIGUSR1, dump, all_threads=True)
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **env})
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        store = _connect(rank, port, port_file)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        _send(pipe, Result(rank))
    except BaseException as error:
        _send(pipe, Result(rank, error=error, trace=traceback.format_exc()))
        return
    while True:
        try:
            order = _receive(pipe)
        except (EOFError, ConnectionError):
            break
        if order is None:
            break
        job, args = order
        begun = time.monotonic()
        try:
            answer = Result(rank, job(rank, *args), seconds=time.monotonic() - begun)
        except BaseException as error:
            answer = Result(rank, error=error, trace=traceback.format_exc(), seconds=time.monotonic() - begun)
        try:
            _send(pipe, answer)
        except Exception as error:
            _send(pipe, Result(rank, error=RuntimeError(f"{answer} can't be sent: {error}")))
    sys.stdout.flush()
    os._exit(0)  # peers may be dead: a tidy teardown of the process group could wait for them


def _connect(rank: int, port: int, port_file: str) -> Any:
    """The store: the launcher's, or one that rank 0 hosts on a port that the kernel chooses."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if port:
        return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with open(port_file + ".new", "w", encoding="ascii") as file:
            file.write(str(store.port))
        os.rename(port_file + ".new", port_file)
        return store
    ends = time.monotonic() + 30.0
    while not os.path.exists(port_file):
        if time.monotonic() > ends:
            raise TimeoutError("rank 0 did not start its store")
        time.sleep(0.01)
    with open(port_file, encoding="ascii") as file:
        return TCPStore("127.0.0.1", int(file.read()), is_master=False, wait_for_workers=False)
