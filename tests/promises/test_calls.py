"""Calls that fail, come late, are repeated at once, or run side by side: what they save, what they say, and
by when."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
import holdfast.dcp as dcp
from holdfast._core.format.names import INDEX
from holdfast._core.protocol.call import begin_call
from holdfast._core.protocol.operation import agree
from holdfast._core.roster.beacon import beacon_of
from holdfast._core.roster.memory import Board, MemoryRoster
from holdfast._core.store.local import LocalReader, LocalStore, LocalWriter
from holdfast.errors import CommitUnconfirmed, CorruptCheckpoint, HoldfastError, RankFailed
from tests.support.processes import ProcessWorld
from tests.support.threads import no_more_threads, on_ranks
from tests.support.waiting import SLACK, wait_until
from tests.system.jobs import interruptible

SOON = holdfast.Job(participants=range(3), timeout=60.0, stall_timeout=5.0)


# -- a torn checkpoint ---------------------------------------------------------------------


def test_a_late_rank_never_joins_a_newer_call(world: ProcessWorld, tmp_path: Path) -> None:
    """Ranks 0 and 1 give up on rank 2, change their state and save again; rank 2 arrives with its first
    call."""
    ends = world.run(late_job, str(tmp_path), ranks=[0, 1, 2])
    assert [list(end) for end in ends] == [["RankFailed", "saved", "saved"]] * 3
    assert world.run(own_value, str(tmp_path / "a"), ranks=[0, 1, 2]) == [3.0] * 3


def late_job(rank: int, folder: str) -> list[str]:
    """Three saves into one folder without a step, as `dcp.save` makes them, each of another state."""
    ends = []
    if rank == 2:
        wait_until((Path(folder, "given up")).exists)
    for value in (1.0, 2.0, 3.0):
        try:
            holdfast.save({f"own{rank}": torch.full((3,), value)}, f"{folder}/a", job=SOON)
            ends.append("saved")
        except HoldfastError as error:
            ends.append(type(error).__name__)
            Path(folder, "given up").touch()
        if ends[-1] == "saved":
            found = {f"own{rank}": torch.zeros(3)}
            holdfast.load(found, f"{folder}/a", job=SOON)
            assert found[f"own{rank}"].tolist() == [value] * 3, "what was committed is of this very call"
    return ends


def own_value(rank: int, path: str) -> float:
    found = {f"own{rank}": torch.zeros(3)}
    holdfast.load(found, path, job=SOON)
    return float(found[f"own{rank}"][0])


def test_a_rank_that_is_one_call_behind_is_named_so(tmp_path: Path) -> None:
    """It came for the call that had been given up, and has not called again."""
    heard = threading.Event()

    def job(roster: MemoryRoster) -> str:
        asked = holdfast.Job(roster=roster, timeout=20.0, stall_timeout=0.6)
        if roster.rank == 1:
            assert heard.wait(20)
        try:
            holdfast.save({f"own{roster.rank}": torch.ones(3)}, tmp_path / "a", job=asked)
        except RankFailed:
            heard.set()
        if roster.rank == 1:
            return ""
        with pytest.raises(RankFailed) as raised:
            holdfast.save({f"own{roster.rank}": torch.ones(3)}, tmp_path / "a", job=asked)
        return str(raised.value)

    said = on_ranks(2, job)[0]
    assert "rank 1" in said
    assert "its last call of this kind is its number 1 of save of" in said
    assert said.count("this one is number 2") == 1


def test_a_rank_that_skipped_a_save_misses_the_others(tmp_path: Path) -> None:
    turn = threading.Barrier(2)

    def save(roster: MemoryRoster, limit: float | None, step: int | None = None) -> str:
        limits = holdfast.Job(roster=roster, timeout=60.0, stall_timeout=limit)
        try:
            holdfast.save({f"own{roster.rank}": torch.ones(3)}, tmp_path / "a", step=step, job=limits)
        except HoldfastError as error:
            return str(error)
        finally:
            turn.wait(60)
        return ""

    def job(roster: MemoryRoster) -> list[str]:
        if roster.rank == 0:
            save(roster, 0.6)
        else:
            turn.wait(60)
        missed = [save(roster, 0.6), save(roster, 0.6)]
        return [*missed, save(roster, None, step=3), save(roster, None)]

    first, second = on_ranks(2, job)
    for said in first[:2]:
        assert "misses the others in all later calls of that kind" in said
        assert "take no part on purpose" not in said
    assert "" not in second[:2]
    assert [first[2:], second[2:]] == [["", ""]] * 2, "a step is another kind of call, and makes them level"


def test_a_rank_that_reads_its_state_is_not_said_to_be_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    board, reads = Board(), threading.Event()

    class Slow:
        def state_dict(self) -> dict[str, object]:
            beacon_of(mine).send()  # as the next beat does under install()
            reads.set()
            wait_until(lambda: "has waited" in caplog.text)
            return {"w": torch.ones(3)}

        def load_state_dict(self, state: dict[str, object]) -> None: ...

    mine = MemoryRoster(1, 2, board)

    def job(roster: MemoryRoster) -> None:
        late = roster.rank == 1
        assert late or reads.wait(60)
        limits = holdfast.Job(roster=mine if late else roster, timeout=60.0, report_after=0.3)
        holdfast.save({"mine": Slow()} if late else {"w": torch.ones(3)}, tmp_path / "a", job=limits)

    on_ranks(2, job, board)
    assert f"it has called save of {tmp_path / 'a'}, and reads its state for it" in caplog.text
    assert "has not entered" not in caplog.text
    assert "take no part on purpose" not in caplog.text


def test_ranks_with_other_arguments_are_told_so(tmp_path: Path) -> None:
    def job(roster: MemoryRoster) -> str:
        include = ["w"] if roster.rank == 0 else ["v"]
        state = {"w": torch.ones(3), "v": torch.ones(3)}
        with pytest.raises(RankFailed) as raised:
            holdfast.save(
                state,
                tmp_path / "a",
                include=include,
                job=holdfast.Job(roster=roster, timeout=20.0, stall_timeout=0.6),
            )
        return str(raised.value)

    first, second = on_ranks(2, job)
    assert "with arguments step=None, include=('v',), exclude=None where rank 0 has" in first
    assert "with arguments step=None, include=('w',), exclude=None where rank 1 has" in second
    assert "has not entered" not in first + second


# -- repeated at once ---------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_good_call_right_after_a_failed_one_succeeds(
    world: ProcessWorld, tmp_path: Path, ranks: int
) -> None:
    """Loads that fail on all ranks, each followed at once by a good one, with nothing between that ranks
    would wait in."""
    group = list(range(ranks))
    world.run(repeat_job, str(tmp_path / "a"), group, 40, ranks=group)


def repeat_job(rank: int, path: str, group: list[int], rounds: int) -> None:
    job = holdfast.Job(participants=group, timeout=20.0, stall_timeout=10.0)
    holdfast.save({"w": torch.ones(4)}, path, job=job)
    for _ in range(rounds):
        with pytest.raises(holdfast.errors.ShapeMismatch):
            holdfast.load({"w": torch.zeros(5)}, path, job=job)
        found = {"w": torch.zeros(4)}
        holdfast.load(found, path, job=job)
        assert found["w"].tolist() == [1.0] * 4


def test_a_save_that_fails_on_one_rank_is_repeated_at_once(world: ProcessWorld, tmp_path: Path) -> None:
    assert world.run(flaky_job, str(tmp_path / "a")) == [[False, True] * 10] * 8


def flaky_job(rank: int, path: str) -> list[bool]:
    """Every other save fails, each time on another rank, before the others have even come."""
    ends = []
    for number in range(20):
        bad = number % 2 == 0 and rank == number // 2 % 8
        state = {f"own{rank}": (lambda: 0) if bad else torch.full((3,), float(number))}
        try:
            dcp.save(state, checkpoint_id=path, job=holdfast.Job(timeout=20.0, stall_timeout=10.0))
            ends.append(True)
        except HoldfastError as error:
            ends.append(error.rank != number // 2 % 8)
    return ends


# -- one deadline -------------------------------------------------------------------------


def test_a_restore_over_damaged_steps_has_one_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty damaged steps, each of which takes a second to be found so: the call returns by its own deadline
    of two."""
    with holdfast.Checkpoints(tmp_path, asynchronous=False) as checkpoints:
        for step in range(30):
            checkpoints.save(step, {"w": torch.ones(1000)})
    for file in tmp_path.glob("step-*/data/*"):
        content = bytearray(file.read_bytes())
        content[-9000:] = bytes(9000)
        file.write_bytes(content)
    released = threading.Event()
    read = LocalReader.read_into

    def slowly(self: LocalReader, start: int, buffers: Any) -> int:
        released.wait(1.0)
        return read(self, start, buffers)

    monkeypatch.setattr(LocalReader, "read_into", slowly)
    begun = time.monotonic()
    with pytest.raises(HoldfastError):
        holdfast.Checkpoints(tmp_path, job=holdfast.Job(timeout=2.0)).restore({"w": torch.zeros(1000)})
    released.set()
    assert time.monotonic() - begun < 2.0 + SLACK, "thirty seconds if each step had a deadline of its own"


def test_a_retry_in_the_background_has_the_deadline_of_its_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = LocalStore.publish

    def fails(self: LocalStore, path: str, data: bytes, replacing: bytes | None) -> None:
        if path == INDEX:  # an earlier test's run folder may still renew its owner
            raise ZeroDivisionError
        publish(self, path, data, replacing)

    monkeypatch.setattr(LocalStore, "publish", fails)
    begun = time.monotonic()
    pending = holdfast.async_save(
        {"w": torch.ones(3)},
        tmp_path / "a",
        job=holdfast.Job(no_dist=True, timeout=2.0, options=holdfast.Options(retries=10**6)),
    )
    with pytest.raises(HoldfastError):
        pending.committed(60)
    assert time.monotonic() - begun < 20.0


# -- no thread is left --------------------------------------------------------------------


def test_a_rank_without_threads_fails_the_save_of_all_and_not_the_next(
    world: ProcessWorld, tmp_path: Path
) -> None:
    for error in world.run(threadless_job, str(tmp_path)):
        assert "rank 1" in error
        assert "could not be started" in error


def finish(found: Any) -> None:
    """A save that goes on in the background is waited for."""
    if isinstance(found, holdfast.Pending):
        found.committed(30)


def threadless_job(rank: int, folder: str) -> str:
    job = holdfast.Job(participants=range(3), timeout=30.0, stall_timeout=20.0)
    if rank > 2:
        return "rank 1 could not be started"
    state = {f"own{rank}": torch.ones(3)}
    said = []
    for number, call in enumerate((holdfast.save, holdfast.async_save)):
        with no_more_threads() if rank == 1 else nullcontext(), pytest.raises(HoldfastError) as raised:
            finish(call(state, f"{folder}/{number}", job=job))
        assert raised.value.rank == 1
        said.append(str(raised.value))
        call(state, f"{folder}/{number}", job=job)
    holdfast.async_save(state, f"{folder}/last", job=job).committed(30)
    return " ".join(said)


# -- side by side -------------------------------------------------------------------------


def test_a_stuck_save_is_seen_while_its_rank_does_other_things(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is stuck in a save and goes on agreeing on something else with rank 0: it does not look alive
    for that."""
    stuck, over = threading.Event(), threading.Event()
    write = LocalWriter.write_at

    def wait(self: LocalWriter, start: int, buffers: Any) -> None:
        if "r00001" in self._path:
            stuck.set()
            over.wait(60)
        write(self, start, buffers)

    monkeypatch.setattr(LocalWriter, "write_at", wait)
    board = Board()

    def save(roster: MemoryRoster) -> float:
        begun = time.monotonic()
        with pytest.raises(RankFailed) as raised:
            holdfast.save(
                {f"own{roster.rank}": torch.ones(3)},
                tmp_path / "a",
                job=holdfast.Job(roster=roster, timeout=60, stall_timeout=1.0),
            )
        over.set()
        assert raised.value.rank == 1
        assert "writing" in str(raised.value)
        return time.monotonic() - begun

    def job(roster: MemoryRoster) -> float:
        busy = threading.Thread(target=chat, args=(roster,))
        busy.start()
        took = save(roster)
        busy.join(30)
        return took

    def chat(roster: MemoryRoster) -> None:
        assert stuck.wait(30)
        number = 0
        while True:
            number += 1
            call = begin_call(holdfast.Job(roster=roster, timeout=60, stall_timeout=30))
            if agree("talk", "memory:talk", lambda said: any(said.values()), call, over.is_set()):
                return

    assert max(on_ranks(2, job, board)) < 20, "a stall of one second is seen, and not the deadline of sixty"


def test_two_models_are_saved_from_two_threads_in_any_order(world: ProcessWorld, tmp_path: Path) -> None:
    """Rank 0 begins with one, rank 1 with the other: neither waits for the other one's commit."""
    assert world.run(two_models_job, str(tmp_path), ranks=[0, 1]) == [["a", "b"]] * 2


def two_models_job(rank: int, folder: str) -> list[str]:
    done = []
    for kind in ("Checkpoints", "async_save"):
        order = ["a", "b"] if rank == 0 else ["b", "a"]
        first = threading.Event()
        done = []

        def save(name: str, before: threading.Event | None, after: threading.Event | None) -> None:
            if before is not None:
                assert before.wait(30)
            job = holdfast.Job(participants=[0, 1], timeout=30.0, stall_timeout=20.0)
            state = {f"{name}{rank}": torch.ones(3)}
            if kind == "Checkpoints":  # noqa: B023
                pending = holdfast.Checkpoints(f"{folder}/{name}", job=job).save(1, state)
                assert pending is not None
            else:
                pending = holdfast.async_save(state, f"{folder}/{name}/x", job=job)
            if after is not None:
                after.set()
            pending.committed(30)
            done.append(name)  # noqa: B023

        threads = [
            threading.Thread(target=save, args=(order[0], None, first)),
            threading.Thread(target=save, args=(order[1], first, None)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(done) == ["a", "b"]
    return sorted(done)


def test_ctrl_c_while_the_index_is_put_in_place_is_a_commit_for_the_others(
    world: ProcessWorld, tmp_path: Path
) -> None:
    ends = world.run(interrupted_job, str(tmp_path / "a"), ranks=[0, 1, 2])
    assert [end for end, _ in ends] == ["KeyboardInterrupt", "committed", "committed"]
    assert max(took for _, took in ends) < 15, "nobody waits for the committer to stall"


def interrupted_job(rank: int, path: str) -> tuple[str, float]:
    publish = LocalStore.publish

    def and_ctrl_c(self: LocalStore, name: str, data: bytes, replacing: bytes | None) -> None:
        publish(self, name, data, replacing)
        os.kill(os.getpid(), signal.SIGINT)
        assert reached.wait(30), "the main thread is interrupted before the committer says that it is done"

    before = signal.getsignal(signal.SIGINT)
    reached = interruptible()
    LocalStore.publish = and_ctrl_c  # type: ignore[method-assign]
    begun = time.monotonic()
    try:
        holdfast.save(
            {f"own{rank}": torch.ones(3)},
            path,
            job=holdfast.Job(participants=[0, 1, 2], timeout=60.0, stall_timeout=30.0),
        )
        return "committed", time.monotonic() - begun
    except KeyboardInterrupt:
        return "KeyboardInterrupt", time.monotonic() - begun
    finally:
        LocalStore.publish = publish  # type: ignore[method-assign]
        signal.signal(signal.SIGINT, before)


# -- cancelling a future -------------------------------------------------------------------


def test_a_save_that_is_cancelled_as_a_future_is_given_up_and_holds_no_other(tmp_path: Path) -> None:
    pending = holdfast.async_save({"w": torch.ones(1 << 20)}, tmp_path / "a", job=holdfast.Job(no_dist=True))
    assert pending.staging_completion.cancel() is False
    assert pending.upload_completion.cancel() is True
    holdfast.async_save(
        {"w": torch.zeros(1 << 20)}, tmp_path / "b", job=holdfast.Job(no_dist=True)
    ).committed(30)
    # It may have been committed before it heard of that.
    assert pending.cancelled() == isinstance(pending.exception(30), HoldfastError)
    assert pending.cancelled() or (tmp_path / "a" / "index.safetensors").exists()
    found = {"w": torch.full((1 << 20,), -1.0)}
    holdfast.load(found, tmp_path / "b", job=holdfast.Job(no_dist=True))
    assert (found["w"] == 0.0).all()


# -- a forged commit ----------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before it enters", "while it waits", "when it has written"])
@pytest.mark.parametrize("there", [False, True])
def test_a_forged_commit_is_no_success(
    tmp_path: Path, when: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who knows all secrets tells rank 1 that its save is committed. No index of it is in storage,
    maybe an older one."""
    from holdfast._core.protocol import core as protocol

    monkeypatch.setattr(protocol, "VISIBLE_WITHIN", 0.3)
    place, board = tmp_path / "a", Board()
    if there:
        holdfast.save({"own1": torch.zeros(3)}, place, job=holdfast.Job(no_dist=True))
    forged = [("outcome", {"state": "agreed", "rank": 0}), ("final", {"state": "committed", "index": "00"})]

    def forge(key: str) -> None:
        for name, message in forged:
            MemoryRoster(0, 2, board).put(f"{key}/{name}", message)

    class Watched(MemoryRoster):
        def claim(self, key: str, message: Any) -> Any:
            if key.endswith("/open") and when == "before it enters":
                # The keys of a call contain the attempt, so he has to open the call as well.
                MemoryRoster(0, 2, board).put(key, {"rank": 0, "attempt": "0" * 12})
                forge(f"{key.removesuffix('/open')}/{'0' * 12}")
            return super().claim(key, message)

        def put(self, key: str, message: Any) -> None:
            super().put(key, message)
            stage = {"while it waits": "/row_digest/1", "when it has written": "/written/1"}.get(when)
            if stage is not None and key.endswith(stage):
                forge(key.removesuffix(stage))

    roster = Watched(1, 2, board)
    state = (
        {"w": torch.ones(3)}
        if when == "while it waits"
        else {"own1": holdfast.Shard(torch.ones(3), (3,), (0,))}
    )
    with pytest.raises(HoldfastError) as raised:
        holdfast.save(state, place, job=holdfast.Job(roster=roster, timeout=3.0, stall_timeout=2.0))
    if when == "when it has written":
        assert isinstance(raised.value, CommitUnconfirmed)
        assert "its index is not to be seen" in str(raised.value)
    else:
        assert "before this one had done its part" in str(raised.value) or "had not done its part" in str(
            raised.value
        )


def test_a_damaged_step_is_still_passed_over(tmp_path: Path) -> None:
    """What the deadline test damages is really damage."""
    with holdfast.Checkpoints(tmp_path, asynchronous=False) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(1000)})
    (file,) = tmp_path.glob("step-*/data/*")
    content = bytearray(file.read_bytes())
    content[-9000:] = bytes(9000)
    file.write_bytes(content)
    with pytest.raises(CorruptCheckpoint):
        holdfast.Checkpoints(tmp_path).restore({"w": torch.zeros(1000)})
