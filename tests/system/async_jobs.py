"""What the ranks of the asynchronous tests do; importable by spawned processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

import holdfast
from holdfast import events
from holdfast._core.background.queue import queue_of_this_thread
from holdfast._core.background.writer_client import START
from holdfast._core.format.digest import digest, hex_digest
from holdfast.errors import HoldfastError
from tests.support.collectives import counted
from tests.support.waiting import wait_until
from tests.system.jobs import moe_state

JOB = holdfast.Job(timeout=30, stall_timeout=25)  # storage of a busy machine may rest for seconds


def writer_process() -> psutil.Process:
    """The process that writes this rank's asynchronous saves."""
    (found,) = [child for child in psutil.Process().children() if str(START) in child.cmdline()]
    return found


def spoil(state: dict[str, Any]) -> None:
    """What an optimizer step does, at once: every tensor changes where it lies."""
    for value in state["model"].values():
        (value.tensor if isinstance(value, holdfast.Shard) else value).fill_(-7.0)
    state["step"] = -7
    state["rng"].value.fill_(-7)


def save_and_spoil(rank: int, folder: str, job: holdfast.Job) -> list[str]:
    """Three saves, each spoiled right after; the collectives that were issued meanwhile."""

    def work() -> None:
        for step in range(3):
            state = moe_state(rank, step)
            pending = holdfast.async_save(state, f"{folder}/step-{step}", step=step, job=job)
            pending.staged(1.0)
            spoil(state)
            report = pending.committed(30)
            assert report.step == step
            assert pending.done()
            assert pending.progress().phase == "committed"

    return counted(work)


def mishap(rank: int, folder: str, victim: int, what: str, job: holdfast.Job) -> tuple[str, float, str, bool]:
    """A save that meets something bad on one rank's writer; then one that must succeed."""
    state = moe_state(rank, 1)
    holdfast.async_save(state, f"{folder}/step-0", job=JOB).committed(30)
    writer = queue_of_this_thread().writer
    assert writer.pid is not None
    stop: Any = lambda: None  # noqa: E731
    if rank == victim:
        if what == "stop":
            os.kill(writer.pid, signal.SIGSTOP)
        elif what == "kill":
            os.kill(writer.pid, signal.SIGSTOP)  # so that it dies in the middle of the save, not before

            stopped = writer.pid

            def kill() -> None:
                wait_until(lambda: writer.busy)  # one that dies before it has the job is replaced
                if writer.pid == stopped:
                    os.kill(stopped, signal.SIGKILL)

            def watch(event: events.Event) -> None:
                if event.name == "save.writing":
                    threading.Thread(target=kill, daemon=True).start()

            stop = events.subscribe(watch)
    begun = time.monotonic()
    pending = holdfast.async_save(state, f"{folder}/step-1", job=job)
    try:
        pending.committed(40)
        said = "committed"
    except holdfast.errors.HoldfastError as error:
        said = f"{type(error).__name__} {error.rank}: {error}"
    took = time.monotonic() - begun
    stop()
    dist.barrier()
    holdfast.async_save(state, f"{folder}/step-2", job=JOB).committed(30)
    left = os.path.exists(f"{folder}/step-1/index.safetensors")
    files = sorted(os.listdir(f"{folder}/step-1/data")) if os.path.exists(f"{folder}/step-1/data") else []
    return said, took, ",".join(files), left


def killed_trainer(rank: int, folder: str, victim: int) -> tuple[str, int | None]:
    """A trainer is killed while its writer writes; returns what the others heard. Its writer's pid is in a
    file."""
    state = moe_state(rank, 1)
    holdfast.async_save(state, f"{folder}/step-0", job=JOB).committed(30)
    pid = writer_process().pid
    if rank == victim:
        Path(folder, "writer").write_text(str(pid))
        os.kill(pid, signal.SIGSTOP)
    pending = holdfast.async_save(state, f"{folder}/step-1", job=JOB)
    if rank == victim:
        os.kill(pid, signal.SIGCONT)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        pending.committed(40)
    except holdfast.errors.HoldfastError as error:
        return type(error).__name__, error.rank
    return "committed", None


def failing_once(rank: int, folder: str, on_failure: str) -> list[str]:
    """A run whose second save fails on one rank: where its error is raised."""
    said = []
    with holdfast.Checkpoints(folder, on_failure=on_failure, job=JOB) as run:
        for step in range(1, 5):
            state = moe_state(rank, step)
            if step == 2 and rank == 2:
                state["lock"] = threading.Lock()
            try:
                run.save(step, state)
                said.append(f"{step}: began")
            except holdfast.errors.HoldfastError as error:
                said.append(f"{step}: {type(error).__name__} {error.rank}")
        run.close()
        said.append(f"has {run.steps()}")
    return said


def mapped_arenas() -> int:
    """Bytes of shared memory that this process has mapped."""
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:" in line:
            begin, end = (int(address, 16) for address in line.split()[0].split("-"))
            found += end - begin
    return found


def many_saves(rank: int, folder: str, count: int) -> tuple[list[int], list[int], int]:
    """RSS and shared memory over many saves, and descriptors gained."""
    me = psutil.Process()
    rss, shared = [], []
    run = holdfast.Checkpoints(folder, keep=2, job=JOB)
    state = moe_state(rank, 0)
    files = 0
    for step in range(count):
        state["step"] = step
        run.save(step, state)
        rss.append(me.memory_info().rss)
        shared.append(mapped_arenas())
        if step == 3:
            files = me.num_fds()
    run.close()
    return rss, shared, me.num_fds() - files


def skipping(rank: int, folder: str) -> tuple[list[str], list[int]]:
    """Saves in a row, of which those that come while one is under way are skipped, on all ranks."""
    stop = slow_reports(0.5) if rank == 3 else lambda: None
    found = []
    with holdfast.Checkpoints(folder, on_busy="skip", job=JOB) as run:
        for step in range(6):
            found.append("skipped" if run.save(step, moe_state(rank, step)) is None else "began")
            time.sleep(0.1)
        run.close()
        stop()
        return found, run.steps()


def two_in_flight(rank: int, folder: str) -> list[str]:
    """Saves in a row where two may be under way, and the third of them fails."""
    with holdfast.Checkpoints(f"{folder}/warm", in_flight=2, job=JOB) as run:
        for step in range(2):
            run.save(step, moe_state(rank, step))
    stop = slow_reports(1.0) if rank == 3 else lambda: None
    said, begun = [], []
    with holdfast.Checkpoints(folder, in_flight=2, keep=3, job=JOB) as run:
        for step in range(6):
            state = moe_state(rank, step)
            if step == 2 and rank == 5:
                state["other"] = object  # what can't be saved
            try:
                begun.append(run.save(step, state))
                said.append(f"{sum(not pending.done() for pending in begun if pending)} under way")
            except HoldfastError as error:
                said.append(f"{type(error).__name__} {error.rank}")
            spoil(state)
        run.close()
        stop()
        return said


def slow_reports(seconds: float) -> Any:
    """This rank's background takes so long to go from one phase to the next."""

    def wait(event: events.Event) -> None:
        if event.name == "save.written":
            time.sleep(seconds)

    return events.subscribe(wait)


def train_demo(rank: int, folder: str | None, steps: int) -> tuple[list[float], str]:
    """Losses, and a digest of this rank's weights at the end."""
    from examples.moe.model import ModelConfig
    from examples.moe.train import Hooks, Layout, TrainConfig, Trainer, train

    losses: list[float] = []
    last: list[str] = []

    class Watch(Hooks):
        def step_done(self, step: int, loss: float, probe: float, seconds: float) -> None:
            losses.append(loss)

        def finished(self, trainer: Trainer) -> None:
            parts = [p.to_local() if hasattr(p, "to_local") else p for p in trainer.model.parameters()]
            last.append(hex_digest(digest(b"".join(part.detach().numpy().tobytes() for part in parts))))

    small = ModelConfig(dim=32, layers=2, heads=2, kv_heads=1, head_dim=16, experts=8, ffn=32)
    config = TrainConfig(
        steps=steps, save_every=1, sequences=8, length=32, save_to=folder, asynchronous=True, model=small
    )
    train(config, Layout(2, 2), Watch())
    return losses, last[0]


def stopping(rank: int, asks: int, at_step: int) -> tuple[int, str | None]:
    """A loop whose ranks drift by a step; one asks for a stop. Returns the step at which this rank
    stopped."""
    with holdfast.Preemption(budget=20, signals=(signal.SIGTERM,) if rank == asks else ()) as preemption:
        for step in range(400):
            time.sleep(0.01 * (rank % 3))
            if step % 5 == 0:
                dist.barrier()  # as training has: a rank that stopped alone would hang the others here
            if rank == asks and step == at_step:
                os.kill(os.getpid(), signal.SIGTERM)
            if preemption.should_stop():
                return step, preemption.reason
    return -1, None


def not_stopping_again(rank: int) -> list[str | None]:
    """A stop that was asked for before is not asked for again."""
    found = []
    for asks in (True, False):
        with holdfast.Preemption(budget=20, signals=()) as preemption:
            if asks and rank == 1:
                preemption.request("once")
            for _ in range(150):  # as many steps on all ranks, over three looks at what others want
                time.sleep(0.01)
                if preemption.should_stop():
                    break
            found.append(preemption.reason)
            dist.barrier()
    return found


SCRIPT = """
import sys, time, torch, holdfast
state = {"w": torch.arange(4_000_000.0)}
folder, mode = sys.argv[1:]
run = holdfast.Checkpoints(folder, job=holdfast.Job(timeout=20, stall_timeout=10))
run.save(1, state)
if mode == "raise":
    raise ValueError("the loss is not a number")
if mode == "exit":
    sys.exit(3)
if mode == "interrupt":
    import threading, os, signal
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    time.sleep(5)
"""
