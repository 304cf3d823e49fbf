"""Work that begins, goes on or fails once the main thread of a process has ended: its last line was a save, a thread that is no
daemon uploads, or an `atexit` handler saves. Python 3.12.0 and 3.12.1 start no threads then."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from tests.groups.session.launch import Ended, Forks
from tests.support.wide import wide

WHEN = wide(["atexit", "thread"], suite=["atexit"])
BEGINS = """
import atexit, sys, threading
folder, when = sys.argv[1:3]

def begin(late):
    def ends():
        if when == "thread":
            threading.main_thread().join()
        assert not threading.main_thread().is_alive()
        late()
        print("done", flush=True)
    atexit.register(ends) if when == "atexit" else threading.Thread(target=ends).start()
"""
CALLS = """
import torch, torch.distributed as dist

def late():
    import holdfast, holdfast.dcp as dcp
    state = {"w": torch.arange(9.0), "step": 3}
    holdfast.save(state, f"{folder}/save")
    holdfast.async_save(state, f"{folder}/async").committed(60)
    dcp.async_save(state, checkpoint_id=f"{folder}/dcp").result()
    with holdfast.Checkpoints(f"{folder}/run", job=holdfast.Job(options=holdfast.Options(writer_threads=2))) as run:
        run.save(1, state)
        run.save(2, state)
    for name in ("save", "async", "dcp"):
        found = {"w": torch.zeros(9), "step": 0}
        holdfast.load(found, f"{folder}/{name}")
        assert torch.equal(found["w"], state["w"]), name
    with holdfast.Checkpoints(f"{folder}/run") as run:
        assert run.restore(found) == 2 and run.steps() == [1, 2]

dist.init_process_group("gloo")
begin(late)
"""
SESSION = """
import torch, torch.distributed as dist

def late():
    import holdfast
    with holdfast.session(job=holdfast.Job(timeout=60)) as session:
        session.checkpoints(f"{folder}/run").save(1, {"w": torch.ones(3)})
        dist.all_reduce(torch.ones(1))

begin(late)
"""
LEASE = """
import json, time, torch, holdfast
from holdfast._core.run import owner

def late():
    owner.BEAT = 0.05
    run = holdfast.Checkpoints(f"{folder}/run")
    run.save(1, {"w": torch.ones(3)}).committed(60)
    ends = time.monotonic() + 60
    while json.load(open(f"{folder}/run/{owner.OWNER}"))["beat"] < 3:
        assert time.monotonic() < ends, "the folder's owner was not renewed"
        time.sleep(0.05)
    # It has no end of its own: the process ends all the same, and gives the folder back.

begin(late)
"""
DEADLINES = """
import threading
from holdfast._core.base.threads import within
from holdfast.errors import DeadlineExceeded

def late():
    try:
        within(0.2, "a call into storage", threading.Event().wait)
    except DeadlineExceeded:
        return
    raise AssertionError("it came back")

begin(late)
"""
MEGATRON = """
import torch, torch.distributed as dist
import holdfast
holdfast.install()
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

def state(weight):
    return {"w": ShardedTensor.from_rank_offsets("w", weight, replica_id=0)}

def request(name):
    made = dist_checkpointing.save(state(torch.arange(4.0)), f"{folder}/{name}", async_sharded_save=True)
    calls.schedule_async_request(made)

def late():
    calls.maybe_finalize_async_calls(blocking=True)  # of before the end
    request("late")
    calls.maybe_finalize_async_calls(blocking=True)
    for name in ("early", "late"):
        found = dist_checkpointing.load(state(torch.zeros(4)), f"{folder}/{name}")
        assert torch.equal(found["w"], torch.arange(4.0)), name

dist.init_process_group("gloo")
calls = AsyncCallsQueue()
request("early")
begin(late)
"""

JUST_ENDING = """
from holdfast._core.base.threads import start_thread

def late():
    assert threading.main_thread().is_alive()
    start_thread(lambda: print("done", flush=True), "late").join(60)

# Called on the main thread once its program has ended, before it counts as ended.
threading._register_atexit(late)
"""


MEGATRONS = importlib.util.find_spec("megatron") is not None
IMPORTED = (
    "torch.distributed.checkpoint",
    *["megatron.core.dist_checkpointing.strategies.async_utils"] * MEGATRONS,
)
"""What programs find imported. Holdfast is not among it: its import, too, may come after the main thread."""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("tests.support.run_code", IMPORTED) as made:
        yield made


def ended(forks: Forks, folder: Path, code: str, when: str, ranks: int = 1) -> Ended:
    (folder / "checkpoints").mkdir()
    words = [BEGINS + code, str(folder / "checkpoints"), when]
    found = forks.run(words, list(range(ranks)), ranks, folder / "terminal", 240.0)
    assert (found.codes, found.said.count("done\n")) == ([0] * ranks, ranks), found.said
    assert "Traceback" not in found.said
    return found


@pytest.mark.parametrize("when", WHEN)
def test_saves_and_loads_may_begin_after_the_main_thread(when: str, forks: Forks, tmp_path: Path) -> None:
    ended(forks, tmp_path, CALLS, when, ranks=2)


@pytest.mark.parametrize("when", WHEN)
def test_a_session_may_begin_after_the_main_thread(when: str, forks: Forks, tmp_path: Path) -> None:
    ended(forks, tmp_path, SESSION, when, ranks=2)
    assert holdfast.Checkpoints(tmp_path / "checkpoints/run", job=holdfast.Job(no_dist=True)).steps() == [1]


@pytest.mark.parametrize("when", WHEN)
def test_a_folder_is_held_and_given_back_after_the_main_thread(
    when: str, forks: Forks, tmp_path: Path
) -> None:
    ended(forks, tmp_path, LEASE, when)
    assert not list((tmp_path / "checkpoints/run").glob("owner*"))


@pytest.mark.parametrize("when", WHEN)
def test_what_may_block_keeps_its_deadline_after_the_main_thread(
    when: str, forks: Forks, tmp_path: Path
) -> None:
    ended(forks, tmp_path, DEADLINES, when)


def test_a_thread_starts_while_the_main_thread_ends(forks: Forks, tmp_path: Path) -> None:
    ended(forks, tmp_path, JUST_ENDING, "")


@pytest.mark.skipif(not MEGATRONS, reason="megatron-core is not installed")
@pytest.mark.parametrize("when", WHEN)
def test_megatrons_asynchronous_saves_go_on_and_begin_after_the_main_thread(
    when: str, forks: Forks, tmp_path: Path
) -> None:
    ended(forks, tmp_path, MEGATRON, when)
