"""What ranks do after their session: some of it keeps a process alive for ever, some is a program that goes
on."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast import events
from holdfast.errors import HoldfastError
from holdfast.groups.session import exit_bound

SHORT, LONG = 1.5, 300.0
"""Seconds of `after_end` where something keeps a process, and how long that would."""
AMPLE, BEYOND = 4.0, 6.5
"""Seconds of `after_end` where a program goes on, and how long it does: a busy machine is to have time to end
it."""
kept: list[Any] = []


class SlowToGo:
    """Sleeps in the interpreter's finalisation."""

    def __del__(self, sleep: Any = time.sleep) -> None:
        sleep(LONG)


def after_the_session(mode: str, rank: int, folder: str, limits: dict[str, Any]) -> None:
    """One session on all ranks, whose bound is short; then what `mode` says."""
    exit_bound.MARGIN = 1.0 if mode in ("finalisation", "C exit handler", "GIL") else 30.0
    if mode == "goes on in a thread":
        threading.Thread(target=_train, args=(limits, AMPLE, BEYOND)).start()
        return
    if mode == "in a child of multiprocessing":
        child = multiprocessing.get_context("fork").Process(target=_as_child, args=(limits,))
        child.start()
        child.join()
        sys.exit(child.exitcode)
    _train(limits, {"ends": LONG, "save": AMPLE}.get(mode, SHORT))
    if mode == "save":
        events.subscribe(lambda event: time.sleep(BEYOND) if event.name == "save.written" else None)
        holdfast.async_save({"w": torch.ones(8)}, f"{folder}/after", no_dist=True, timeout=30)
    elif mode == "ends":
        atexit.register(time.sleep, AMPLE)
    else:
        _hold(mode)


def _train(limits: dict[str, Any], after_end: float, goes_on: float = 0.0) -> None:
    with holdfast.session(backend="gloo", after_end=after_end, **limits):
        dist.all_reduce(torch.ones(1))
    if goes_on:
        time.sleep(goes_on)
        print("the program went on", flush=True)


def _as_child(limits: dict[str, Any]) -> None:
    _train(limits, SHORT)
    _hold("child")


def _hold(mode: str) -> None:
    """Something keeps this process, once its main thread is through."""
    libc = ctypes.CDLL(None)
    if mode == "thread":
        threading.Thread(target=time.sleep, args=(LONG,), name="uploader").start()
    elif mode == "pool":
        kept.append(ThreadPoolExecutor(1, thread_name_prefix="loader").submit(time.sleep, LONG))
    elif mode == "handler":
        atexit.register(time.sleep, LONG)
    elif mode == "child":
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(LONG,)).start()
    elif mode == "finalisation":
        kept.append(SlowToGo())
    elif mode == "C exit handler":
        libc.on_exit(libc.pause, None)
    elif mode == "GIL":
        atexit.register(ctypes.PyDLL(None).pause)
    else:
        raise ValueError(mode)


def caught_sessions(rank: int, folder: str, limits: dict[str, Any]) -> None:
    """A session that fails on all ranks in a save and is caught, a life that goes on beyond all bounds,
    another session."""
    try:
        with holdfast.session(backend="gloo", after_end=SHORT, **limits) as s:
            dist.all_reduce(torch.ones(1))
            if rank == 1:
                raise ValueError("the loss is not a number")
            s.checkpoints(folder).save(1, {"w": torch.ones(8)})  # rank 1 does not come to it
            [time.sleep(0.05) for _ in range(200)]
    except (ValueError, HoldfastError):
        pass
    time.sleep(2 * SHORT)
    with holdfast.session(backend="gloo", after_end=LONG, **limits):
        dist.all_reduce(torch.ones(1))
