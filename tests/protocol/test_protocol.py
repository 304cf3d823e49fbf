"""The protocol table, and how its runner treats what is stuck, late or lost."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast._core.base.deadline import Deadline, Limits
from holdfast._core.base.values import Message
from holdfast._core.protocol.call import begin_call
from holdfast._core.protocol.core import save_steps
from holdfast._core.protocol.effects import Context, Get, Look, Steps
from holdfast._core.protocol.liveness import QUOTED, PeerMonitor
from holdfast._core.protocol.messages import Final, abandoned_by
from holdfast._core.protocol.operation import Operation
from holdfast._core.protocol.phases import CHOICE_TRANSITIONS, LOAD_TRANSITIONS, TRANSITIONS, Transitions
from holdfast._core.protocol.runner import GRACE, Cancel, _Ended, _wait, perform
from holdfast._core.roster.beacon import Presence
from holdfast._core.roster.lost import Seen
from holdfast._core.roster.memory import Board, MemoryRoster
from holdfast.errors import BadInput, DeadlineExceeded, HoldfastError, RankFailed, RosterLost, StorageError
from tests.support.faults import Faults
from tests.support.simulate import SimulatedClock, World
from tests.support.simulated_work import SimulatedSave
from tests.support.waiting import SLACK, wait_for_threads


@pytest.mark.parametrize("table", [TRANSITIONS, LOAD_TRANSITIONS, CHOICE_TRANSITIONS])
def test_tables_are_whole(table: Transitions) -> None:
    for phase, following in table.items():
        assert set(following) <= set(table), phase
        assert all(following.values()), "every transition says why"
    reached, left = {"entered"}, ["entered"]
    while left:
        for following in table[left.pop()]:
            if following not in reached:
                reached.add(following)
                left.append(following)
    assert reached == set(table)
    ends = {phase for phase, following in table.items() if not following}
    assert "failed" in ends
    assert all("failed" in following for phase, following in table.items() if following)


def test_an_illegal_step_changes_nothing() -> None:
    at = Context(0, (0,), "k", "t", Deadline(1.0))
    with pytest.raises(AssertionError, match="no way from 'entered' to 'committed'"):
        at.enter("committed")
    assert at.phase == "entered"


def ranks(count: int, job: Any) -> list[Any]:
    """Run `job(roster)` on threads that stand for ranks; results or errors, by rank."""
    board, found = Board(), [None] * count

    def one(rank: int) -> None:
        try:
            found[rank] = job(MemoryRoster(rank, count, board))
        except BaseException as error:
            found[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return found


def state(rank: int) -> dict[str, Any]:
    return {"w": torch.arange(6.0), f"own{rank}": torch.full((3,), float(rank)), "step": 1}


def test_a_rank_stuck_in_storage_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that never returns: the call comes back at its deadline, and can't commit later."""
    from holdfast._core.store.local import LocalWriter

    release = threading.Event()
    real = LocalWriter.write_at

    def stuck(self: LocalWriter, start: int, buffers: Any) -> None:
        if "r00001" in self._path:
            release.wait(60)
        real(self, start, buffers)

    monkeypatch.setattr(LocalWriter, "write_at", stuck)
    before = set(threading.enumerate())
    place = tmp_path / "step"
    begun = time.monotonic()
    found = ranks(
        3,
        lambda roster: holdfast.save(
            state(roster.rank), place, job=holdfast.Job(roster=roster, timeout=60, stall_timeout=1.5)
        ),
    )
    took = time.monotonic() - begun
    release.set()
    assert took < 1.5 + SLACK
    for error in found:
        assert isinstance(error, RankFailed)
        assert error.rank == 1
        assert "rank 1" in str(error)
        assert "writing" in str(error)
    wait_for_threads(before)  # the stuck one goes on now, and must not make a checkpoint of it
    assert not (place / "index.safetensors").exists()


def test_a_look_for_the_outcome_counts_if_the_store_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By these looks others know that this rank waits for what nobody has decided (`protocol.liveness`)."""
    job = holdfast.Job(roster=MemoryRoster(0, 2), participants=(0, 1), timeout=60)
    operation = Operation("save", "save of x", str(tmp_path), begin_call(job), TRANSITIONS)
    operation.context.set_key("save/x/0.0")
    presence, roster = operation.presence, operation.roster

    def silent(roster: MemoryRoster, keys: list[str]) -> None:
        raise RosterLost("it does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryRoster, "get", silent)
        with pytest.raises(RosterLost):
            presence.look(roster)
    assert presence.record()["looks"] == 0
    presence.look(roster)
    assert (presence.record()["looks"], presence.record()["decided"]) == (1, False)
    roster.claim("save/x/0.0/outcome", {"state": "agreed"})
    presence.look(roster)
    assert presence.record()["decided"]


def test_a_thread_whose_message_store_answers_is_not_stuck() -> None:
    """On a busy machine it still asks who is missing, past the deadline. Else the error would blame the store."""
    roster, began = MemoryRoster(1, 2), time.monotonic()
    context = Context(1, (0, 1), "site/0.0", "save of x", Deadline(0.001))
    presence, ended, done = Presence(roster, "save of x"), _Ended(), threading.Event()

    def asks() -> Steps:
        yield Get(["key"])

    perform(asks(), roster, presence, Cancel())
    assert presence.answered >= began
    presence.answered = began + 1000
    threading.Timer(2 * GRACE, done.set).start()
    _wait(done, ended, context, presence)
    presence.answered, done = began - 1000, threading.Event()
    with pytest.raises(DeadlineExceeded, match="asks the message store, which does not answer"):
        _wait(done, ended, context, presence)


def test_a_lone_rank_stuck_past_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast._core.store.local import LocalWriter

    release = threading.Event()
    monkeypatch.setattr(LocalWriter, "write_at", lambda self, start, buffers: release.wait(60))
    begun = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="its call into storage or a callback does not return"):
        holdfast.save({"w": torch.zeros(3)}, tmp_path / "s", job=holdfast.Job(timeout=1.0, no_dist=True))
    assert time.monotonic() - begun < 1.0 + SLACK
    release.set()


def test_errors_of_a_users_state_reach_everyone(tmp_path: Path) -> None:
    class Broken:
        def state_dict(self) -> Any:
            raise ZeroDivisionError("no state today")

        def load_state_dict(self, state: Any) -> None: ...

    def job(roster: MemoryRoster) -> Any:
        held: dict[str, Any] = {"model": Broken()} if roster.rank == 2 else {"w": torch.zeros(2)}
        return holdfast.save(held, tmp_path / "s", job=holdfast.Job(roster=roster, timeout=10))

    for error in ranks(3, job):
        assert isinstance(error, HoldfastError)
        assert "ZeroDivisionError: no state today" in str(error)
        assert error.rank == 2


def test_one_ranks_failed_load_is_everyones(tmp_path: Path) -> None:
    holdfast.save({"weight": torch.zeros(4)}, tmp_path / "s", job=holdfast.Job(no_dist=True))

    def job(roster: MemoryRoster) -> Any:
        name = "weight" if roster.rank else "weigth"
        return holdfast.load(
            {name: torch.zeros(4)}, tmp_path / "s", job=holdfast.Job(roster=roster, timeout=10)
        )

    found = ranks(3, job)
    assert len({(type(error), str(error)) for error in found}) == 1
    assert "'weigth'" in str(found[0])
    assert "nearest: 'weight'" in str(found[0])


def test_what_was_given_up_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    holdfast.save({"w": torch.zeros(4)}, tmp_path / "s", job=holdfast.Job(no_dist=True))
    found = ranks(
        3, lambda roster: holdfast.save(state(roster.rank), tmp_path / "t", job=holdfast.Job(roster=roster))
    )
    assert not any(isinstance(result, BaseException) for result in found)
    wait_for_threads(before)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"job": {"timeout": 0}}, "timeout must be a positive"),
        ({"job": {"timeout": float("inf")}}, "timeout must be a positive"),
        ({"job": {"stall_timeout": -1}}, "stall_timeout must be a positive"),
        ({"job": {"participants": [0, 0]}}, "must be different ranks"),
        ({"job": {"participants": [5]}}, "of a world of 1"),
        ({"job": {"participants": []}}, "must be different ranks"),
        ({"step": -1}, "step must be a whole number"),
        ({"step": 1.5}, "step must be a whole number"),
        ({"include": "model"}, "takes a list of patterns"),
        ({"include": ["nothing.*"]}, "no name in the state matches 'nothing.*'"),
        ({"expected": "everything"}, "expected='everything'"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, how: dict[str, Any], words: str) -> None:
    def save(job: dict[str, Any] | None = None, **others: Any) -> None:
        made = holdfast.Job(no_dist=True, **(job or {}))
        holdfast.save({"w": torch.zeros(3)}, tmp_path / "s", job=made, **others)

    with pytest.raises(BadInput, match=re.escape(words)):
        save(**how)
    assert not (tmp_path / "s" / "index.safetensors").exists()


def test_overwrite_can_be_refused(tmp_path: Path) -> None:
    holdfast.save({"w": torch.zeros(3)}, tmp_path / "s", job=holdfast.Job(no_dist=True))
    with pytest.raises(BadInput, match="overwrite=False"):
        holdfast.save({"w": torch.ones(3)}, tmp_path / "s", job=holdfast.Job(no_dist=True), overwrite=False)
    back = {"w": torch.ones(3)}
    holdfast.load(back, tmp_path / "s", job=holdfast.Job(no_dist=True))
    assert back["w"].tolist() == [0.0] * 3


def test_many_processes_without_a_process_group_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(BadInput, match=re.escape("torch.distributed is not initialised")):
        holdfast.save({"w": torch.zeros(3)}, tmp_path / "s")


def test_a_file_of_another_rank_that_never_shows_is_named(tmp_path: Path) -> None:
    """Ranks that do not share a file system: the committer can't see what rank 1 wrote."""
    from holdfast._core.saving import commit

    places = {0: tmp_path / "a", 1: tmp_path / "b"}
    for place in places.values():
        place.mkdir()
    short = commit.VISIBLE_WITHIN
    commit.VISIBLE_WITHIN = 0.5
    try:
        from holdfast._core.saving.job import SaveJob
        from holdfast._core.saving.request import SaveRequest
        from holdfast._core.state.flatten import flatten
        from holdfast._core.store.local import LocalStore

        def job(roster: MemoryRoster) -> Any:
            store = LocalStore(places[roster.rank])
            store.url = "shared"  # both ranks believe that they save to one place
            request = SaveRequest(
                store=store,
                collect=lambda rank: flatten(state(rank), rank),
                call=begin_call(holdfast.Job(roster=roster, timeout=10, stall_timeout=5)),
                step=1,
            )
            return SaveJob(request).run()

        found = ranks(2, job)
    finally:
        commit.VISIBLE_WITHIN = short
    for error in found:
        assert isinstance(error, HoldfastError)
        assert not isinstance(error, StorageError)
        assert "rank 1 wrote" in str(error)
        assert "one shared file system" in str(error)


@pytest.mark.parametrize("world", [2, 9, 10, 257, 258, 1000])
def test_at_the_deadline_all_who_are_missing_are_counted(world: int) -> None:
    """Of a large world the messages of a part are looked at, and the others count all the same."""
    clock = SimulatedClock()
    context = Context(0, tuple(range(world)), "site/0.0", "choice", Deadline(1.0, clock))
    monitor = PeerMonitor(context, "enter")
    clock.time = 2.0
    look = monitor.look(list(range(1, world)))
    asked = next(look)
    assert isinstance(asked, Look)
    with pytest.raises(DeadlineExceeded) as raised:
        look.send({rank: Seen() for rank in asked.ranks})
    said = str(raised.value)
    assert f"waited for {f'{world - 1} ranks' if world > 2 else 'rank 1'} to enter: rank " in said
    more = world - 1 - QUOTED
    assert (f"; and {more} more." in said) == (more > 0), said
    assert (" more." in said) == (more > 0), said


def test_a_cancel_while_the_index_is_refused_leaves_a_plain_failure() -> None:
    """It comes at the committer's final word: the others hear that word, and nobody is left unsure."""
    cancel, roster = Cancel(), MemoryRoster()

    class CancelledWhilePublishing(SimulatedSave):
        def publish(self) -> Final:
            cancel.set(HoldfastError("The save was cancelled."))
            return super().publish()

    faults = Faults(publish="refused")
    world = World(0, 1, 10.0, False, Limits(), same_host=True, faults=faults, rng=random.Random(0))
    context = Context(0, (0,), "site/0.0", "save of x", Deadline(60.0))
    steps = save_steps(context, CancelledWhilePublishing(world, 0, 0, "attempt"))
    with pytest.raises(StorageError, match=r"Publishing failed: Input/output error"):
        perform(steps, roster, Presence(roster, "save of x"), cancel)
    assert context.phase == "failed"
    (final,) = roster.get([context.final_key])
    assert final is not None
    assert final["error"]["kind"] == "StorageError"


def test_an_outcome_that_the_heart_has_heard_outlives_the_message_store() -> None:
    """The store goes with its process, right after a rank was found to have ended: nobody doubts a commit that
    never was agreed."""
    error = RankFailed("save of x failed: rank 1 has ended.", rank=1)
    heard = abandoned_by(0, error)
    world = World(0, 3, 10.0, False, Limits(), same_host=True, faults=Faults(), rng=random.Random(0))
    context = Context(2, (0, 1, 2), "site/0.0", "save of x", Deadline(60.0), heard_outcome=lambda: heard)

    class Lost(MemoryRoster):
        """Is lost once this rank has reported what it has written."""

        def get(self, keys: Sequence[str]) -> list[Message | None]:
            if context.is_decidable:
                raise RosterLost("The message store can't be reached.")
            return super().get(keys)

        def claim(self, key: str, message: Message) -> Message:
            self.get(())
            return super().claim(key, message)

    roster = Lost(2, 3)
    save = SimulatedSave(world, 2, 0, "attempt")
    save.plain = None
    with pytest.raises(RankFailed, match="rank 1 has ended") as raised:
        perform(save_steps(context, save), roster, Presence(roster, "save of x"), Cancel())
    assert not isinstance(raised.value, DeadlineExceeded)
    assert context.phase == "failed"
