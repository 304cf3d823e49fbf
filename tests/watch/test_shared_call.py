"""Calls that are asked for, or made together, in a folder; without processes (`test_faults` has some)."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from holdfast._cli import doctor
from holdfast._watch import shared_call
from holdfast._watch.diagnose import diagnose
from holdfast._watch.evidence import Operation, Rank, Source
from holdfast._watch.read import read_all
from holdfast._watch.shared_call import Part, ask_for_call, parts, take_part, wait_for_answers, waiting_call

HERE = Source("roll call")


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
    for damage in (b"{", b'{"job":"a","world_size":1000000000000,"program":"p"}'):
        (tmp_path / "job-0").write_bytes(damage)
        assert parts(str(tmp_path)) == []
    assert "\x1b" not in Part("a", 2, "train\x1b[31m.py").said()


def test_an_old_call_is_not_answered(tmp_path: Path) -> None:
    path = ask_for_call(str(tmp_path), "somebody asks")
    old = time.time() - shared_call.YOUNG - 1
    os.utime(path, (old, old))
    assert waiting_call(str(tmp_path), "a") is None


def written(path: str, part: Part, rank: int, groups: list[str]) -> None:
    """What a rank writes that has a pending collective in the last of its groups, and none in the others."""
    states = ["completed"] * (len(groups) - 1) + ["started"]
    found = part.rank(
        Rank(
            rank,
            tuple(
                Operation(group, 1 + (state == "started"), "all_reduce", state, HERE)
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
    assert found.verdict is not None
    assert (found.verdict.kind, found.verdict.ranks) == ("cycle", None)
    assert [one.what for one in found.observations if "ranks 2-3 are ranks 0-1 of" in one.what]


def test_doctor_says_that_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ANSWERED", 0.1)
    done = CliRunner().invoke(doctor.command, ["--all", str(tmp_path)])
    assert done.exit_code
    assert "No rank has answered" in str(done.exception)
    assert "host of its message store has ended" in str(done.exception)
