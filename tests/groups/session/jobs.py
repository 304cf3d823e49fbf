"""What ranks do in a session, and at its end; importable by spawned processes."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from types import MemberDescriptorType
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast._core.process.heart import heart
from holdfast._core.torch_private import default_store
from holdfast._groups.session.session import GroupSession, open_sessions
from holdfast._groups.session.shutdown import _raise_in, _take_back
from holdfast.errors import HoldfastError

LAYOUT: dict[str, Any] = {"tp": 2, "pp": 2, "ep": 2}


def end_with(mode: str, rank: int, checkpoints: Any) -> None:
    """What happens at the end of a session's body."""
    if mode == "busy" and rank == 0:
        time.sleep(8)
    if mode == "late" and rank == 0:
        time.sleep(6.5)
    if mode == "thread" and rank == 1:
        threading.Thread(target=time.sleep, args=(300.0,), name="uploader").start()
        heart.begin(Laborious())
        for _ in range(60):  # as gloo and NCCL have several for each group
            threading.Thread(target=look_at_the_clock, daemon=True).start()
    if mode == "fork":
        _fork_and_train_on(rank)
    if mode == "save":
        checkpoints.save(1, {"w": torch.full((1 << 20,), 1.0)})
    if mode == "save fails":
        checkpoints.save(1, {"lock": threading.Lock()})
    if mode == "save and raise":
        checkpoints.save(1, {"w": torch.full((1 << 20,), 1.0)})
        if rank == 2:
            raise ValueError("the loss is not a number")
    raises = {"raise on 0": [0], "raise on 2": [2], "raise with handlers": [2], "raise on all": [0, 1, 2, 3]}
    if rank in raises.get(mode, []):
        raise ValueError(f"the loss of rank {rank} is not a number")
    if mode == "raise while others compute" and rank == 2:
        raise ValueError("the loss is not a number")
    if mode == "kill" and rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if mode in LEAVING and rank == 1:
        leave(mode)
    if mode == "dawdle" and rank == 1:
        dawdle(20)
    if mode == "hang" and rank == 3:
        raise ValueError("the loss is not a number")
    if mode == "raise while others compute":
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            torch.ones(8).sum()
    if mode == "hang":
        time.sleep(300)  # one call that Python can't be interrupted in
    if mode in (*raises, "save and raise", "kill", "dawdle", *LEAVING):
        dist.all_reduce(torch.ones(1))  # waits for the one that does not come


class Laborious:
    """A duty that takes as long as beats do in a large world, or on a busy machine."""

    interval = 0.05

    def beat(self) -> None:
        ends = time.thread_time() + 0.01
        while time.thread_time() < ends:
            pass

    def close(self) -> None: ...


def look_at_the_clock() -> None:
    """Do nothing, as threads of C++ libraries do it: 0.1 % of a core."""
    while True:
        ends = time.thread_time() + 0.0004
        while time.thread_time() < ends:
            pass
        time.sleep(0.4)


LEAVING = ("exit", "bare exit", "exit with words", "early good exit", "os._exit", "interrupt")


def leave(mode: str) -> None:
    """The program ends in the middle, in a way that is no failure of its code."""
    if mode == "exit":
        sys.exit(3)
    if mode == "bare exit":
        raise SystemExit(3)
    if mode == "exit with words":
        sys.exit("the data is gone")
    if mode == "early good exit":
        sys.exit(0)
    if mode == "os._exit":
        os._exit(3)
    raise KeyboardInterrupt


def dawdle(seconds: float) -> None:
    """Compute for a while, in no call of Holdfast's or of torch.distributed's."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        torch.ones(8).sum()


def _fork_and_train_on(rank: int) -> None:
    """Children end in one way or another, while their parent trains on."""
    children = []
    for how in ("raise", "exit", "end"):
        child = os.fork()
        if not child and how == "raise":
            raise ValueError("the child has no data")
        if not child and how == "exit":
            sys.exit(3)
        if not child:
            return
        children.append(child)
    for child in children:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(f"a child of rank {rank} ended with {code}", flush=True)
    for _ in range(20):  # as long as it takes to hear of a failure
        dist.all_reduce(torch.ones(1))
        time.sleep(0.05)


def stopped_store_host(rank: int) -> tuple[float, list[str]]:
    """A session whose store, on rank 0, stops answering for a while; how long its body took, and what was
    logged."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("holdfast").addHandler(handler)
    session = holdfast.session(job=holdfast.Job(timeout=20, report_after=1.0), grace=3, warm=False)
    with session:
        begun = time.monotonic()
        if rank == 0:
            default_store().wait(["in the body of 1", "in the body of 2"], timedelta(seconds=20))
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            default_store().set(f"in the body of {rank}", "")
            [time.sleep(0.05) for _ in range(160)]
        seconds = time.monotonic() - begun
    return seconds, said


def killed_store_host(rank: int) -> str:
    """A session whose store ends with rank 0."""
    try:
        with holdfast.session(job=holdfast.Job(timeout=20), grace=3, warm=False):
            if rank == 0:
                default_store().wait(["in the body of 1", "in the body of 2"], timedelta(seconds=20))
                os.kill(os.getpid(), signal.SIGKILL)
            default_store().set(f"in the body of {rank}", "")
            [time.sleep(0.05) for _ in range(600)]
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return "through"


def two_sessions(rank: int) -> tuple[list[str], list[int]]:
    """One that fails, on all ranks, and one after it; a rank dies in the second."""
    said = []
    for number in range(3):
        try:
            with holdfast.session(job=holdfast.Job(timeout=20, stall_timeout=3), grace=3) as s:
                dist.all_reduce(torch.ones(1))
                if number == 0 and rank == 1:
                    raise ValueError("the loss is not a number")
                if number == 0:
                    [time.sleep(0.05) for _ in range(200)]
                if number == 2 and rank == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                if number == 2:
                    [time.sleep(0.05) for _ in range(200)]
            said.append("through")
        except ValueError as error:
            said.append(str(error))
        except HoldfastError as error:
            said.append(f"{type(error).__name__} {error.rank}")
    assert s.failure is not None
    assert isinstance(SystemExit.__dict__["code"], MemberDescriptorType), "a block patches nothing"
    return said, [info.rank for info in s.failure.missing]


def two_to_the_end(rank: int) -> tuple[int, int, str]:
    """An exception that nobody catches, while two sessions without a block are open: how many are left,
    ended, and what is printed."""
    made = [
        GroupSession(job=holdfast.Job(timeout=20, stall_timeout=3), grace=3, warm=False).until_exit()
        for _ in range(2)
    ]
    printed = io.StringIO()
    error = ValueError("the loss is not a number")
    with contextlib.redirect_stderr(printed):
        sys.excepthook(ValueError, error, None)
    return len(open_sessions), sum(found.failure is not None for found in made), printed.getvalue()


def profiled(rank: int) -> list[int]:
    """What a profiler counts before a session, after one that has ended well, after one that has failed
    elsewhere, and after an exception was taken back. It hangs where the interpreter's mark has stayed."""

    def work() -> int:
        return sum(len(str(number)) for number in range(200))

    def counted() -> int:
        calls = 0

        def look(*event: object) -> None:
            nonlocal calls
            calls += event[1] == "call"

        sys.setprofile(look)
        work()
        sys.setprofile(None)
        return calls

    counts = [counted()]
    with holdfast.session(job=holdfast.Job(timeout=20), grace=3):
        dist.all_reduce(torch.ones(1))
    counts.append(counted())
    with (
        contextlib.suppress(HoldfastError, ValueError),
        holdfast.session(job=holdfast.Job(timeout=20), grace=3),
    ):
        if rank == 1:
            raise ValueError("the loss is not a number")
        while True:
            time.sleep(0.05)
    counts.append(counted())
    thread = threading.Thread(target=time.sleep, args=(1.0,))
    thread.start()
    assert thread.ident is not None
    _raise_in(thread.ident, KeyError)  # it can't arrive while the thread is in C, and would be printed then
    _take_back(thread.ident)
    counts.append(counted())
    thread.join()
    return counts
