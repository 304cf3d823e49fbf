"""Programs that are healthy without a guard, and go on with one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import holdfast
from tests.groups.session.launch import Forks
from tests.support.processes import ProcessWorld

HERE = "tests.frameworks.test_guard_healthy"


def body(do: Callable[[], Any], step: int = 0) -> Any:
    """A function of a program; the test guards it."""
    return do()


def guarded_body(do: Callable[[], Any], step: int = 0) -> Any:
    holdfast.install("torch-dcp", guard=[f"{HERE}.body"], job=holdfast.Job(timeout=20))
    try:
        return body(do, step)
    finally:
        holdfast.uninstall()


@pytest.fixture
def world() -> Iterator[ProcessWorld]:
    with ProcessWorld(3) as made:
        yield made


def group_by_position_job(rank: int) -> list[float]:
    """Rank 2 is not in the group, and gives what `new_group` has returned, by position."""
    pair = dist.new_group([0, 1])
    sums, told = torch.ones(1), torch.full((1,), float(rank))

    def do() -> None:
        dist.all_reduce(sums, dist.ReduceOp.SUM, pair)
        dist.broadcast(told, 1, pair)

    guarded_body(do)
    return [sums.item(), told.item()]


def test_a_rank_that_is_not_in_the_group_does_not_wait(world: ProcessWorld) -> None:
    assert world.run(group_by_position_job, timeout=60) == [[2.0, 1.0], [2.0, 1.0], [1.0, 2.0]]


def asynchronous_job(rank: int) -> list[float]:
    """Ranks begin collectives of three groups in different orders, and wait for none before all are begun."""
    pairs = [(0, 1), (1, 2), (0, 2)]
    groups = {pair: dist.new_group(list(pair)) for pair in pairs}
    order = [[(0, 1), (0, 2)], [(1, 2), (0, 1)], [(0, 2), (1, 2)]][rank]
    sums = [torch.full((1,), rank + 1.0) for _ in order]

    def do() -> None:
        begun = [
            dist.all_reduce(one, group=groups[pair], async_op=True)
            for one, pair in zip(sums, order, strict=True)
        ]
        for work in begun:
            assert work is not None
            work.wait()

    guarded_body(do)
    return [one.item() for one in sums]


def test_asynchronous_collectives_wait_for_nobody(world: ProcessWorld) -> None:
    assert world.run(asynchronous_job, timeout=60) == [[3.0, 4.0], [5.0, 3.0], [4.0, 5.0]]


def own_steps_job(rank: int) -> list[Any]:
    """Each rank has made as many steps as it had batches, as under `Join`."""
    everyone: list[Any] = [None] * 3

    def do() -> None:
        dist.barrier()
        dist.all_gather_object(everyone, rank)

    guarded_body(do, step=100 + rank)
    return everyone


def test_each_rank_may_give_a_step_of_its_own(world: ProcessWorld) -> None:
    assert world.run(own_steps_job, timeout=60) == [[0, 1, 2]] * 3


def meet() -> None:
    dist.barrier()


def foreign_group_job(rank: int) -> list[float]:
    """Rank 2 plays an engine: it shares a group with trainer 0 that is over a store of its own, and whose ranks
    are no ranks of the world, as trainers make one to send weights to engines."""
    port: list[Any] = [None]
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        port = [store.port]
    dist.broadcast_object_list(port, src=0)
    weights = torch.full((1,), 7.0 if rank == 0 else 0.0)
    if rank == 2:
        store = dist.TCPStore("127.0.0.1", port[0], is_master=False)  # type: ignore[attr-defined]
    if rank == 1:
        guarded_body(meet)
        return []
    group, _ = c10d._new_process_group_helper(  # type: ignore[attr-defined]
        2,
        rank // 2,
        [],
        c10d.Backend("gloo"),
        dist.PrefixStore("weights", store),
        group_name="weights",
        timeout=timedelta(seconds=60),
    )
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}

    def do() -> None:
        dist.broadcast(weights, src=0, group=group)
        dist.barrier(group=group)
        dist.barrier()

    if rank == 0:
        guarded_body(do)
    else:
        dist.broadcast(weights, src=0, group=group)
        dist.barrier(group=group)
        guarded_body(meet)
    dist.destroy_process_group(group)
    return [weights.item()]


def test_a_group_with_another_world_is_left_to_torch(world: ProcessWorld) -> None:
    assert world.run(foreign_group_job, timeout=60) == [[7.0], [], [7.0]]


def patched_inside_job(rank: int) -> int:
    """A program replaces a collective while a guarded function runs."""
    seen: list[str] = []
    before = dist.barrier

    def replace() -> None:
        inner = dist.barrier

        def counted(*args: Any, **named: Any) -> Any:
            seen.append("barrier")
            return inner(*args, **named)

        dist.barrier = counted

    try:
        guarded_body(replace)
        dist.barrier()
    finally:
        dist.barrier = before
    return len(seen)


def test_what_a_program_puts_in_place_of_a_collective_stays(world: ProcessWorld) -> None:
    assert world.run(patched_inside_job, timeout=60) == [1] * 3


@torch.compile(backend="eager", fullgraph=True)
def doubled_sum(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def compiled_job(rank: int) -> list[float]:
    before = doubled_sum(torch.ones(1))
    inside = guarded_body(lambda: doubled_sum(torch.ones(1)))
    return [before.item(), inside.item()]


def test_a_compiled_function_with_a_collective_stays_one_graph(world: ProcessWorld) -> None:
    assert world.run(compiled_job, timeout=120) == [[7.0, 7.0]] * 3


FAKE = """
import torch, torch.distributed as dist, holdfast
import tests.frameworks.megatron.preload
from torch.testing._internal.distributed.fake_pg import FakeStore

holdfast.install()
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
from megatron.core import parallel_state

parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
with holdfast.guarded("a save"):
    dist.barrier()
    dist.all_reduce(torch.ones(1))
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("tests.support.run_code") as made:
        yield made


def test_a_world_of_which_one_rank_is_there(forks: Forks, tmp_path: Path) -> None:
    """As Megatron-LM makes one with `--fake-process-group`, and torchtitan, to measure memory."""
    ended = forks.run([FAKE], [0], 1, tmp_path / "terminal", 120.0)
    assert ended.codes == [0], ended.said


LAST = """
import atexit, os, subprocess, sys, time
import torch, torch.distributed as dist, holdfast

holdfast.install("torch-dcp")
dist.init_process_group("gloo")
rank = dist.get_rank()


def meet():
    with holdfast.guarded("a save"):
        dist.barrier()


meet()
"""
STOPPED = """
if rank == 1:
    subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -STOP {os.getpid()}; sleep 4; kill -CONT {os.getpid()}"])
else:
    time.sleep(2)
meet()
"""


@pytest.mark.parametrize("end", ["", "dist.destroy_process_group()"], ids=["end", "destroy"])
def test_a_rank_that_is_slow_to_leave_the_last_call(end: str, forks: Forks, tmp_path: Path) -> None:
    """It still reads the outcome, from the message store in the process of rank 0, which is done."""
    ended = forks.run([LAST + STOPPED + end], [0, 1], 2, tmp_path / "terminal", 60.0)
    assert ended.codes == [0, 0], ended.said


ANOTHER_GROUP = """
store = dist.distributed_c10d._get_default_store()
while hasattr(store, "underlying_store"):
    store = store.underlying_store


class Late:
    def state_dict(self):
        time.sleep(rank)
        return {"step": torch.ones(1)}

    def load_state_dict(self, state):
        pass


def again(number):
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore(number, store), rank=rank, world_size=2)


pending = holdfast.async_save({f"own{rank}": Late()}, "FOLDER/late")
again("second")
assert pending.committed().path
if rank == 1:
    try:
        raise ValueError("of the program")
    except ValueError:
        again("third")
else:
    pending = holdfast.async_save({"own0": torch.ones(1)}, "FOLDER/never")
    again("third")
    error = pending.exception()
    assert type(error).__name__ == "RankFailed" and error.rank == 1, error
    assert "it has destroyed its process group" in str(error), error
holdfast.save({f"own{rank}": torch.ones(1)}, "FOLDER/last")
print("went on")
"""


def test_a_group_that_is_made_anew_leaves_no_save_waiting(forks: Forks, tmp_path: Path) -> None:
    """A save under way is waited for. One that another rank can't come to any more ends at once, and not at
    its deadline in half an hour: in the message store, nobody answers for the rank there."""
    program = LAST + ANOTHER_GROUP.replace("FOLDER", str(tmp_path))
    ended = forks.run([program], [0, 1], 2, tmp_path / "terminal", 60.0)
    assert (ended.codes, ended.said.count("went on")) == ([0, 0], 2), ended.said


IN_A_HANDLER = """
def last():
    time.sleep(2 * rank)
    meet()
    time.sleep(2 * (1 - rank))  # rank 0 has the message store
    print("met")


atexit.register(last)
"""


def test_ranks_meet_in_atexit_handlers(forks: Forks, tmp_path: Path) -> None:
    ended = forks.run([LAST + IN_A_HANDLER], [0, 1], 2, tmp_path / "terminal", 60.0)
    assert (ended.codes, ended.said.count("met")) == ([0, 0], 2), ended.said
