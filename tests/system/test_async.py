"""Asynchronous saves, with real writer processes that are killed, stopped, slow, and in want of space."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import holdfast
from holdfast._core.background import writer_client as helper
from holdfast._core.background.arena import Arena, ArenaMemory
from holdfast._core.background.queue import queue_of_this_thread
from holdfast._core.layout.box import Box
from holdfast.errors import BadInput, DeadlineExceeded, HoldfastError
from tests.groups.session.launch import Forks
from tests.support.processes import ProcessWorld
from tests.support.waiting import AT_ONCE, SLACK, wait_until
from tests.system import async_jobs as jobs
from tests.system.jobs import load_job


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("columns", [(), ("*",)])
@pytest.mark.parametrize("split", [1 << 20, 1 << 12])
def test_what_is_saved_is_the_state_at_the_call(
    columns: tuple[str, ...], split: int, world: ProcessWorld, tmp_path: Path
) -> None:
    job = replace(jobs.JOB, options=holdfast.Options(columns=columns, split_bytes=split))
    for collectives in world.run(jobs.save_and_spoil, str(tmp_path), job):
        assert collectives == []
    for step in range(3):
        world.run(load_job, str(tmp_path / f"step-{step}"), step, {})


@pytest.mark.parametrize("what", ["kill", "stop"])
def test_a_writer_that_dies_or_hangs_is_named_on_all_ranks(
    what: str, world: ProcessWorld, tmp_path: Path
) -> None:
    job = replace(jobs.JOB, stall_timeout=2.0 if what == "stop" else 25.0)
    for said, took, files, visible in world.run(jobs.mishap, str(tmp_path), 5, what, job, timeout=60):
        assert " 5: " in said, said
        if what == "kill":
            assert "writer process of rank 5" in said, said
            assert "was killed by signal 9" in said, said
            assert took < AT_ONCE
        else:
            assert said.startswith("RankFailed")
            assert took < 2.0 + SLACK
        assert files == ""
        assert not visible


def test_a_failed_save_is_tried_again(world: ProcessWorld, tmp_path: Path) -> None:
    job = replace(jobs.JOB, options=holdfast.Options(retries=1))
    for said, _, _, visible in world.run(jobs.mishap, str(tmp_path), 5, "kill", job, timeout=60):
        assert said == "committed"
        assert visible


def test_a_trainer_that_is_killed_takes_its_writer_along(mortal: ProcessWorld, tmp_path: Path) -> None:
    mortal.start(jobs.killed_trainer, str(tmp_path), 3)
    results = mortal.collect(40)
    for rank, result in enumerate(results):
        if rank != 3:
            assert result.value == ("RankFailed", 3), (result.value, result.trace)
    writer = int((tmp_path / "writer").read_text())
    wait_until(lambda: has_ended(writer))
    assert not (tmp_path / "step-1" / "index.safetensors").exists()
    assert (tmp_path / "step-0" / "index.safetensors").exists()


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raise", ["1: began", "2: began", "3: BadInput 2", "4: began", "has [1, 4]"]),
        ("warn", ["1: began", "2: began", "3: began", "4: began", "has [1, 3, 4]"]),
    ],
)
def test_a_failure_is_raised_at_the_same_call_on_all_ranks(
    how: str, expected: list[str], world: ProcessWorld, tmp_path: Path
) -> None:
    for said in world.run(jobs.failing_once, str(tmp_path), how, timeout=60):
        assert said == expected


@pytest.mark.wide
def test_fifty_saves_leave_nothing_behind(world: ProcessWorld, tmp_path: Path) -> None:
    for rss, shared, descriptors in world.run(jobs.many_saves, str(tmp_path), 50, timeout=120):
        assert max(rss[40:]) - max(rss[5:10]) < 8 << 20
        assert max(shared) == min(shared) > 0
        assert descriptors <= 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000048", "step-00000049"]


def test_a_save_is_skipped_on_all_ranks_or_on_none(world: ProcessWorld, tmp_path: Path) -> None:
    found = world.run(jobs.skipping, str(tmp_path), timeout=60)
    assert all(other == found[0] for other in found)
    verdicts, steps = found[0]
    assert "skipped" in verdicts
    assert steps == [step for step, verdict in enumerate(verdicts) if verdict == "began"]


def test_two_saves_are_under_way_at_once(world: ProcessWorld, tmp_path: Path) -> None:
    found = world.run(jobs.two_in_flight, str(tmp_path), timeout=60)
    for said in found:
        assert said[:2] == ["1 under way", "2 under way"], said
        assert said[4] == "BadInput 5", (
            said
        )  # the third waits for the first, and so on: the fifth for the third
        assert "2 under way" in said[2:], said
    for step in (1, 3, 5):
        world.run(load_job, str(tmp_path / f"step-{step:08d}"), step, {})


def test_all_ranks_stop_at_the_same_step(world: ProcessWorld) -> None:
    found = world.run(jobs.stopping, 5, 40, timeout=60)
    assert {step for step, _ in found} == {found[0][0]}
    assert 40 <= found[0][0] < 200
    assert {reason for _, reason in found} == {"SIGTERM on rank 5"}


def test_a_stop_of_before_stops_nobody(world: ProcessWorld) -> None:
    assert world.run(jobs.not_stopping_again, timeout=60) == [["once on rank 1", None]] * 8


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("tests.support.run_code") as made:
        yield made


@pytest.mark.parametrize(("mode", "code"), [("end", 0), ("exit", 3), ("raise", 1), ("interrupt", -2)])
def test_a_process_that_ends_commits_first(mode: str, code: int, forks: Forks, tmp_path: Path) -> None:
    ended = forks.run([jobs.SCRIPT, str(tmp_path / "run"), mode], [0], 1, tmp_path / "terminal", 60.0)
    assert ended.codes == [code], ended.said
    if mode == "raise":
        assert ended.said.rstrip().endswith("ValueError: the loss is not a number")
    if mode == "interrupt":
        assert ended.said.rstrip().endswith("KeyboardInterrupt")
    if mode in ("end", "exit"):
        assert ended.said == ""
    state = {"w": torch.zeros(4_000_000)}
    assert holdfast.Checkpoints(tmp_path / "run").restore(state) == 1
    assert torch.equal(state["w"], torch.arange(4_000_000.0))


SLOW = """
import os, time
real = os.pwritev
def slow(fd, buffers, *rest):
    time.sleep({seconds})
    return real(fd, buffers, *rest)
os.pwritev = slow
"""


def with_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """The next writer process runs this first."""
    queue_of_this_thread().release()
    begun = tmp_path / "writer.py"
    begun.write_text(f"{code}\nimport runpy\nrunpy.run_path({str(helper.START)!r}, run_name='__main__')\n")
    monkeypatch.setattr(helper, "START", begun)


@pytest.fixture
def fresh_writer() -> Any:
    yield
    queue_of_this_thread().release()


def test_a_slow_disk_holds_no_training_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_writer: None
) -> None:
    with_writer(tmp_path, monkeypatch, SLOW.format(seconds=0.4))
    state = {"w": torch.randn(8_000_000)}
    want = state["w"].clone()
    begun = time.monotonic()
    pending = holdfast.async_save(
        state, tmp_path / "a", job=holdfast.Job(no_dist=True, timeout=30, stall_timeout=2.0)
    )
    took = time.monotonic() - begun
    seen = []
    while not pending.done():
        state["w"] += 1
        seen.append(pending.progress().bytes_done)
        time.sleep(0.05)
    pending.committed()
    whole = time.monotonic() - begun
    assert whole > 2.5, "the disk was slow, and longer than a stall"
    assert took < whole / 3
    assert len(set(seen)) > 5, "progress is told"
    loaded = {"w": torch.zeros(8_000_000)}
    holdfast.load(loaded, tmp_path / "a", job=holdfast.Job(no_dist=True))
    assert torch.equal(loaded["w"], want)


def test_a_full_disk_is_told_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_writer: None
) -> None:
    with_writer(
        tmp_path,
        monkeypatch,
        "import os, errno\ndef full(*a):\n    raise OSError(errno.ENOSPC, 'x')\nos.pwritev = full\n",
    )
    pending = holdfast.async_save(
        {"w": torch.randn(1000)}, tmp_path / "a", job=holdfast.Job(no_dist=True, timeout=30)
    )
    with pytest.raises(HoldfastError, match="No space left on device") as caught:
        pending.committed(20)
    assert caught.value.errno == 28  # type: ignore[attr-defined]
    assert not (tmp_path / "a" / "index.safetensors").exists()


def test_a_save_that_is_cancelled_or_waited_for_too_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_writer: None
) -> None:
    with_writer(tmp_path, monkeypatch, SLOW.format(seconds=0.2))
    pending = holdfast.async_save(
        {"w": torch.randn(8_000_000)}, tmp_path / "a", job=holdfast.Job(no_dist=True, timeout=30)
    )
    with pytest.raises(DeadlineExceeded, match=r"was not committed within 0.3 s: it is in phase"):
        pending.committed(0.3)
    assert pending.cancel()
    with pytest.raises(HoldfastError, match=r"was cancelled\."):
        pending.committed(10)
    assert not pending.cancel()
    assert not (tmp_path / "a" / "index.safetensors").exists()
    assert list((tmp_path / "a").glob("data/*")) == []


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    state = {"w": torch.randn(4_000_000)}
    first = holdfast.async_save(state, tmp_path / "a", job=holdfast.Job(no_dist=True))
    second = holdfast.async_save(state, tmp_path / "b", job=holdfast.Job(no_dist=True))
    assert first.done()
    second.upload_completion.result(20)
    second.staging_completion.result(0)


@pytest.mark.parametrize("budget", [30_000, 60_000])
def test_a_state_larger_than_the_budget_is_copied_in_waves(
    budget: int, world: ProcessWorld, tmp_path: Path
) -> None:
    options = holdfast.Options(split_bytes=1 << 12, host_memory_budget=budget)
    for collectives in world.run(jobs.save_and_spoil, str(tmp_path), replace(jobs.JOB, options=options)):
        assert collectives == []
    for step in range(3):
        files = list((tmp_path / f"step-{step}" / "data").iterdir())
        assert len(files) > 8, "more than one file a rank"
        world.run(load_job, str(tmp_path / f"step-{step}"), step, {})


def test_a_budget_that_is_too_small_is_refused_with_the_numbers(tmp_path: Path) -> None:
    state = {"small": torch.zeros(10), "large": torch.zeros(1 << 20)}
    pending = holdfast.async_save(
        state,
        tmp_path / "a",
        job=holdfast.Job(no_dist=True, options=holdfast.Options(host_memory_budget=1 << 20)),
    )
    with pytest.raises(
        BadInput, match=r"copies 4 MiB .* allows 1 MiB at a time, and 'large' alone has 4 MiB"
    ):
        pending.committed(10)
    with pytest.raises(BadInput, match="host_memory_budget"):
        holdfast.async_save(
            state,
            tmp_path / "a",
            job=holdfast.Job(no_dist=True, options=holdfast.Options(host_memory_budget=0)),
        )


def test_a_state_that_does_not_change_is_said_loudly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"model": {"w": torch.randn(1000), "b": torch.randn(10)}, "step": 0}
    with holdfast.Checkpoints(tmp_path, job=holdfast.Job(no_dist=True)) as run:
        for step in range(4):
            state["step"] = step
            if step == 2:
                state["model"]["b"] += 1  # type: ignore[index]
            run.save(step, state)
            run.close()
            said = [record.getMessage() for record in caplog.records if "has changed" in record.getMessage()]
            assert len(said) == {0: 0, 1: 1, 2: 1, 3: 2}[step], step
    assert "not one of its 2 tensors has changed since step 2" in said[1]


def test_training_is_the_same_as_without_saving(tmp_path: Path) -> None:
    """The demo's model, saved at each of eight steps while it trains on; the last is what it ends with."""
    with ProcessWorld(4) as world:
        alone = world.run(jobs.train_demo, None, 8, timeout=250)
        saving = world.run(jobs.train_demo, str(tmp_path), 8, timeout=250)
    assert [losses for losses, _ in saving] == [losses for losses, _ in alone]
    assert [digest for _, digest in saving] == [digest for _, digest in alone]
    assert holdfast.Checkpoints(tmp_path).steps() == list(range(1, 9))


def test_readers_never_see_a_bad_one(tmp_path: Path) -> None:
    """A hundred saves of a run that keeps two, while another thread loads the newest over and over."""
    run, ended, loads = (
        holdfast.Checkpoints(tmp_path, keep=2, job=holdfast.Job(no_dist=True)),
        threading.Event(),
        [],
    )
    problems: list[BaseException] = []

    def read() -> None:
        mine = holdfast.Checkpoints(tmp_path, job=holdfast.Job(no_dist=True))
        try:
            while not ended.is_set():
                state = {"a": torch.zeros(2000), "b": torch.zeros(2000)}
                found = mine.restore(state, fallback=False)
                if found is not None:
                    assert state["a"].unique().tolist() == [float(found)]
                    assert state["b"].unique().tolist() == [float(-found)]
                    loads.append(found)
        except BaseException as error:
            problems.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(100):
        run.save(step, {"a": torch.full((2000,), float(step)), "b": torch.full((2000,), float(-step))})
    run.close()
    ended.set()
    reader.join(20)
    assert problems == []
    assert len(loads) > 5
    assert loads == sorted(loads)
    assert run.steps() == [98, 99]


def test_the_writer_is_small_and_without_torch(tmp_path: Path) -> None:
    holdfast.async_save({"w": torch.zeros(10)}, tmp_path / "a", job=holdfast.Job(no_dist=True)).committed(20)
    process = psutil.Process(queue_of_this_thread().writer.pid)
    assert process.memory_full_info().uss < 60 << 20  # its own; the arena is everybody's
    assert not any("libtorch" in entry.path for entry in process.memory_maps())


def test_a_writer_that_stops_before_it_has_heard_all(tmp_path: Path) -> None:
    """The plan of ten thousand tensors does not fit into a socket's buffer: the thread that sends it is
    stuck."""
    state = {f"w{number}": torch.zeros(2) for number in range(10_000)}
    holdfast.async_save(state, tmp_path / "a", job=holdfast.Job(no_dist=True)).committed(20)
    writer = queue_of_this_thread().writer.pid
    assert writer is not None
    os.kill(writer, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(HoldfastError) as raised:
        holdfast.async_save(state, tmp_path / "b", job=holdfast.Job(no_dist=True, timeout=2.0)).committed(60)
    assert str(writer) in str(raised.value)
    assert "message store" not in str(raised.value)
    assert time.monotonic() - begun < 2.0 + SLACK
    wait_until(lambda: has_ended(writer))
    holdfast.async_save(state, tmp_path / "c", job=holdfast.Job(no_dist=True)).committed(20)
    assert not any(thread.name == "holdfast-operation" for thread in threading.enumerate())


def sockets() -> set[int]:
    """Descriptors of this process that are sockets."""
    links = {int(fd): f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")}
    return {
        fd for fd, link in links.items() if os.path.islink(link) and os.readlink(link).startswith("socket:")
    }


def test_a_fork_of_the_trainer_keeps_no_writer_alive(tmp_path: Path) -> None:
    queue_of_this_thread().release()
    before = sockets()
    holdfast.async_save({"w": torch.zeros(1)}, tmp_path / "a", job=holdfast.Job(no_dist=True)).committed(20)
    (fd,) = sockets() - before
    child = os.fork()
    if not child:
        try:
            os.fstat(fd)
        except OSError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert os.fstat(fd)
    holdfast.async_save({"w": torch.zeros(1)}, tmp_path / "b", job=holdfast.Job(no_dist=True)).committed(20)


def test_a_part_of_an_arena_reads_as_the_whole_row() -> None:
    """Of a row that is copied in part, boxes inside of that part are found where they are."""
    arena = Arena()
    arena.reserve(4096)
    full = torch.arange(60, dtype=torch.int32).reshape(5, 4, 3)
    arena.view(64, 24 * 4)[:] = full[2:4].contiguous().numpy().tobytes()
    memory = ArenaMemory(arena.address + 64 - 24 * 4, (5, 4, 3), 4)
    out = bytearray(2 * 2 * 2 * 4)
    memory.gather(Box((2, 1, 1), (2, 2, 2)), memoryview(out))
    assert torch.equal(
        torch.frombuffer(out, dtype=torch.int32).reshape(2, 2, 2), full[2:4, 1:3, 1:3].contiguous()
    )
    arena.close()
    assert not os.path.exists(f"/proc/self/fd/{arena.fd}")


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [None, 24 << 20])
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_saved_from_a_gpu_is_the_state_at_the_call(
    budget: int | None, stream: bool, tmp_path: Path
) -> None:
    names = [f"w{number}" for number in range(4)]
    with torch.cuda.stream(torch.cuda.Stream() if stream else torch.cuda.current_stream()):
        state = {name: torch.randn(1 << 22, device="cuda") for name in names}
        state["view"] = torch.randn(64, 64, device="cuda").t()
        state["host"] = torch.randn(1 << 20)
        torch.cuda._sleep(1 << 28)  # what was given to the stream before comes before
        state["w0"].add_(1.0)
        want = {name: value.clone() for name, value in state.items()}
        pending = holdfast.async_save(
            state,
            tmp_path / "a",
            job=holdfast.Job(no_dist=True, options=holdfast.Options(host_memory_budget=budget)),
        )
        for value in state.values():
            value.fill_(-1.0)
        pending.committed(60)
        arena = queue_of_this_thread()._rooms[0].arena
        assert arena is not None
        assert arena.unpin is not None
        holdfast.load(state, tmp_path / "a", job=holdfast.Job(no_dist=True))
    assert all(torch.equal(state[name], want[name]) for name in want)
