"""Promises of docs/guarantees.md that no other test keeps."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Set
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast._core.base.threads import members
from holdfast._core.roster.memory import MemoryRoster
from holdfast._core.roster.process import _status, children_of, own_sockets, sockets
from holdfast.errors import CorruptCheckpoint, HoldfastError
from tests.support.ports import held_port
from tests.support.processes import ProcessWorld
from tests.support.threads import on_ranks
from tests.support.waiting import wait_until


def surroundings() -> dict[str, Any]:
    """What of this process a call might change outside of itself."""
    calls = (sys.exit, os._exit, sys.excepthook, threading.excepthook, sys.unraisablehook, dist.barrier)
    return {
        "threads": sorted(os.listdir("/proc/self/task")),
        "descriptors": descriptors(),
        "children": children_of(os.getpid()),
        "calls": [*calls, dist.all_gather_object, dist.init_process_group, SystemExit.__dict__["code"]],
        "handlers": [signal.getsignal(number) for number in range(1, signal.NSIG)],
        # Those that C code has set, faulthandler among it, are known to the kernel alone.
        "caught": [_status(os.getpid(), mask) for mask in ("SigCgt", "SigIgn", "SigBlk")],
        "faulthandler": faulthandler.is_enabled(),
        "timer": signal.getitimer(signal.ITIMER_REAL),
    }


def settled() -> dict[str, Any]:
    """What `surroundings` says once nothing moves any more: a world has just begun, and torch opens and closes
    connections some time after the call that asked for it."""
    last: list[dict[str, Any]] = []

    def is_still() -> bool:
        last.append(surroundings())
        time.sleep(0.3)
        return len(last) > 1 and last[-1] == last[-2]

    wait_until(is_still, 20.0)
    return last[-1]


def descriptors() -> set[tuple[str, str]]:
    """Every open descriptor, and what it is: a socket has its number. Without connections to the store."""
    found = set()
    of_others = to_the_store()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the look itself
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    of_others |= to_the_store()  # a connection that was accepted meanwhile
    return {entry for entry in found if int(entry[0]) not in of_others}


def to_the_store() -> set[int]:
    return accepted() | {one.fileno() for one in members(own_sockets)}


def accepted() -> set[int]:
    """The other ends of connections to servers in this process, as that of the store: how many clients a rank
    has depends on how many of its threads asked at once, and torch closes them some time after the rank has."""
    ends = []
    for one in sockets():
        with suppress(OSError, IndexError):
            # Not by `getpeername`, which fails once the other end has been reset.
            ends.append(
                (one.fileno(), one.getsockname()[1], one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            )
    served = {port for _, port, listens in ends if listens}
    return {number for number, port, listens in ends if port in served and not listens}


def changed(before: dict[str, Any], kept: Set[str] = frozenset()) -> dict[str, Any]:
    """What is not as it was, once what ends has had time to end, but for what may be kept."""

    found: dict[str, Any] = {}

    def is_over() -> bool:
        nonlocal found
        found = others()
        return found.keys() == kept

    def others() -> dict[str, Any]:
        now = surroundings()
        differ = {name: (before[name], now[name]) for name in now if now[name] != before[name]}
        # What is gone was torch's, which ends some of its threads and connections long after a world has begun on
        # a busy machine; `calls` looks after what is the program's own.
        for name in {"threads", "descriptors"} & differ.keys():
            was, here = differ.pop(name)
            if new := {*here} - {*was}:
                differ[name] = new
        return differ

    with suppress(AssertionError):
        wait_until(is_over, 10.0)
    return found


def calls(rank: int, folder: str) -> list[dict[str, Any]]:
    """What calls of each kind leave behind on a rank of a real job."""
    stop, (own, other) = threading.Event(), os.pipe()
    program = threading.Thread(target=stop.wait, daemon=True)
    program.start()
    before, left = settled(), []

    def state() -> dict[str, Any]:
        return {f"w{rank}": torch.full((100, 100), float(rank)), "step": 1}

    holdfast.save(state(), f"{folder}/plain", job=holdfast.Job(timeout=60))
    left.append(changed(before))
    holdfast.load(state(), f"{folder}/plain", job=holdfast.Job(timeout=60))
    left.append(changed(before))
    with pytest.raises(HoldfastError):
        holdfast.load(state(), f"{folder}/nothing", job=holdfast.Job(timeout=60))
    left.append(changed(before))
    with holdfast.Checkpoints(
        f"{folder}/run", asynchronous=False, job=holdfast.Job(options=holdfast.Options(writer_threads=2))
    ) as run:
        run.save(1, state())
        run.restore(state())
    left.append(changed(before))
    with holdfast.Checkpoints(f"{folder}/run-beside") as beside:
        pending = beside.save(1, state())
        assert pending is not None
        pending.committed(60)
    left.append(changed(before))
    holdfast.async_save(state(), f"{folder}/beside-0", job=holdfast.Job(timeout=60)).committed(60)
    # The writer process, the connection to it and the copy are kept for the next one, and nothing else.
    kept = {"children", "descriptors"}
    assert changed(before, kept).keys() == kept
    before = settled()
    for number in (1, 2):
        holdfast.async_save(state(), f"{folder}/beside-{number}", job=holdfast.Job(timeout=60)).committed(60)
        left.append(changed(before))
    assert len(own_sockets) <= 4, "more connections to the store than threads that ask it"
    os.write(other, b"its own")
    assert os.read(own, 7) == b"its own"
    assert program.is_alive()
    stop.set()
    return left


@pytest.mark.parametrize("store_host", ["launcher", "rank 0"])
def test_a_call_leaves_nothing_behind_and_patches_nothing(store_host: str, tmp_path: Path) -> None:
    with ProcessWorld(2, store_host=store_host) as world:
        assert world.run(calls, str(tmp_path), timeout=120) == [[{}] * 7] * 2


def worlds(rank: int, folder: str, ports: list[int]) -> list[tuple[int, int, int]]:
    """What `count` says after each of several worlds, which their sessions start and end."""
    dist.destroy_process_group()
    found: list[tuple[int, int, int]] = []

    def is_over() -> bool:
        left.append(count())
        return fits(left[-1], found[0] if found else (0, 0, 0))

    for number in range(2 * len(ports)):
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(ports[number // 2]),
        )
        with holdfast.session(backend="gloo", job=holdfast.Job(timeout=60)) as s:
            dist.all_reduce(torch.ones(1))
            s.checkpoints(f"{folder}/run").save(number, {"w": torch.ones(10)})
        assert not dist.is_initialized()
        del s
        left: list[tuple[int, int, int]] = []
        with suppress(AssertionError):  # what ends has time to
            wait_until(is_over, 20.0 if found else 3.0)
        found.append(left[-1])
    return found


def count() -> tuple[int, int, int]:
    """Threads of this process, of them Holdfast's, and descriptors; garbage is collected, and does not count."""
    gc.collect()
    ours = sum(thread.name.startswith("holdfast") for thread in threading.enumerate())
    return len(os.listdir("/proc/self/task")), ours, len(descriptors())


def fits(one: tuple[int, ...], first: tuple[int, ...]) -> bool:
    """Return whether nothing is more than the first time."""
    return all(now <= then for now, then in zip(one, first, strict=True))


def test_sessions_that_start_worlds_one_after_another_leave_what_the_first_left(tmp_path: Path) -> None:
    with ExitStack() as held, ProcessWorld(2) as world:
        ports = [held.enter_context(held_port()) for _ in range(3)]
        for counts in world.run(worlds, str(tmp_path), ports, timeout=180):
            assert all(fits(one, counts[0]) for one in counts), counts
            assert counts[0][1] == 1, "the heart, which answers `holdfast doctor` from then on"


def test_a_damaged_step_is_passed_over(tmp_path: Path) -> None:
    run = holdfast.Checkpoints(tmp_path, asynchronous=False, job=holdfast.Job(no_dist=True))
    for step in (1, 2):
        run.save(step, {"w": torch.full((1000,), float(step))})
    (data,) = (tmp_path / "step-00000002" / "data").iterdir()
    content = bytearray(data.read_bytes())
    at = content.index(torch.full((2,), 2.0).numpy().tobytes())
    content[at + 1] ^= 1
    data.write_bytes(content)
    state = {"w": torch.zeros(1000)}
    with pytest.raises(CorruptCheckpoint, match="'w'"):
        run.restore(state, 2)
    assert run.restore(state) == 1
    assert torch.equal(state["w"], torch.full((1000,), 1.0))
    with pytest.raises(CorruptCheckpoint):
        run.restore(state, fallback=False)


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the wall clock is years away from the last one."""
    rng = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: rng.uniform(0, 4e9))

    def job(roster: MemoryRoster) -> None:
        part = holdfast.Shard(torch.full((1, 4), float(roster.rank)), (3, 4), (roster.rank, 0))
        time.sleep(0.5 * roster.rank)  # the others wait, and look
        holdfast.save(
            {"w": part}, tmp_path / "s", job=holdfast.Job(roster=roster, timeout=20.0, stall_timeout=3.0)
        )
        whole = {"w": torch.zeros(3, 4)}
        holdfast.load(whole, tmp_path / "s", job=holdfast.Job(roster=roster, timeout=20.0, stall_timeout=3.0))
        assert whole["w"][:, 0].tolist() == [0.0, 1.0, 2.0]

    on_ranks(3, job)
