"""Programs of eight ranks over gloo that hang in one way each, as a user could have written them.

Each is given a `Job`. Mostly it is rank 3 that does what it should not.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.support.gil import hold_the_gil
from tests.support.waiting import wait_until

ODD = 3
LONG = 120.0
"""Seconds in which the test is over, and has ended these processes."""


class Job(NamedTuple):
    """What a program is given."""

    rank: int
    train: Any
    other: Any
    """Two groups of all ranks."""
    seconds: float
    """Their timeout."""
    folder: str
    store: Any
    """That all jobs have in common."""

    @property
    def is_odd(self) -> bool:
        return self.rank == ODD

    def fifo(self) -> str:
        """Make a file that nobody writes to."""
        path = os.path.join(self.folder, f"fifo-{self.rank}")
        os.mkfifo(path)
        return path


def all_reduce(group: Any, elements: int = 4) -> None:
    dist.all_reduce(torch.ones(elements), group=group)


def compute(seconds: float) -> None:
    """Work in Python, in turns with rests: eight ranks share few cores."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        plan_a_part()
        check_a_part()
        time.sleep(0.05)


def plan_a_part() -> int:
    return sum(number * number for number in range(200_000))


def check_a_part() -> int:
    return sum(number ^ 7 for number in range(200_000))


# -- a rank that does not come ------------------------------------------------------------------------------


def asleep(job: Job) -> None:
    if job.is_odd:
        time.sleep(LONG)
    all_reduce(job.train)


def with_the_gil(job: Job) -> None:
    if job.is_odd:
        hold_the_gil(LONG)
    all_reduce(job.train)


def stopped(job: Job) -> None:
    if job.is_odd:
        os.kill(os.getpid(), signal.SIGSTOP)
    all_reduce(job.train)


def with_a_lock(job: Job) -> None:
    """Another thread of the rank has the lock that its main thread wants."""
    lock, is_held = threading.Lock(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            time.sleep(LONG)

    if job.is_odd:
        threading.Thread(target=hold, daemon=True).start()
        assert is_held.wait(LONG)
        with lock:
            pass
    all_reduce(job.train)


def in_a_deadlock(job: Job) -> None:
    """Two threads of a rank hold a lock each, and want that of the other."""
    one, other, are_held = threading.Lock(), threading.Lock(), threading.Barrier(2, timeout=LONG)

    def take_both(first: threading.Lock, second: threading.Lock) -> None:
        with first:
            are_held.wait()
            with second:
                pass

    if job.is_odd:
        threading.Thread(target=take_both, args=(other, one), daemon=True).start()
        take_both(one, other)
    all_reduce(job.train)


def in_storage(job: Job) -> None:
    """A file that can't be opened before somebody writes."""
    if job.is_odd:
        with open(job.fifo(), "rb") as file:
            file.read()
    all_reduce(job.train)


def behind_a_server(job: Job) -> None:
    """A server that does not answer."""
    if job.is_odd:
        ours, theirs = socket.socketpair()
        ours.recv(1)
        theirs.close()
    all_reduce(job.train)


def behind_a_child(job: Job) -> None:
    if job.is_odd:
        subprocess.run(["sleep", str(LONG)], check=True)
    all_reduce(job.train)


def polls(job: Job) -> None:
    """It looks again and again for a file that nobody writes."""
    if job.is_odd:
        while not os.path.exists(os.path.join(job.folder, "marker")):
            time.sleep(0.05)
    all_reduce(job.train)


def spins(job: Job) -> None:
    """The same, without a rest."""
    done = False
    if job.is_odd:
        count = 0
        while not done:
            count += 1
            count -= 1
    all_reduce(job.train)


class Samples(torch.utils.data.Dataset[int]):
    """Four samples, of which the third takes for ever on one rank."""

    def __init__(self, hangs: bool) -> None:
        self.hangs = hangs

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if self.hangs and index == 2:
            time.sleep(LONG)
        return index


def in_its_loader(job: Job) -> None:
    loader = torch.utils.data.DataLoader(Samples(job.is_odd), num_workers=int(job.is_odd))
    for _ in loader:
        all_reduce(job.train)


def in_a_pipeline(job: Job) -> None:
    """Eight stages hand on; one of them has nothing to send yet."""
    last = dist.get_world_size() - 1
    if job.rank > 0:
        dist.recv(torch.zeros(4), job.rank - 1, group=job.train)
    if job.is_odd:
        time.sleep(LONG)
    if job.rank < last:
        dist.send(torch.ones(4), job.rank + 1, group=job.train)
    all_reduce(job.other)


def in_a_subgroup(job: Job) -> None:
    """Two groups of four, then all."""
    halves = [
        dist.new_group(ranks, group_desc=f"tensor-{ranks[0]}") for ranks in ([0, 1, 2, 3], [4, 5, 6, 7])
    ]
    if job.is_odd:
        time.sleep(LONG)
    all_reduce(halves[job.rank // 4])
    all_reduce(job.train)


def before_a_group_opens(job: Job) -> None:
    """The others open a group: torch records no collective, so that the call must be asked for."""
    if job.is_odd:
        time.sleep(LONG)
    dist.new_group(group_desc="late")


def opens_groups_in_another_order(job: Job) -> None:
    """Two groups of all ranks by names of the program's, as engines open them; one rank begins with the other."""
    names = ["weights-0", "weights-1"]
    for name in names[::-1] if job.is_odd else names:
        shared_group(name, job, list(range(dist.get_world_size())))


def before_our_save(job: Job) -> None:
    """The others wait in a save of Holdfast's."""
    import holdfast

    if job.is_odd:
        time.sleep(LONG)
    holdfast.save(
        {f"w{job.rank}": torch.ones(4)},
        os.path.join(job.folder, "step-1"),
        job=holdfast.Job(timeout=job.seconds),
    )


# -- a rank that comes late ---------------------------------------------------------------------------------


def late(job: Job) -> None:
    begun = time.monotonic()
    while job.is_odd and is_too_early(job, begun):
        compute(0.2)
    all_reduce(job.train)


def is_too_early(job: Job, begun: float) -> bool:
    """Return whether the result of the roll call is still to come, and the timeout, too."""
    is_told = any("Roll call of" in file.read_text() for file in Path(job.folder).glob("told-*"))
    return not is_told and time.monotonic() < begun + job.seconds * 0.85


def late_and_slow_to_answer(job: Job) -> None:
    """Its work keeps the GIL in pieces, so that its other threads go on slowly."""
    begun = time.monotonic()
    while job.is_odd and is_too_early(job, begun):
        hold_the_gil(0.15)
        check_a_part()
        hold_the_gil(0.15)
        plan_a_part()
    all_reduce(job.train)


def two_are_late(job: Job) -> None:
    if job.rank in (ODD, 5):
        compute(LONG)
    all_reduce(job.train)


def plans_a_checkpoint(job: Job) -> None:
    """torch's own DCP: rank 0 plans for all, and that takes long."""
    import torch.distributed.checkpoint as dcp

    class Planner(dcp.DefaultSavePlanner):
        def create_global_plan(self, plans: Any) -> Any:
            compute(LONG)
            return super().create_global_plan(plans)

    dcp.save(
        {f"w{job.rank}": torch.ones(4)},
        storage_writer=dcp.FileSystemWriter(os.path.join(job.folder, "dcp")),
        planner=Planner(),
        process_group=job.train,
    )


def in_a_long_call(job: Job) -> None:
    """It computes in C for long, without the GIL, on one line."""
    if job.is_odd:
        hashlib.pbkdf2_hmac("sha256", b"word", b"salt", 100_000_000)
    all_reduce(job.train)


def behind_a_child_that_works(job: Job) -> None:
    if job.is_odd:
        subprocess.run(["timeout", str(LONG), "sh", "-c", "while :; do :; done"], check=False)
    all_reduce(job.train)


# -- ranks that do something else ---------------------------------------------------------------------------


def in_another_order(job: Job) -> None:
    groups = [job.train, job.other]
    for group in groups if job.is_odd else groups[::-1]:
        all_reduce(group)


def one_behind(job: Job) -> None:
    """It has left out one collective of several that look alike, and is through when the others wait."""
    for step in range(3):
        all_reduce(job.train)
        if not (job.is_odd and step == 1):
            all_reduce(job.train)
    finish()


def finish() -> None:
    time.sleep(LONG)


def leaves_one_out(job: Job) -> None:
    """A condition that ranks decide differently."""
    if not job.is_odd:
        all_reduce(job.train)
    compute(LONG)


def one_more(job: Job) -> None:
    """A barrier that only one rank comes to."""
    if job.is_odd:
        dist.barrier(job.other)
    all_reduce(job.train)


def suppressed(job: Job) -> None:
    """An error that one rank catches costs it a collective."""
    with contextlib.suppress(ValueError):
        check_batch(job)
        all_reduce(job.train)
    dist.barrier(job.other)


def check_batch(job: Job) -> None:
    if job.is_odd:
        raise ValueError("the batch is empty")


def skips_a_send(job: Job) -> None:
    """A stage of a pipeline hands nothing on."""
    last = dist.get_world_size() - 1
    if job.rank > 0:
        dist.recv(torch.zeros(4), job.rank - 1, group=job.train)
    if job.rank < last and not job.is_odd:
        dist.send(torch.ones(4), job.rank + 1, group=job.train)
    all_reduce(job.other)


def another_operation(job: Job) -> None:
    if job.is_odd:
        dist.broadcast(torch.ones(4), 0, group=job.train)
    else:
        all_reduce(job.train)
    finish()


def another_shape(job: Job) -> None:
    all_reduce(job.train, 8 if job.is_odd else 4)
    finish()


def fewer_batches(job: Job) -> None:
    for _ in range(3 if job.is_odd else 4):
        all_reduce(job.train)
    dist.barrier()


def fewer_batches_and_works(job: Job) -> None:
    for _ in range(3 if job.is_odd else 4):
        all_reduce(job.train)
    compute(LONG)


def on_two_threads(job: Job) -> None:
    """Two threads use one group; nothing puts them in an order."""

    def reduce(pause: float) -> None:
        time.sleep(pause)
        all_reduce(job.train)

    def gather(pause: float) -> None:
        time.sleep(pause)
        dist.broadcast(torch.ones(4), 0, group=job.train)

    first, second = (reduce, gather) if job.is_odd else (gather, reduce)
    threads = [threading.Thread(target=first, args=(0.0,)), threading.Thread(target=second, args=(0.3,))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# -- ends ---------------------------------------------------------------------------------------------------


def dies(job: Job) -> None:
    if job.is_odd:
        os._exit(3)
    all_reduce(job.train)


def hangs_at_its_exit(job: Job) -> None:
    """All programs end; the last step of each process is a barrier, before which one uploads for ever."""
    Finalize(None, dist.barrier, args=(job.train,), exitpriority=1)
    if job.is_odd:
        Finalize(None, upload, args=(job.fifo(),), exitpriority=2)


def upload(path: str) -> None:
    with open(path, "wb") as file:
        file.write(b"all")


def all_alike(job: Job) -> None:
    """The network of the collectives has gone."""
    wait_until(lambda: os.path.exists(os.path.join(job.folder, "cut")))
    all_reduce(job.train)


def on_a_dead_host(job: Job) -> None:
    wait_until(lambda: os.path.exists(os.path.join(job.folder, "cut")))
    all_reduce(job.train)


def trainer_and_engine(job: Job) -> None:
    """Two worlds of four. Rank 0 of the trainer hands weights to all of the engine, whose rank 0 waits for rank 1
    of the trainer, which waits for rank 0 of the trainer."""
    trainer = job.rank < 4
    weights = rollout = None
    if job.rank in (0, 4, 5, 6, 7):
        weights = shared_group("weights", job, [0, 4, 5, 6, 7])
    if job.rank in (1, 4):
        rollout = shared_group("rollout", job, [1, 4])
    for group in (weights, rollout):
        if group is not None:
            all_reduce(group)
    order = {0: [weights, job.train], 1: [job.train, rollout], 4: [rollout, weights]}
    for group in order.get(job.rank, [job.train] if trainer else [weights]):
        all_reduce(group)


def shared_group(name: str, job: Job, ranks: list[int]) -> Any:
    """Make a group over two worlds, as OpenRLHF and verl do."""
    from torch.distributed import distributed_c10d as c10d

    store = dist.PrefixStore(name, job.store)  # type: ignore[attr-defined]
    limit = timedelta(seconds=job.seconds)
    own = ranks.index(job.rank)
    group, _ = c10d._new_process_group_helper(
        len(ranks), own, [], c10d.Backend("gloo"), store, group_name=name, timeout=limit
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(len(ranks))}
    return group


def healthy(job: Job) -> None:
    """It trains for longer than the groups' timeout."""
    ends, goes_on = time.monotonic() + 1.5 * job.seconds, torch.ones(1)
    while goes_on:
        all_reduce(job.train)
        goes_on = torch.tensor([float(time.monotonic() < ends)])
        dist.all_reduce(goes_on, op=dist.ReduceOp.MIN, group=job.other)


JOBS: dict[str, Callable[[Job], None]] = {
    job.__name__: job
    for job in (
        asleep,
        with_the_gil,
        stopped,
        with_a_lock,
        in_a_deadlock,
        in_storage,
        behind_a_server,
        behind_a_child,
        polls,
        spins,
        in_its_loader,
        in_a_pipeline,
        in_a_subgroup,
        before_a_group_opens,
        opens_groups_in_another_order,
        before_our_save,
        late,
        late_and_slow_to_answer,
        two_are_late,
        plans_a_checkpoint,
        in_a_long_call,
        behind_a_child_that_works,
        in_another_order,
        one_behind,
        leaves_one_out,
        one_more,
        suppressed,
        skips_a_send,
        another_operation,
        another_shape,
        fewer_batches,
        fewer_batches_and_works,
        on_two_threads,
        dies,
        hangs_at_its_exit,
        trainer_and_engine,
        all_alike,
        on_a_dead_host,
        healthy,
    )
}
