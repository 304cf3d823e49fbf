"""What a second look from outside found: each is mended, and stays so."""

from __future__ import annotations

import copy
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import BadInput, Conflict, Vanished
from holdfast.format.names import OWNER
from holdfast.roster.presence import Identity
from holdfast.run.owner import Owner
from holdfast.store.local import LocalStore
from holdfast.store.publishing import publish


def model_of(frozen: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(not frozen)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()


def run(code: str, *args: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, **env},
    )


# -- the end of a process -------------------------------------------------------------------------

AT_EXIT = """
import atexit, sys, torch, holdfast
checkpoints = holdfast.Checkpoints(sys.argv[1])
checkpoints.save(1, {"w": torch.ones(3)})
state, expected = {"w": torch.ones(int(sys.argv[2]))}, ["w", *sys.argv[3:]]
atexit.register(lambda: checkpoints.save(2, state, expected=expected))
"""


def test_a_save_that_an_atexit_handler_begins_is_committed(tmp_path: Path) -> None:
    ended = run(AT_EXIT, tmp_path, 5_000_000)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert holdfast.Checkpoints(tmp_path, no_dist=True).steps() == [1, 2]


def test_a_save_that_an_atexit_handler_begins_and_that_fails_is_told(tmp_path: Path) -> None:
    ended = run(AT_EXIT, tmp_path, 3, "gone")
    assert ended.returncode == 1
    assert "Vanished" in ended.stderr.strip().splitlines()[-1]
    assert holdfast.Checkpoints(tmp_path, no_dist=True).steps() == [1]


# -- states that are looked at again --------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nested", "flat", "itself"])
def test_the_state_of_a_frozen_parameter_comes_back(layout: str, tmp_path: Path) -> None:
    def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if layout == "itself":
            return {"optim": optimizer}
        return {
            "optim": holdfast.get_state_dict(model, optimizer, flatten_optimizer_state_dict=layout == "flat")[
                1
            ]
        }

    model = model_of()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    model[0].requires_grad_(False)  # type: ignore[operator]
    checkpoints = holdfast.Checkpoints(tmp_path, asynchronous=False, no_dist=True)
    checkpoints.save(1, state(model, optimizer))
    other = model_of(frozen=True)
    fresh = torch.optim.Adam(other.parameters())
    loaded = state(other, fresh)
    report = checkpoints.restore_report(loaded)
    assert report is not None
    assert report.missing == ()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], fresh.state[two]["exp_avg"])
    checkpoints.save(2, loaded)  # no name has vanished


def test_a_frozen_parameter_that_never_had_a_state_is_not_missed(tmp_path: Path) -> None:
    model = model_of(frozen=True)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    holdfast.save({"optim": optimizer}, tmp_path / "s")
    fresh = torch.optim.Adam(model.parameters())
    assert holdfast.load({"optim": fresh}, tmp_path / "s").missing == ()
    assert len(fresh.state) == 2


def test_a_load_leaves_what_the_user_has_put_into_a_live_state(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters())
    weights, moments = holdfast.get_state_dict(model, optimizer)
    weights["ema"] = torch.ones(2)
    state = {"model": weights, "optim": moments}
    holdfast.save(state, tmp_path / "s")
    weights["ema"].zero_()
    holdfast.load(state, tmp_path / "s")
    assert weights["ema"].tolist() == [1, 1]
    holdfast.save(state, tmp_path / "s")  # it has not vanished


def test_a_copy_of_a_live_state_is_what_is_there_at_the_copy() -> None:
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters())
    weights, moments = holdfast.get_state_dict(model, optimizer)
    train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    copied = copy.deepcopy({"model": weights, "optim": moments})
    assert copied["optim"]["param_groups"][0]["lr"] == 0.5
    assert torch.equal(
        copied["optim"]["state"]["1.bias"]["exp_avg"], optimizer.state[model[1].bias]["exp_avg"]
    )  # type: ignore[index,union-attr]


# -- run folders ----------------------------------------------------------------------------------


def test_damaged_steps_take_no_place_of_good_ones(tmp_path: Path) -> None:
    with holdfast.Checkpoints(tmp_path, keep=3, asynchronous=False, no_dist=True) as checkpoints:
        for step in (1, 8, 9):
            checkpoints.save(step, {"w": torch.full((1000,), float(step))})
    for step in (8, 9):
        (file,) = (tmp_path / f"step-{step:08d}" / "data").iterdir()
        data = bytearray(file.read_bytes())
        at = data.find(torch.full((1000,), float(step)).numpy().tobytes())
        data[at + 100] ^= 1
        file.write_bytes(data)
    with holdfast.Checkpoints(tmp_path, keep=3, asynchronous=False, no_dist=True) as checkpoints:
        state = {"w": torch.zeros(1000)}
        assert checkpoints.restore(state) == 1
        for step in (2, 3, 4):
            checkpoints.save(step, state)
        assert checkpoints.steps() == [2, 3, 4, 8, 9]
        checkpoints.save(8, state)  # a new one in its place is a good one
        assert checkpoints.steps() == [3, 4, 8, 9]


def test_a_step_that_is_no_count_is_refused(tmp_path: Path) -> None:
    for call in (
        lambda: holdfast.Checkpoints(tmp_path, no_dist=True).save(10**18, {"w": torch.ones(1)}),
        lambda: holdfast.save({"w": torch.ones(1)}, tmp_path / "s", step=10**18),
    ):
        with pytest.raises(BadInput, match=r"step must be a whole number from 0 on, below 1e\+18"):
            call()


def test_a_copied_step_counts_by_its_folders_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = holdfast.Checkpoints(tmp_path, asynchronous=False, no_dist=True)
    checkpoints.save(10, {"w": torch.ones(1)})
    (tmp_path / "step-00000010").rename(tmp_path / "step-00000030")
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert checkpoints.restore({"w": torch.ones(1)}) == checkpoints.latest() == 30
    assert "copied or renamed" in caplog.text


def an_owner(**other: Any) -> Owner:
    """This process, as another job that saves here."""
    me = Identity(0)
    known = {
        "job": "another",
        "name": "torchrun 7",
        "restarts": 0,
        "process": "another",
        "rank": 0,
        "since": 0.0,
        "beat": 0,
    }
    where = {"host": me.host, "machine": me.machine, "pid": me.pid, "started": me.started}
    return Owner(**{**known, **where, **other})


def test_a_live_owner_is_not_taken_over_by_a_job_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / OWNER).write_bytes(msgspec.json.encode(an_owner()))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    checkpoints = holdfast.Checkpoints(tmp_path, asynchronous=False, no_dist=True)
    with pytest.raises(Conflict, match="belongs to another job that is at work"):
        checkpoints.save(1, {"w": torch.ones(1)})


def test_a_folder_is_taken_back_once_who_took_it_has_ended(tmp_path: Path) -> None:
    with holdfast.Checkpoints(tmp_path, asynchronous=False, no_dist=True) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(1)})
        ended = run("import os; print(os.getpid())")
        gone = an_owner(pid=int(ended.stdout), started="0")
        (tmp_path / OWNER).write_bytes(msgspec.json.encode(gone))
        checkpoints.save(2, {"w": torch.ones(1)})
        assert json.loads((tmp_path / OWNER).read_text())["pid"] == os.getpid()


def test_a_parent_that_may_not_be_listed_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's folder of mode 711, with one of ours in it."""
    (tmp_path / "mine").mkdir()
    real = os.open

    def opened(path: Any, *args: Any, **named: Any) -> int:
        if os.fspath(path) == str(tmp_path):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **named)

    monkeypatch.setattr(os, "open", opened)
    publish(str(tmp_path / "mine" / "index"), b"x" * 32, None)
    assert LocalStore(tmp_path / "mine").list() == ["index"]


def test_a_pipe_is_no_index(tmp_path: Path) -> None:
    checkpoints = holdfast.Checkpoints(tmp_path, asynchronous=False, no_dist=True)
    checkpoints.save(1, {"w": torch.ones(1)})
    (tmp_path / "step-00000002").mkdir()
    os.mkfifo(tmp_path / "step-00000002" / "index.safetensors")
    assert checkpoints.restore({"w": torch.zeros(1)}) == 1


# -- arguments of the wrong type ------------------------------------------------------------------

W = {"w": torch.ones(1)}
WRONG: dict[str, Any] = {
    "on_failure": lambda at: holdfast.Checkpoints(at, on_failure=None),  # type: ignore[arg-type]
    "host_memory_budget": lambda at: holdfast.Checkpoints(at, host_memory_budget="1G"),
    "bytes from 1 on": lambda at: holdfast.async_save(W, at / "s", host_memory_budget="2"),
    "participants=0": lambda at: holdfast.save(W, at / "s", participants=0),  # type: ignore[arg-type]
    "participants='0'": lambda at: holdfast.save(W, at / "s", participants="0"),  # type: ignore[arg-type]
    r"participants=\['0'\]": lambda at: holdfast.Checkpoints(at, participants=["0"]),
    r"participants=\[0.0\]": lambda at: holdfast.save(W, at / "s", participants=[0.0]),
    "grid must be": lambda at: holdfast.save(W, at / "s", grid={"tp": 2}),  # type: ignore[arg-type]
    "process_group='x'": lambda at: holdfast.save(W, at / "s", process_group="x"),
    "roster='x'": lambda at: holdfast.save(W, at / "s", roster="x"),  # type: ignore[arg-type]
    "model must be": lambda at: holdfast.get_state_dict(W),  # type: ignore[arg-type]
    "optimizers must be": lambda at: holdfast.get_state_dict(model_of(), "adam"),  # type: ignore[arg-type]
    "options must be": lambda at: holdfast.save(W, at / "s", options={"check_replicas": "off"}),
    "expected must be": lambda at: holdfast.save(W, at / "s", expected=5),  # type: ignore[arg-type]
    "exclude must be": lambda at: holdfast.load(dict(W), at, exclude=[1]),  # type: ignore[list-item]
    "include must be": lambda at: holdfast.save(W, at / "s", include=[1]),  # type: ignore[list-item]
}


def test_expected_may_be_an_iterator(tmp_path: Path) -> None:
    holdfast.save(W, tmp_path / "s", expected=(name for name in ("w",)))
    with pytest.raises(Vanished, match="'gone'"):
        holdfast.save(W, tmp_path / "s", expected=iter(["gone"]))


@pytest.mark.parametrize("words", WRONG)
def test_an_argument_of_the_wrong_type_is_one_sentence(words: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=words):
        WRONG[words](tmp_path)
    assert not any(tmp_path.iterdir())


LATE = """
import threading, torch, sys
def late():
    threading.main_thread().join()
    import holdfast
    holdfast.Checkpoints(sys.argv[1], asynchronous=False).save(1, {"w": torch.ones(1)})
threading.Thread(target=late).start()
"""


@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="Python 3.12 starts no thread so late")
def test_the_first_use_may_come_after_the_main_thread_has_ended(tmp_path: Path) -> None:
    ended = run(LATE, tmp_path)
    assert holdfast.Checkpoints(tmp_path, no_dist=True).steps() == [1], ended.stderr
