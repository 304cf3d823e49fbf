"""A run folder has one owner: a second job is told, and takes over only what is known to be left."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import holdfast
from holdfast._core.format.names import OWNER
from holdfast._core.roster.process import stat as stat_of
from holdfast._core.roster.process import this_process
from holdfast._core.run import owner
from holdfast._core.run.owner_file import Owner
from holdfast.errors import Conflict
from tests.support.interpreters import Program
from tests.support.processes import ProcessWorld
from tests.support.waiting import wait_until

JOB = """
import sys, torch, holdfast
run, first = sys.argv[1], int(sys.argv[2])
how = dict(keep=2, asynchronous=False, takeover="takeover" in sys.argv)
checkpoints = holdfast.Checkpoints(run, **how)
for step in range(first, first + 40, 2):
    print(step, flush=True)
    asked = sys.stdin.readline().strip()
    if asked == "end":
        break
    if asked == "new":
        checkpoints.close()
        checkpoints = holdfast.Checkpoints(run, **how)
    try:
        checkpoints.save(step, {"w": torch.full((3,), float(step))})
        print("saved", flush=True)
    except holdfast.errors.Conflict as error:
        print("Conflict", error, flush=True)
if "close" in sys.argv:
    checkpoints.close()
"""


class Job:
    """A process that saves a step each time that it is asked to."""

    def __init__(self, run: Path, first: int, *how: str) -> None:
        self.process = Program(JOB, str(run), str(first), *how)

    def _line(self) -> str:
        return self.process.stdout.readline().strip()

    def save(self, new: bool = False) -> str:
        """new: by a new Checkpoints, after the old one is closed."""
        self._line()
        self.process.stdin.write("new\n" if new else "go\n")
        self.process.stdin.flush()
        return self._line()

    def end(self) -> None:
        self.process.stdin.write("end\n")
        self.process.stdin.flush()
        assert self.process.wait(60) == 0

    def kill(self) -> None:
        self.process.kill()


@pytest.fixture
def jobs() -> Any:
    made: list[Job] = []

    def start(*args: Any) -> Job:
        made.append(Job(*args))
        return made[-1]

    yield start
    for job in made:
        job.kill()


def test_a_second_job_in_one_run_folder_is_told(tmp_path: Path, jobs: Any) -> None:
    first, second = jobs(tmp_path, 0), jobs(tmp_path, 1)
    assert first.save() == "saved"
    told = second.save()
    assert told.startswith("Conflict")
    assert f"pid {first.process.pid}" in told
    assert "Give every job a run folder of its own" in told
    assert first.save() == "saved"
    assert second.save().startswith("Conflict")
    assert holdfast.Checkpoints(tmp_path).steps() == [0, 2], "no step of the first job is gone"


def test_a_copy_of_a_folder_at_work_is_gone_on_from_as_the_error_says(tmp_path: Path, jobs: Any) -> None:
    first, copy = jobs(tmp_path / "run", 0), tmp_path / "copy"
    assert first.save() == "saved"
    shutil.copytree(tmp_path / "run", copy)
    second = jobs(copy, 1)
    told = second.save()
    assert told.startswith("Conflict")
    assert f"delete {OWNER} in the copy" in told
    (copy / OWNER).unlink()
    assert second.save() == "saved"
    assert first.save() == "saved"
    assert holdfast.Checkpoints(copy).steps() == [0, 3]
    assert holdfast.Checkpoints(tmp_path / "run").steps() == [0, 2]


@pytest.mark.parametrize("end", ["close", pytest.param("exit", marks=pytest.mark.wide), "kill"])
def test_the_folder_of_a_job_that_has_ended_is_taken_at_once(tmp_path: Path, jobs: Any, end: str) -> None:
    first = jobs(tmp_path, 0, *(["close"] if end == "close" else []))
    assert first.save() == "saved"
    (first.kill if end == "kill" else first.end)()
    assert (tmp_path / OWNER).exists() == (end == "kill")
    second = jobs(tmp_path, 1)
    assert second.save() == "saved"
    assert holdfast.Checkpoints(tmp_path).steps() == [0, 1]


def test_a_job_may_be_told_to_take_over_and_the_other_hears_of_it(tmp_path: Path, jobs: Any) -> None:
    other = jobs(tmp_path, 0)
    assert other.save() == "saved"
    with holdfast.Checkpoints(tmp_path, takeover=True, asynchronous=False, keep=1) as mine:
        mine.save(1, {"w": torch.ones(3)})
        told = other.save()
        assert told.startswith("Conflict")
        assert "was taken over by" in told
        assert mine.steps() == [1]


def elsewhere(run: Path, **said: Any) -> Owner:
    """An owner on a host that can't be seen from here."""
    made = Owner("a job", "", 0, "x", 0, "far-away", "another machine", 7, "1", 0.0, 3, version="0" * 16)
    made = msgspec.structs.replace(made, **said)
    (run / OWNER).write_bytes(msgspec.json.encode(made))
    return made


def test_an_owner_that_cannot_be_seen_is_watched_for_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "SILENT", 0.5)
    elsewhere(tmp_path)
    ticks: list[int] = []
    checkpoints = holdfast.Checkpoints(tmp_path, asynchronous=False)
    lease = owner.lease_of(checkpoints.store)
    lease.hold(checkpoints, "mine", 0, False, lambda: ticks.append(1))
    assert len(ticks) > 3, "others see that this goes on"
    assert json.loads((tmp_path / OWNER).read_text())["pid"] == os.getpid()
    checkpoints.close()
    assert json.loads((tmp_path / OWNER).read_text())["ended"], "the owner before may live, and must see it"


def test_an_owner_elsewhere_that_lives_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "SILENT", 30.0)
    before = elsewhere(tmp_path)
    timer = threading.Timer(0.3, lambda: elsewhere(tmp_path, beat=before.beat + 1))
    timer.start()
    with pytest.raises(Conflict, match="host far-away, pid 7"):
        holdfast.Checkpoints(tmp_path, asynchronous=False).save(1, {"w": torch.ones(3)})
    timer.join()
    assert json.loads((tmp_path / OWNER).read_text())["host"] == "far-away"


@pytest.mark.parametrize(("restarts", "taken"), [("1", True), ("0", False)])
def test_a_later_start_of_the_same_job_takes_over_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: str, taken: bool
) -> None:
    monkeypatch.setattr(owner, "SILENT", 3600.0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run-7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    elsewhere(tmp_path, name="torchrun run-7")
    checkpoints = holdfast.Checkpoints(tmp_path, asynchronous=False, job=holdfast.Job(timeout=1.0))
    if taken:
        checkpoints.save(1, {"w": torch.ones(3)})
        checkpoints.close()
    else:
        with pytest.raises(holdfast.errors.HoldfastError):
            checkpoints.save(1, {"w": torch.ones(3)})
        assert checkpoints.steps() == []


def give_signs_of_life(rank: int, folder: Path) -> None:
    """In a process of its own: in that of the tests others may have runs open."""
    owner.BEAT = 0.02
    one, two = (holdfast.Checkpoints(folder, asynchronous=False) for _ in range(2))
    one.save(1, {"w": torch.ones(3)})
    two.save(2, {"w": torch.ones(3)})
    wait_until(lambda: json.loads((folder / OWNER).read_text())["beat"] > 3)
    one.close()
    assert (folder / OWNER).exists()
    del two  # gone without a word

    def is_given_up() -> bool:
        gc.collect()
        return not (folder / OWNER).exists()

    wait_until(is_given_up)
    wait_until(lambda: "holdfast-owner" not in [thread.name for thread in threading.enumerate()])


def test_signs_of_life_are_given_and_end_with_the_last_user(tmp_path: Path) -> None:
    with ProcessWorld(1) as world:
        world.run(give_signs_of_life, tmp_path, timeout=90)


@pytest.mark.parametrize("content", [b"{", b'{"host":"\xff"}', b'{"a":' + b"[" * 50_000])
def test_a_damaged_owner_file_stops_nobody(content: bytes, tmp_path: Path) -> None:
    (tmp_path / OWNER).write_bytes(content)
    with holdfast.Checkpoints(tmp_path, asynchronous=False) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(3)})
        assert checkpoints.steps() == [1]


def here(run: Path, **said: Any) -> None:
    """Another job, in a process of this host that lives."""
    me = this_process(0)
    # The parent: an owner with the pid of this process is a program that it ran before (`exec`).
    parent = stat_of(os.getppid())
    assert parent is not None
    where = {"host": me.host, "machine": me.machine, "pid": os.getppid(), "started": parent.started}
    elsewhere(run, **{**where, **said})


def test_a_live_owner_is_not_taken_over_by_a_job_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here(tmp_path, name="torchrun 7")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    checkpoints = holdfast.Checkpoints(tmp_path, asynchronous=False, job=holdfast.Job(no_dist=True))
    with pytest.raises(Conflict, match="belongs to another job that is at work"):
        checkpoints.save(1, {"w": torch.ones(1)})


@pytest.mark.parametrize("how", ["takeover", "silence"])
@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_folder_that_was_taken_over_is_not_taken_back_without_a_word(
    tmp_path: Path, jobs: Any, monkeypatch: pytest.MonkeyPatch, how: str, end: str
) -> None:
    old = jobs(tmp_path, 0)
    assert old.save() == "saved"
    if how == "silence":  # the old job is on a host that can't be seen, and stands still
        said = msgspec.json.decode((tmp_path / OWNER).read_bytes(), type=Owner)
        said = msgspec.structs.replace(said, machine="another machine", name="")
        (tmp_path / OWNER).write_bytes(msgspec.json.encode(said))
        monkeypatch.setattr(owner, "SILENT", 0.5)
        with holdfast.Checkpoints(tmp_path, asynchronous=False) as between:
            between.save(50, {"w": torch.ones(3)})
    new = jobs(tmp_path, 101, "close", *(["takeover"] if how == "takeover" else []))
    assert new.save() == "saved"
    (new.end if end == "close" else new.kill)()
    for _ in range(2):
        told = old.save()
        assert told.startswith("Conflict")
        assert f"pid {new.process.pid}" in told
        assert "has ended since" in told
    assert holdfast.Checkpoints(tmp_path).latest() == 101
    assert old.save(new=True) == "saved"
    assert old.save() == "saved"


def test_takeover_takes_the_folder_once(tmp_path: Path, jobs: Any) -> None:
    """Two jobs that are both started with it do not take the folder from each other in turn."""
    how: dict[str, Any] = {"takeover": True, "asynchronous": False, "job": holdfast.Job(no_dist=True)}
    mine = holdfast.Checkpoints(tmp_path, **how)
    mine.save(1, {"w": torch.ones(1)})
    other = jobs(tmp_path, 2, "takeover")
    assert other.save() == "saved"
    with pytest.raises(Conflict, match="may still be at work"):
        mine.save(3, {"w": torch.ones(1)})
    assert other.save() == "saved"
    with holdfast.Checkpoints(tmp_path, **how) as again:
        again.save(5, {"w": torch.ones(1)})
    mine.close()
    assert other.save().startswith("Conflict")


@pytest.mark.parametrize("gone", ["file", "folder", "damaged"])
def test_a_file_removed_by_hand_is_no_takeover(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gone: str
) -> None:
    run = tmp_path / "run"
    with holdfast.Checkpoints(run, asynchronous=False, job=holdfast.Job(no_dist=True)) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(1)})
        assert not caplog.records
        if gone == "folder":
            shutil.rmtree(run)
        elif gone == "file":
            (run / OWNER).unlink()
        else:
            (run / OWNER).write_text("{")
        checkpoints.save(2, {"w": torch.ones(1)})
        checkpoints.save(3, {"w": torch.ones(1)})
        assert [record.message for record in caplog.records if "can't be told" in record.message] == [
            f"{run}/{OWNER}, which names the job that saves there, is gone or damaged. Whether another job "
            "has saved there can't be told; this job goes on, and writes it anew."
        ]
    assert not (run / OWNER).exists()


IMAGES = """
import os, sys, torch, holdfast
run, image = sys.argv[1], int(sys.argv[2])
checkpoints = holdfast.Checkpoints(run, asynchronous=image % 2 == 0, keep=2)
saved = checkpoints.save(image, {"w": torch.ones(3)})
saved.committed(60)
print(os.getpid(), checkpoints.steps(), flush=True)
if image < 3:
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[3], run, str(image + 1), sys.argv[3]])
"""


def test_a_program_that_replaces_itself_goes_on_in_its_folder(tmp_path: Path) -> None:
    """`exec` keeps the pid and the start time, and runs no exit handler: nothing gave the folder back."""
    command = [sys.executable, "-c", IMAGES, str(tmp_path), "1", IMAGES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    pids, steps = zip(*(line.split(" ", 1) for line in done.stdout.splitlines()), strict=True)
    assert len(set(pids)) == 1
    assert steps == ("[1]", "[1, 2]", "[2, 3]")


def test_who_counts_as_alive(tmp_path: Path) -> None:
    """Of the same pid: this program, no program before it, and nobody before this process; and the parent."""
    me = this_process(0)
    here = elsewhere(tmp_path, pid=me.pid, machine=me.machine, started=me.started)
    parent = stat_of(os.getppid())
    assert parent is not None
    cases: list[tuple[dict[str, Any], bool | None]] = [
        ({}, False),
        ({"process": owner._PROCESS}, True),
        ({"started": str(int(me.started) - 1)}, False),
        ({"machine": "another"}, None),
        ({"pid": os.getppid(), "started": parent.started}, True),
    ]
    for said, alive in cases:
        assert owner._lives(msgspec.structs.replace(here, **said)) is alive
