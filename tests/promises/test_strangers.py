"""A stranger who reaches the message store: what he can't make a save, a load or a loop do.

The ranks are threads over one TCPStore; the stranger is one more client of it, who knows Holdfast, the keys
and what lies in the store. Each attack is made at the instant at which it works best: right after a rank has
written the message.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, TCPStore

import holdfast
from holdfast._core.base.values import Message
from holdfast._core.format.index_layout import encode
from holdfast._core.format.names import INDEX
from holdfast._core.io.index_file import open_index
from holdfast._core.roster.torch_store import TorchRoster
from holdfast._core.run import preemption as preemption_module
from holdfast._core.run import save_times
from holdfast._core.store.local import LocalStore
from holdfast._tools.checkpoints.verify import verify
from holdfast.errors import CorruptCheckpoint, HoldfastError, RosterLost
from tests.support.strangers import Stranger, job_of, on_each
from tests.support.waiting import wait_until

SECRETS = pytest.mark.parametrize("secret", ["", "a secret of the launcher"], ids=["open", "secret"])


def shards(rank: int, value: float) -> dict[str, holdfast.Shard]:
    """Half of a tensor: both ranks write."""
    return {"w": holdfast.Shard(torch.full((2,), value), (4,), (2 * rank,))}


# -- a commit ------------------------------------------------------------------------------


@SECRETS
@pytest.mark.parametrize("linked", [False, True], ids=["written", "linked"])
def test_a_report_of_the_step_before_commits_nothing(
    tmp_path: Path, secret: str, linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the files that rank 1 wrote for the checkpoint that is there; they are whole, and hold its old
    values."""
    stranger = Stranger(2, secret, monkeypatch)
    old: list[Any] = []
    options = holdfast.Options(link_unchanged=linked)

    def save(value: float) -> Callable[[TorchRoster], Any]:
        # No step: nothing but the attempt tells the two apart.
        return lambda roster: holdfast.save(
            shards(roster.rank, value), tmp_path / "s", job=job_of(roster, options=options)
        )

    def replay(key: str) -> None:
        old.append(stranger.read(key))
        if len(old) == 2:
            stranger.write(key, old[0])

    stranger.at("*/written/1", replay)
    assert not any(isinstance(end, HoldfastError) for end in on_each(save(1.0), stranger.rosters))
    ends = on_each(save(2.0), stranger.rosters)
    assert len(old) == 2
    assert all(isinstance(end, HoldfastError) for end in ends), ends
    assert ("seal" if secret else "this attempt gives it the name") in str(ends[0])
    found = {"w": torch.zeros(4)}
    holdfast.load(found, tmp_path / "s", job=holdfast.Job(no_dist=True))
    assert found["w"].tolist() == [1.0] * 4, "what was there stays whole"
    stranger.rest()
    assert not any(isinstance(end, HoldfastError) for end in on_each(save(3.0), stranger.rosters))


@pytest.mark.parametrize("lie", ["no file", "first of two", "another report"])
def test_a_forged_report_of_a_rank_commits_nothing(
    tmp_path: Path, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank reports is compared with what its files say: without the values of a rank, a checkpoint
    would be whole by itself."""
    stranger = Stranger(2, "", monkeypatch)

    def forge(key: str) -> None:
        message = stranger.read(key)
        if lie == "another report":
            message["report"] = {"steps": 7}
        else:
            message["files"] = message["files"][: 0 if lie == "no file" else 1]
        stranger.write(key, message)

    stranger.at("*/written/1", forge)
    options = holdfast.Options(max_file_bytes=1)
    ends = on_each(
        lambda roster: holdfast.save(
            {f"own{roster.rank}": torch.ones(3), f"more{roster.rank}": torch.ones(3)},
            tmp_path / "s",
            job=job_of(roster, options=options),
        ),
        stranger.rosters,
    )
    assert all(isinstance(end, HoldfastError) and end.rank == 1 for end in ends), ends
    assert not (tmp_path / "s" / INDEX).exists()


@pytest.mark.parametrize("background", [False, True])
def test_the_attempt_of_the_checkpoint_that_is_there_is_not_taken_again(
    tmp_path: Path, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under its name the ranks would write over its files, or sweep them after the failure."""
    stranger = Stranger(2, "", monkeypatch)

    def save(roster: TorchRoster) -> None:
        call = holdfast.async_save if background else holdfast.save
        pending = call(shards(roster.rank, 1.0), tmp_path / "s", job=job_of(roster))
        if isinstance(pending, holdfast.Pending):
            pending.committed(30)

    opened: list[Message] = []
    stranger.at("*/open", lambda key: opened.append(stranger.read(key)))
    assert not any(on_each(save, stranger.rosters))
    before = {path: path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file()}
    stranger.rest()
    stranger.before("*/open", lambda key: stranger.write(key, opened[0]))
    ends = on_each(save, stranger.rosters)
    assert all("another attempt has written" in str(end) for end in ends), ends
    assert {path: path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file()} == before
    stranger.rest()
    stranger.before("*/open", lambda key: stranger.write(key, {"rank": 0, "attempt": "../../../evil"}))
    ends = on_each(save, stranger.rosters)
    assert all("which no rank of Holdfast does" in str(end) for end in ends), ends


def test_an_index_that_names_a_file_of_another_attempt_is_damage(tmp_path: Path) -> None:
    """As a commit of an older Holdfast could be made to name it: `load` notices what `verify` does."""
    alone = holdfast.Job(no_dist=True)
    for value in (1.0, 2.0):
        holdfast.save({"w": torch.full((4,), value)}, tmp_path / str(value), job=alone)
    (old,) = (tmp_path / "1.0" / "data").iterdir()
    shutil.copy(old, tmp_path / "2.0" / "data")
    index = tmp_path / "2.0" / INDEX
    with open_index(LocalStore(tmp_path / "2.0")) as opened:
        about = opened.about
    with open_index(LocalStore(tmp_path / "1.0")) as opened:
        columns = opened.select()
    index.write_bytes(encode(columns, about, narrow=True))
    with pytest.raises(CorruptCheckpoint, match="which another attempt wrote"):
        holdfast.load({"w": torch.zeros(4)}, tmp_path / "2.0", job=alone)
    with pytest.raises(CorruptCheckpoint, match="which another attempt wrote"):
        holdfast.load(tmp_path / "2.0")
    assert not verify(tmp_path / "2.0").whole


# -- what goes on beside training ----------------------------------------------------------


def due_steps(run: holdfast.Checkpoints, seconds: float) -> list[int]:
    """A loop of this long that asks at every step whether it is to be saved."""
    ends, due = time.monotonic() + seconds, list[int]()
    for step in range(10**6):
        if time.monotonic() >= ends or due:
            return due
        time.sleep(0.005)
        if run.should_save(step):
            due.append(step)
    return due


@SECRETS
def test_a_foreign_word_on_the_time_of_a_save_is_raised_and_saves_go_on(
    tmp_path: Path, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = Stranger(2, secret, monkeypatch)
    stranger.before("lane-due/due/*", lambda key: stranger.put(key, b"0" * 16 + b'{"due":false}'))

    def train(roster: TorchRoster) -> list[int]:
        every = timedelta(seconds=0.2)
        with holdfast.Checkpoints(tmp_path, save_every=every, job=job_of(roster)) as run:
            with pytest.raises(RosterLost, match="seal"):
                due_steps(run, 30.0)
            stranger.rest()
            return due_steps(run, 30.0)

    first, second = on_each(train, stranger.rosters)
    assert len(first) == 1, "the next time counts again"
    assert len(second) == 1


def test_a_lost_store_ends_the_wait_for_the_next_save_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_times, "LOST", 0.3)
    program = (
        "import sys, torch.distributed as d;"
        "s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False);"
        "print(s.port, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as host:
        try:
            assert host.stdout is not None
            store = TCPStore(
                "127.0.0.1", int(host.stdout.readline()), is_master=False, wait_for_workers=False
            )
            job = holdfast.Job(roster=TorchRoster(store, 1, 2))
            run = holdfast.Checkpoints(tmp_path, save_every=timedelta(seconds=0.1), job=job)
            assert not run.should_save(0)
        finally:
            host.kill()
        with pytest.raises(RosterLost, match="can't be reached"):
            due_steps(run, 30.0)
        run.close()


def test_what_was_said_before_the_process_group_was_made_again_does_not_count(tmp_path: Path) -> None:
    """A launcher's store outlives it, with the words "closed" and "stop" of the ranks before."""
    store = HashStore()
    for _ in range(2):
        job = holdfast.Job(roster=TorchRoster(store, 0, 1))
        with holdfast.Checkpoints(tmp_path, save_every=timedelta(seconds=0.1), job=job) as run:
            assert len(due_steps(run, 30.0)) == 1
            assert not run.should_save(10**7)  # the clock runs again, and is closed
        with holdfast.Preemption(signals=(), job=job) as preemption:
            ends = time.monotonic() + 1.2
            while time.monotonic() < ends:
                assert not preemption.should_stop()
                time.sleep(0.05)
            preemption.request()
            wait_until(preemption.should_stop)


@SECRETS
def test_a_foreign_request_to_stop_stops_nobody_and_is_raised(
    secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = Stranger(2, secret, monkeypatch)
    message = b'{"reason":"SIGTERM on rank 1","pid":1}'
    names: list[str] = []
    for roster in stranger.rosters:
        inner = roster.lane("preemption")
        names = [inner._name("asked/0/all/1")]
    stranger.put(names[0], b"0" * 16 + message)

    def train(roster: TorchRoster) -> str:
        with holdfast.Preemption(signals=(), job=job_of(roster)) as preemption:
            with pytest.raises(RosterLost, match="seal"):
                wait_until(preemption.should_stop)
            return str(preemption.reason)

    assert on_each(train, stranger.rosters) == ["None"] * 2


def test_a_number_that_the_ranks_did_not_agree_on_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = Stranger(2, "", monkeypatch)
    stranger.at(
        "lane-preemption/*/outcome",
        lambda key: stranger.write(key, {"state": "agreed", "rank": 0, "value": "now"}),
    )

    def train(roster: TorchRoster) -> str:
        with holdfast.Preemption(signals=(), job=job_of(roster)) as preemption:
            preemption.request()
            try:
                wait_until(preemption.should_stop)
            except HoldfastError as error:
                return str(error)
        return "stopped"

    assert "which is no number" in on_each(train, stranger.rosters)[1]


def test_no_thread_ends_in_silence_for_an_error_of_any_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(save_times, "life_of", broken)
    monkeypatch.setattr(preemption_module, "life_of", broken)
    job = holdfast.Job(roster=TorchRoster(HashStore(), 0, 1))
    run = holdfast.Checkpoints(tmp_path, save_every=timedelta(seconds=0.01), job=job)
    with pytest.raises(HoldfastError, match="ZeroDivisionError: a bug"):
        due_steps(run, 30.0)
    run.close()
    with (
        holdfast.Preemption(signals=(), job=job) as preemption,
        pytest.raises(HoldfastError, match="ZeroDivisionError: a bug"),
    ):
        wait_until(preemption.should_stop)
