"""What calls leave behind, in the message store and in the process: nothing that grows."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import holdfast
from holdfast._core.base.values import Message
from holdfast._core.protocol.call import begin_call
from holdfast._core.protocol.task import CollectiveTask
from holdfast._core.roster.torch_store import TorchRoster
from holdfast.errors import HoldfastError
from tests.support.processes import ProcessWorld
from tests.support.threads import on_ranks

WARM, ROUNDS = 5, 10


# -- keys ---------------------------------------------------------------------------------


def test_the_message_store_does_not_grow(tmp_path: Path) -> None:
    few, many = keys_after(tmp_path / "few", WARM), keys_after(tmp_path / "many", WARM + ROUNDS)
    assert many == few


@pytest.mark.soak
def test_the_message_store_does_not_grow_over_a_thousand_calls(tmp_path: Path) -> None:
    assert keys_after(tmp_path / "many", 1000) == keys_after(tmp_path / "few", 10)


def keys_after(folder: Path, rounds: int) -> int:
    """Keys in a TCPStore after so many saves of all kinds, restores, choices and turns, a failed call of each
    kind among them."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def job(plain: Any) -> None:
        roster = TorchRoster(store, plain.rank, 3)
        asked = holdfast.Job(roster=roster, timeout=60.0, stall_timeout=30.0)
        checkpoints = holdfast.Checkpoints(folder, keep=2, asynchronous=False, job=asked)
        beside = holdfast.Checkpoints(f"{folder}-beside", keep=1, on_busy="skip", job=asked)
        for step in range(rounds):
            # Names that differ from rank to rank are settled one by one, a message a rank.
            state = {"w": torch.full((4,), float(step)), f"own{plain.rank}": torch.ones(2)}
            checkpoints.save(step, state)
            assert checkpoints.restore(state) == step
            pending = beside.save(step, state)
            assert pending is not None
            pending.committed(60)
            CollectiveTask("turn", "memory:turn", begin_call(asked)).run()
            with pytest.raises(HoldfastError):
                holdfast.load(
                    {"w": torch.zeros(5)}, checkpoints.store.child(f"step-{step:08d}").url, job=asked
                )
            with pytest.raises(HoldfastError):
                holdfast.save({f"bad{plain.rank}": lambda: 0}, folder / "bad", job=asked)
        beside.close()
        checkpoints.close()

    on_ranks(3, job)
    return int(store.num_keys())


class Recorded(CollectiveTask):
    """A task that keeps what ranks have contributed."""

    def contribute(self) -> Message:
        return {"mine": 1}

    def decide(self, contributions: dict[int, Message]) -> dict[int, Message]:
        heard = list(contributions.values())
        return {rank: {"heard": heard} for rank in contributions}

    def execute(self, answer: Message) -> Message:
        self.heard = answer["heard"]
        return {}


def test_a_task_after_a_failed_call_gets_what_ranks_contribute_and_no_more() -> None:
    """Their first message after it also lists the calls that were abandoned."""

    def job(plain: Any) -> Any:
        call = holdfast.Job(roster=plain, timeout=60.0)
        with pytest.raises(HoldfastError):
            holdfast.save({f"bad{plain.rank}": lambda: 0}, "memory-of-nothing", job=call)
        task = Recorded("a task", "memory:task", begin_call(call))
        task.run()
        return task.heard

    assert on_ranks(2, job) == [[{"mine": 1}, {"mine": 1}]] * 2


# -- what `close` gives back --------------------------------------------------------------


def footprint() -> tuple[int, int, int]:
    """Children, descriptors and shared memory of this process."""
    me = psutil.Process()
    arenas = [entry for entry in os.listdir("/proc/self/fd") if "holdfast-arena" in link(entry)]
    # Not the children of its children: the forkserver of this process starts ranks for other workers, too.
    return len(me.children()), me.num_fds(), len(arenas)


def link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def test_close_gives_everything_back(tmp_path: Path) -> None:
    holdfast.save({"w": torch.ones(4)}, tmp_path / "before", job=holdfast.Job(no_dist=True))
    gc.collect()
    before, threads = footprint(), set(threading.enumerate())
    checkpoints = holdfast.Checkpoints(tmp_path / "run", in_flight=2, keep=2)
    for step in range(4):
        checkpoints.save(step, {"w": torch.ones(1 << 16)})
    checkpoints.close()
    assert footprint() == before
    more = set(threading.enumerate()) - threads
    assert not [thread.name for thread in more if thread.name.startswith("holdfast")]
    checkpoints.save(9, {"w": torch.ones(1 << 16)})  # it begins anew
    checkpoints.close()
    assert checkpoints.steps() == [3, 9]
    assert footprint() == before


def test_checkpoints_that_are_dropped_give_everything_back_once_their_last_save_has_ended(
    tmp_path: Path,
) -> None:
    gc.collect()
    before = footprint()
    checkpoints = holdfast.Checkpoints(tmp_path / "run")
    pending = checkpoints.save(1, {"w": torch.ones(1 << 20)})
    assert pending is not None
    del checkpoints
    gc.collect()
    pending.committed(60)
    ended = threading.Event()
    for _ in range(200):
        gc.collect()  # what a save refers to is a circle
        if footprint() == before:
            return
        ended.wait(0.05)
    assert footprint() == before


# -- a second life ------------------------------------------------------------------------


@pytest.mark.parametrize("store_host", ["launcher", "rank 0"])
def test_a_second_process_group_begins_anew(tmp_path: Path, store_host: str) -> None:
    """The store of the first may still be there, with what was said in it."""
    with ProcessWorld(2, store_host=store_host) as world:
        assert world.run(two_lives_job, str(tmp_path), store_host) == [True, True]


def two_lives_job(rank: int, folder: str, store_host: str) -> bool:
    import torch.distributed as dist

    from holdfast._core.torch_private import default_store

    job = holdfast.Job(timeout=30.0, stall_timeout=20.0)
    store = default_store() if store_host == "launcher" else None
    while store is not None and hasattr(store, "underlying_store"):
        store = store.underlying_store  # the launcher's, which stays; gloo needs keys of its own in it
    with pytest.raises(HoldfastError):
        holdfast.save({f"own{rank}": lambda: 0}, f"{folder}/a", job=job)
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    if store is None:  # rank 0 hosts another one
        port = Path(folder, "port")
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            Path(folder, "port~").write_text(str(store.port))
            os.rename(Path(folder, "port~"), port)
        else:
            waited = threading.Event()
            while not port.exists():
                waited.wait(0.02)
            store = dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("second life", store), rank=rank, world_size=2)
    holdfast.save({f"own{rank}": torch.ones(3)}, f"{folder}/a", job=job)
    found = {f"own{rank}": torch.zeros(3)}
    holdfast.load(found, f"{folder}/a", job=job)
    dist.barrier()
    return bool((found[f"own{rank}"] == 1).all())
