"""What the ranks do in the tests of local folders; importable by spawned processes."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast._core.format.names import LEFT
from holdfast._core.saving.commit import Commit
from holdfast.errors import HoldfastError, StorageError

JOB = holdfast.Job(timeout=30)


def local_of(folder: str, rank: int, hosts: int) -> str:
    """Return the local folder of a rank's host; `hosts` hosts with as many ranks each."""
    return os.path.join(folder, f"host-{rank * hosts // dist.get_world_size()}")


def state_of(step: int, rank: int, world: int) -> dict[str, Any]:
    """A state with shards of all ranks, replicas that are declared, a plain tensor, objects and a value of each
    rank; all values depend on the step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shared = torch.Generator().manual_seed(step)
    pair, copy = rank // 2, rank % 2
    part = torch.Generator().manual_seed(7000 * step + pair)
    return {
        "shard": holdfast.Shard(torch.randn(3, 5, generator=generator), (3 * world, 5), (3 * rank, 0)),
        "pair": holdfast.Shard(
            torch.randn(64, generator=part),
            (64 * max(world // 2, 1),),
            (64 * pair,),
            replica=(copy, 2) if world > 1 else (0, 1),
        ),
        "same": torch.randn(11, generator=shared),
        "lr": 0.1 * step,
        "mine": holdfast.PerRank({"rank": rank, "step": step}),
    }


def values_of(state: dict[str, Any]) -> list[Any]:
    return [
        state["shard"].tensor.tolist(),
        state["pair"].tensor.tolist(),
        state["same"].tolist(),
        state["lr"],
        state["mine"].value,
    ]


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        log = logging.getLogger("holdfast")
        log.addHandler(self)
        log.setLevel(logging.INFO)
        return self.lines

    def __exit__(self, *error: object) -> None:
        logging.getLogger("holdfast").removeHandler(self)


def hold(folder: str) -> Path:
    """While this file is there, no durable commit is made, and none is refused."""
    return Path(folder) / "hold"


def cut(folder: str) -> Path:
    """While this file is there, each durable commit fails."""
    return Path(folder) / "cut"


def full(folder: str, host: int) -> Path:
    """While this file is there, no commit into the local folder of this host is made."""
    return Path(folder) / f"full-{host}"


obeyed = ""


def obey(new: str) -> None:
    """Make this process do what the files above say that are in this folder."""
    global obeyed
    obeyed = new
    if hasattr(Commit, "publish_as_it_is"):
        return
    publish = Commit.publish_as_it_is = Commit.publish  # type: ignore[attr-defined]

    def controlled(self: Commit) -> Any:
        folder = obeyed
        if "/host-" not in self.store.url:
            while hold(folder).exists():
                time.sleep(0.01)
            if cut(folder).exists():
                raise StorageError("The run can't be reached.")
        for host in range(8):
            if f"/host-{host}/" in self.store.url and full(folder, host).exists():
                raise StorageError("No space is left.")
        return publish(self)

    Commit.publish = controlled  # type: ignore[method-assign]


def checkpoints_of(rank: int, run: str, folder: str, hosts: int, **how: Any) -> holdfast.Checkpoints:
    obey(folder)
    return holdfast.Checkpoints(run, local=local_of(folder, rank, hosts), job=JOB, **how)


def save_steps(
    rank: int, run: str, folder: str, hosts: int, steps: list[int], how: dict[str, Any] | None = None
) -> tuple[list[tuple[str, str]], list[str]]:
    """Save steps one after the other; return where each was committed first, and where then, or the error."""
    found = []
    with Said() as said, checkpoints_of(rank, run, folder, hosts, **(how or {})) as checkpoints:
        for step in steps:
            pending = checkpoints.save(step, state_of(step, rank, dist.get_world_size()))
            assert pending is not None
            first = pending.committed(20).path
            try:
                found.append((first, pending.durable(20).path))
            except HoldfastError as error:
                found.append((first, str(error)))
    return found, said


def save_some_names(rank: int, run: str, folder: str, hosts: int) -> None:
    """Save a step that does not get durable, and then some names of another one, which do."""
    state = state_of(1, rank, dist.get_world_size())
    with checkpoints_of(rank, run, folder, hosts, on_failure="warn") as checkpoints:
        cut(folder).touch()
        whole = checkpoints.save(1, state)
        assert whole is not None
        whole.committed(20)
        assert isinstance(whole.exception(), HoldfastError)
        dist.barrier()
        cut(folder).unlink(missing_ok=True)
        dist.barrier()
        some = checkpoints.save(2, state, include=["same"])
        assert some is not None
        some.durable(20)


def save_same(rank: int, run: str, folder: str, hosts: int, step: int) -> None:
    """Restore, and save one name of a step, until it is durable."""
    state = {"same": state_of(step, rank, dist.get_world_size())["same"], "more": torch.ones(3)}
    with checkpoints_of(rank, run, folder, hosts) as checkpoints:
        checkpoints.restore(state, include=["same"])
        pending = checkpoints.save(step, state, exclude=["more"])
        assert pending is not None
        pending.durable(20)


def save_locally(
    rank: int,
    run: str,
    folder: str,
    hosts: int,
    steps: list[int],
    to: int | None,
    leaves: bool,
    anew: bool,
    how: dict[str, Any],
) -> None:
    """Restore (but not with `anew`), save steps while the run can't be reached, and end when all are committed
    locally and, with `leaves`, the run tells which steps it has left behind."""
    world = dist.get_world_size()
    checkpoints = checkpoints_of(rank, run, folder, hosts, in_flight=8, **how)
    if not anew:
        checkpoints.restore(state_of(0, rank, world), to)
    if rank == 0:
        hold(folder).touch()
    for step in steps:
        pending = checkpoints.save(step, state_of(step, rank, world))
        assert pending is not None
        assert "/host-" in pending.committed(20).path
        assert not pending.done()
    dist.barrier()
    if leaves:  # by the durable save, before its commit
        while not os.path.exists(os.path.join(run, LEFT)):
            time.sleep(0.01)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def restore(
    rank: int, run: str, folder: str, hosts: int, how: dict[str, Any] | None = None
) -> tuple[int | None, bool, str, list[str]]:
    """Restore the newest step; return it, whether all values are right, where it came from, and what was said."""
    world = dist.get_world_size()
    with Said() as said, checkpoints_of(rank, run, folder, hosts) as checkpoints:
        state = state_of(0, rank, world)
        report = checkpoints.restore_report(state, **(how or {}))
        if report is None:
            return None, False, "", said
        right = values_of(state) == values_of(state_of(report.step or 0, rank, world))
        return report.step, right, report.path, said


def restore_parts(
    rank: int, run: str, folder: str, hosts: int, saved_by: int
) -> tuple[int | None, bool, str]:
    """Restore what another number of ranks has saved, each tensor as a whole."""
    with checkpoints_of(rank, run, folder, hosts) as checkpoints:
        whole = torch.zeros(3 * saved_by, 5)
        same = torch.zeros(11)
        report = checkpoints.restore_report({"shard": whole, "same": same}, include=["shard", "same"])
        assert report is not None
        states = [state_of(report.step or 0, one, saved_by) for one in range(saved_by)]
        right = torch.equal(whole, torch.cat([state["shard"].tensor for state in states]))
        return report.step, right and torch.equal(same, states[0]["same"]), report.path


def tree(folder: str | Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def salted(step: int, salt: int, rank: int, world: int) -> dict[str, Any]:
    """The state of a step of one start of the job: no two starts save the same values."""
    return {**state_of(1000 * salt + step, rank, world), "salt": salt, "step": step}


def train_until_killed(rank: int, run: str, folder: str, hosts: int, salt: int) -> None:
    """Restore, and save step after step. What came back, and what was promised, is appended to a file of this
    rank at once."""
    world = dist.get_world_size()
    with open(os.path.join(folder, f"told-{rank}"), "ab", buffering=0) as told:

        def tell(*words: object) -> None:
            told.write((json.dumps([salt, *words]) + "\n").encode())

        checkpoints = checkpoints_of(rank, run, folder, hosts, in_flight=2, on_failure="warn", keep=3)
        state = salted(0, 0, rank, world)
        report = checkpoints.restore_report(state)
        last, of = int(state["step"]), int(state["salt"])
        if report is None:
            tell("began")
        else:
            right = values_of(state) == values_of(salted(last, of, rank, world)) and report.step == last
            tell("restored", of, last, right, "/host-" in report.path)

        def note(step: int, pending: holdfast.Pending) -> None:
            with suppress(HoldfastError):
                tell("committed", salt, step, "/host-" in pending.committed().path)
                pending.durable()
                tell("durable", salt, step)

        for step in range(last + 1, last + 1000):
            pending = checkpoints.save(step, salted(step, salt, rank, world))
            assert pending is not None
            threading.Thread(target=note, args=(step, pending), daemon=True).start()
            time.sleep(0.01)
