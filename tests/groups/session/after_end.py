"""What ranks do after their session: some of it keeps a process alive for ever, some is a program that goes
on."""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast import events
from holdfast._groups.ending import bound
from holdfast.errors import HoldfastError

GRACE = 5.0
SHORT, LONG = 1.5, 300.0
"""Seconds of `after_end` where something keeps a process, and how long that would."""
AMPLE, BEYOND = 4.0, 6.5
"""Seconds of `after_end` where a program goes on, and how long it does: a busy machine is to have time to end
it."""
kept: list[Any] = []


class SlowToGo:
    """Takes long in the interpreter's finalisation."""

    def __init__(self, seconds: float = LONG) -> None:
        self.seconds = seconds

    def __del__(self, sleep: Any = time.sleep) -> None:
        sleep(self.seconds)


class SlowToKill(multiprocessing.get_context("fork").Process):  # type: ignore[misc, name-defined]
    """A child whose parent computes right after its kill, and so offers the GIL to its main thread, which waits for
    the child."""

    def kill(self) -> None:
        super().kill()
        ends = time.monotonic() + 0.5
        while time.monotonic() < ends:
            pass


def after_the_session(mode: str, rank: int, folder: str, job: holdfast.Job) -> None:
    """One session on all ranks, whose bound is short; then what `mode` says."""
    gc.unfreeze()  # an interpreter whose finalisation is looked at ends as others do
    if mode in ("finalisation", "C exit handler", "GIL", "an exit handler executes"):
        bound.MARGIN, bound.FINAL = 1.0, 0.0
    if mode.startswith("unbounded "):
        _train(replace(job, report_after=SHORT), None)
        _hold(mode.removeprefix("unbounded "), BEYOND)
        return
    if mode == "goes on in a thread":
        threading.Thread(target=_train, args=(job, AMPLE, BEYOND)).start()
        return
    if mode == "in a child of multiprocessing":
        child = multiprocessing.get_context("fork").Process(target=_as_child, args=(job,))
        child.start()
        child.join()
        sys.exit(child.exitcode)
    # A busy machine may give a thread nothing for seconds, although it has work.
    bounds = {"ends": LONG, "save": AMPLE} | dict.fromkeys(WORKING, AMPLE)
    _train(job, bounds.get(mode, SHORT))
    if mode == "save":
        events.subscribe(lambda event: time.sleep(BEYOND) if event.name == "save.written" else None)
        holdfast.async_save(
            {"w": torch.ones(8)}, f"{folder}/after", job=holdfast.Job(no_dist=True, timeout=30)
        )
    elif mode == "ends":
        atexit.register(time.sleep, AMPLE)
    else:
        _hold(mode)


COMPUTE = """
import time
ends = time.monotonic() + {seconds}
while time.monotonic() < ends:
    pauses = time.thread_time() + 0.05
    while time.thread_time() < pauses:
        sum(range(10_000))
    time.sleep(0.15)
"""
"""A quarter of a core, and many times what counts as none: also on a machine that has little left."""


def _compute() -> None:
    exec(COMPUTE.format(seconds=BEYOND), {})


def _write_a_file() -> None:
    with tempfile.TemporaryFile(buffering=0) as file:
        for _ in range(int(2 * BEYOND)):
            time.sleep(0.5)
            file.write(b"some")


def _upload() -> None:
    """A few bytes now and then, to a server that only reads."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    with sender, receiver:
        for _ in range(int(2 * BEYOND)):
            time.sleep(0.5)
            sender.send(b"some")
            receiver.recv(4)


def _have_a_child_compute() -> None:
    subprocess.run([sys.executable, "-c", COMPUTE.format(seconds=BEYOND)], check=True)


def _ring() -> None:
    """Bound work of its own by an alarm, as libraries do."""
    rung: list[int] = []
    signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    signal.setitimer(signal.ITIMER_REAL, SHORT)
    ends = time.monotonic() + BEYOND
    while not rung and time.monotonic() < ends:
        sum(range(10_000))
    if not rung:
        os._exit(9)


WORKING = {
    "computes": _compute,
    "writes a file": _write_a_file,
    "uploads": _upload,
    "a child computes": _have_a_child_compute,
}
"""What a thread does after the end of the main thread, for longer than the bound."""


def _train(job: holdfast.Job, after_end: float | None, goes_on: float = 0.0) -> None:
    with holdfast.session(backend="gloo", after_end=after_end, grace=GRACE, job=job):
        dist.all_reduce(torch.ones(1))
    if goes_on:
        time.sleep(goes_on)
        print("the program went on", flush=True)


def _as_child(job: holdfast.Job) -> None:
    _train(job, SHORT)
    _hold("child")


def _hold(mode: str, seconds: float = LONG) -> None:
    """Something keeps this process, once its main thread is through."""
    libc = ctypes.CDLL(None)
    if mode in WORKING:
        threading.Thread(target=WORKING[mode]).start()
    elif mode == "thread":
        threading.Thread(target=time.sleep, args=(seconds,), name="uploader").start()
    elif mode == "pool":
        kept.append(ThreadPoolExecutor(1, thread_name_prefix="loader").submit(time.sleep, LONG))
    elif mode == "handler":
        atexit.register(time.sleep, seconds)
    elif mode == "child":
        SlowToKill(target=time.sleep, args=(seconds,)).start()
    elif mode == "is long in its finalisation":
        kept.append(SlowToGo(BEYOND))
    elif mode == "finalisation":
        kept.append(SlowToGo())
    elif mode == "C exit handler":
        libc.on_exit(libc.pause, None)
    elif mode == "GIL":
        atexit.register(ctypes.PyDLL(None).pause)
    elif mode == "an exit handler rings":
        atexit.register(_ring)
    elif mode == "an exit handler executes":
        atexit.register(
            os.execv, sys.executable, [sys.executable, "-c", f"import time; time.sleep({BEYOND})"]
        )
    else:
        raise ValueError(mode)


def caught_sessions(rank: int, folder: str, job: holdfast.Job) -> None:
    """A session that fails on all ranks in a save and is caught, a life that goes on beyond all bounds,
    another session."""
    try:
        with holdfast.session(backend="gloo", after_end=SHORT, grace=GRACE, job=job) as s:
            dist.all_reduce(torch.ones(1))
            if rank == 1:
                raise ValueError("the loss is not a number")
            s.checkpoints(folder).save(1, {"w": torch.ones(8)})  # rank 1 does not come to it
            [time.sleep(0.05) for _ in range(200)]
    except (ValueError, HoldfastError):
        pass
    time.sleep(2 * SHORT)
    with holdfast.session(backend="gloo", after_end=LONG, grace=GRACE, job=job):
        dist.all_reduce(torch.ones(1))
