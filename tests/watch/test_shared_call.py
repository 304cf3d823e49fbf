"""Calls that are asked for, or made together, in a folder; without processes (`test_faults` has some)."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from holdfast._core.base.shared_folder import SharedFolder
from holdfast._tools.cli import doctor
from holdfast._watch import shared_call
from holdfast._watch.diagnose import diagnose
from holdfast._watch.evidence import GroupOperation, Rank, SourceLine
from holdfast._watch.read import read_all
from holdfast._watch.shared_call import (
    JobPart,
    ask_for_call,
    parts,
    take_part,
    wait_for_answers,
    waiting_call,
)

HERE = SourceLine("roll call")


def test_a_call_that_was_asked_for_waits_for_each_job(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert waiting_call(folder, "a") is None
    path = ask_for_call(folder, "somebody asks")
    assert waiting_call(folder, "a") == (os.path.basename(path), "somebody asks")
    first = take_part(path, "a", 4)
    assert first is not None
    assert waiting_call(folder, "a") is None
    named = waiting_call(folder, "b")
    assert named is not None
    assert "another job" in named[1]
    second = take_part(path, "b", 2)
    assert second is not None
    assert ((first.number, first.first), (second.number, second.first)) == ((0, 0), (1, 4))
    assert parts(path) == [first, second]
    assert sorted(os.listdir(path)) == ["asked", "job-0", "job-1"]


def test_a_damaged_part_is_not_read(tmp_path: Path) -> None:
    too_many = b'{"job":"a","world_size":1000000000000,"program":"p"}'
    for damage in (b"{", too_many, b'{"job":"\xff"}', b'{"a":' + b"[" * 2000 + b"]" * 2000 + b"}"):
        (tmp_path / "job-0").write_bytes(damage)
        assert parts(str(tmp_path)) == []
    assert "\x1b" not in JobPart("a", 2, "train\x1b[31m.py").said()


NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


def test_files_of_a_call_are_for_this_user_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    path = ask_for_call(str(tmp_path), "somebody asks")
    assert take_part(path, "a", 2) is not None
    modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in os.scandir(path)}
    assert modes == {"asked": 0o600, "job-0": 0o600}
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o700


@as_root
def test_a_call_of_another_user_is_not_answered(tmp_path: Path) -> None:
    path = ask_for_call(str(tmp_path), "a stranger asks")
    asked = Path(path) / "asked"
    os.chown(asked, NOBODY, NOBODY)
    assert waiting_call(str(tmp_path), "a") is None
    os.chown(asked, 0, 0)
    assert waiting_call(str(tmp_path), "a") is not None
    os.chown(path, NOBODY, NOBODY)
    assert waiting_call(str(tmp_path), "a") is None
    with pytest.raises(PermissionError, match="belongs to another user"):
        take_part(path, "a", 2)
    assert os.listdir(path) == ["asked"]


@as_root
def test_files_that_a_server_gives_to_another_user_are_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with root_squash: this process takes itself for another user than the one whose its files become."""
    place = tempfile.mkdtemp(dir="/dev/shm")
    os.chown(place, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        path = ask_for_call(place, "somebody asks")
        assert os.stat(path).st_uid == NOBODY
        assert waiting_call(place, "a") is not None
        assert take_part(path, "a", 2) is not None
        assert [part.job for part in parts(path)] == ["a"]
    finally:
        os.seteuid(0)
        shutil.rmtree(place)


@as_root
@pytest.mark.parametrize("name", ["roll-calls", "call", "job-0"])
def test_a_link_of_a_stranger_leads_nowhere(name: str, tmp_path: Path) -> None:
    """Neither is what it leads to written, nor read, whichever part of the path it is."""
    victim = tmp_path / "victim"
    run = tmp_path / "run"
    run.mkdir(mode=0o777)
    path = ask_for_call(str(run), "somebody asks")
    place = {"roll-calls": run / "roll-calls", "call": Path(path), "job-0": Path(path) / "job-0"}[name]
    if name == "job-0":
        victim.write_bytes(msgspec.json.encode(JobPart("b", 2, "program")))
    else:
        shutil.move(place, victim)
    place.symlink_to(victim)
    os.lchown(place, NOBODY, NOBODY)
    before = sorted(os.listdir(victim)) if victim.is_dir() else victim.read_bytes()
    assert parts(path) == []
    if name == "job-0":  # the next place is taken
        part = take_part(path, "a", 2)
        assert part is not None
        assert part.number == 1
    else:
        with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
            take_part(path, "a", 2)
    after = sorted(os.listdir(victim)) if victim.is_dir() else victim.read_bytes()
    assert after == before


@as_root
@pytest.mark.parametrize("how", ["link", "second name", "of a stranger", "fifo"])
def test_events_are_appended_to_own_plain_files_alone(how: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    run = tmp_path / "run"
    with SharedFolder(str(run), "events", make=True, private=False) as folder:
        assert folder.append("rank-0.jsonl", b"one\n") == 4
        assert folder.append("rank-0.jsonl", b"two\n") == 8
        assert (run / "events" / "rank-0.jsonl").read_text() == "one\ntwo\n"
        planted = run / "events" / "rank-1.jsonl"
        if how == "link":
            planted.symlink_to(victim)
        elif how == "second name":
            os.link(victim, planted)
        elif how == "fifo":
            os.mkfifo(planted)
        else:
            planted.write_text("")
            os.chown(planted, NOBODY, NOBODY)
        with pytest.raises(OSError, match=r"no plain file|Too many levels|No such device"):
            folder.append("rank-1.jsonl", b"x")
    assert victim.read_text() == "precious"


def test_what_is_no_plain_small_file_is_not_read(tmp_path: Path) -> None:
    path = Path(ask_for_call(str(tmp_path), "somebody asks"))
    (path / "asked").unlink()
    for make in (os.mkfifo, lambda name: name.mkdir(), lambda name: name.write_bytes(b" " * 5000)):
        make(path / "asked")
        assert waiting_call(str(tmp_path), "a") is None
        (path / "asked").rmdir() if (path / "asked").is_dir() else (path / "asked").unlink()
    (path / "job-0").write_bytes(msgspec.json.encode(JobPart("a", 1, "program")))
    with (path / "rank-0.json").open("wb") as file:
        file.truncate(200 << 30)
    assert wait_for_answers(str(path), 0.1) is False


def test_an_old_call_is_not_answered(tmp_path: Path) -> None:
    path = ask_for_call(str(tmp_path), "somebody asks")
    old = time.time() - shared_call.YOUNG - 1
    os.utime(path, (old, old))
    assert waiting_call(str(tmp_path), "a") is None


def written(path: str, part: JobPart, rank: int, groups: list[str]) -> None:
    """What a rank writes that has a pending collective in the last of its groups, and none in the others."""
    states = ["completed"] * (len(groups) - 1) + ["started"]
    found = part.rank(
        Rank(
            rank,
            tuple(
                GroupOperation(group, 1 + (state == "started"), "all_reduce", state, HERE)
                for group, state in zip(groups, states, strict=True)
            ),
        )
    )
    members = {"0:default_pg": tuple(range(part.world_size))} if rank == 0 else {}
    value = {
        "roll_call": found,
        "members": part.members(members),
        "world_size": part.first + part.world_size,
    }
    Path(path, f"rank-{found.rank}.json").write_bytes(msgspec.json.encode(value))


def test_a_cycle_between_two_jobs_is_found(tmp_path: Path) -> None:
    """The groups of one name that torch has counted are of their job; those that programs name are shared."""
    path = ask_for_call(str(tmp_path), "somebody asks")
    trainer, engine = take_part(path, "a", 2), take_part(path, "b", 2)
    assert trainer is not None
    assert engine is not None
    written(path, trainer, 0, ["0:default_pg", "rollout", "weights"])
    written(path, trainer, 1, ["rollout", "0:default_pg"])
    written(path, engine, 0, ["weights", "0:default_pg", "rollout"])
    written(path, engine, 1, ["weights", "0:default_pg"])
    assert wait_for_answers(path, 0.1)
    evidence = read_all([str(tmp_path)])
    assert sorted(evidence.ranks) == [0, 1, 2, 3]
    assert evidence.members == {"0:default_pg": (0, 1), "job 1 0:default_pg": (2, 3)}
    found = diagnose(evidence)
    assert found.why is not None
    assert (found.why.kind, found.why.ranks) == ("cycle", None)
    assert [one.what for one in found.observations if "ranks 2-3 are ranks 0-1 of" in one.what]


def test_doctor_says_that_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ANSWERED", 0.1)
    done = CliRunner().invoke(doctor.command, ["--all", str(tmp_path)])
    assert done.exit_code
    assert "No rank has answered" in str(done.exception)
    assert "nor once the host of the message store has ended" in str(done.exception)
    assert "No rank answers in a job of one rank" in str(done.exception)
