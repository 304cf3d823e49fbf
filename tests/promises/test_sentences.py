"""Input that can't be honoured gets one sentence; input that means something clear is taken."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
import holdfast.dcp
from holdfast import huggingface
from holdfast.errors import BadInput, RankInfo, Vanished

STATE = {"w": torch.ones(3)}
ALONE = holdfast.Job(no_dist=True)


@pytest.mark.parametrize("notes", [torch.ones(2), {"a": {1, 2}}, {"deep": {("a", "b"): 1}}])
def test_notes_that_are_no_json(tmp_path: Path, notes: Any) -> None:
    with pytest.raises(BadInput, match=re.escape("notes= must be a JSON value")):
        holdfast.save(STATE, tmp_path / "a", job=holdfast.Job(no_dist=True), notes=notes)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("step", [np.int64(7), np.uint8(7), torch.tensor(7)])
def test_an_integer_of_any_library_is_a_step(tmp_path: Path, step: Any) -> None:
    holdfast.save(STATE, tmp_path / "a", job=holdfast.Job(no_dist=True), step=step)
    assert holdfast.load({"w": torch.zeros(3)}, tmp_path / "a", job=holdfast.Job(no_dist=True)).step == 7
    with holdfast.Checkpoints(tmp_path / "run", asynchronous=False) as checkpoints:
        checkpoints.save(step, STATE)
        assert checkpoints.steps() == [7]
        assert checkpoints.restore({"w": torch.zeros(3)}, step) == 7


@pytest.mark.parametrize("step", [1.5, np.float64(1.0), "7", True, np.bool_(True), -1, 10**18, torch.ones(2)])
def test_what_is_no_step(tmp_path: Path, step: Any) -> None:
    with pytest.raises(BadInput, match=r"step must be a whole number from 0 on, below 1e\+18"):
        holdfast.save(STATE, tmp_path / "a", job=holdfast.Job(no_dist=True), step=step)
    with pytest.raises(BadInput, match="step must be a whole number from 0 on"):
        holdfast.Checkpoints(tmp_path, job=holdfast.Job(no_dist=True)).save(step, STATE)


WRONG: dict[str, Any] = {
    "on_failure": lambda at: holdfast.Checkpoints(at, on_failure=None),  # type: ignore[arg-type]
    "host_memory_budget must be a whole number of at least 1, not '1G'": lambda at: holdfast.Options(
        host_memory_budget="1G"  # type: ignore[arg-type]
    ),
    "retries must be a whole number of at least 0, not -1": lambda at: holdfast.Options(retries=-1),
    "participants=0": lambda at: holdfast.save(STATE, at / "s", job=holdfast.Job(participants=0)),  # type: ignore[arg-type]
    "participants='0'": lambda at: holdfast.save(STATE, at / "s", job=holdfast.Job(participants="0")),  # type: ignore[arg-type]
    r"participants=\['0'\]": lambda at: holdfast.Checkpoints(at, job=holdfast.Job(participants=["0"])),
    r"participants=\[0.0\]": lambda at: holdfast.save(STATE, at / "s", job=holdfast.Job(participants=[0.0])),
    "grid must be": lambda at: holdfast.save(STATE, at / "s", job=holdfast.Job(grid={"tp": 2})),  # type: ignore[arg-type]
    "participants='x'": lambda at: holdfast.save(STATE, at / "s", job=holdfast.Job(participants="x")),  # type: ignore[arg-type]
    "roster='x'": lambda at: holdfast.save(STATE, at / "s", job=holdfast.Job(roster="x")),  # type: ignore[arg-type]
    "model must be": lambda at: holdfast.get_state_dict(STATE),  # type: ignore[arg-type]
    "optimizers must be": lambda at: holdfast.get_state_dict(nn.Linear(2, 2), "adam"),  # type: ignore[arg-type]
    "optimizers must be .* not 3": lambda at: holdfast.get_state_dict(nn.Linear(2, 2), 3),  # type: ignore[arg-type]
    "model must be .* not int": lambda at: holdfast.get_state_dict(3),  # type: ignore[arg-type]
    "3 is no file": lambda at: huggingface.register(3),  # type: ignore[arg-type]
    "The path is of type NoneType; give a str": lambda at: huggingface.export(at, None, like=at),  # type: ignore[arg-type]
    "The path is of type int; give a str": lambda at: huggingface.export(at, at / "out", like=3),  # type: ignore[arg-type]
    "file_bytes must be a whole number from 1 on, not '5GB'": lambda at: huggingface.export(
        at,
        at / "out",
        like=at,
        file_bytes="5GB",  # type: ignore[arg-type]
    ),
    "options must be": lambda at: holdfast.save(
        STATE, at / "s", job=holdfast.Job(options={"check_replicas": "off"})
    ),
    "job must be": lambda at: holdfast.save(STATE, at / "s", job={"timeout": 5}),  # type: ignore[arg-type]
    "expected must be": lambda at: holdfast.save(STATE, at / "s", expected=5),  # type: ignore[arg-type]
    "exclude must be": lambda at: holdfast.load(dict(STATE), at, exclude=[1]),  # type: ignore[list-item]
    "include must be": lambda at: holdfast.save(STATE, at / "s", include=[1]),  # type: ignore[list-item]
}


SWITCHES: dict[str, Callable[[Path, Any], object]] = {
    "asynchronous": lambda at, value: holdfast.Checkpoints(at, asynchronous=value),
    "takeover": lambda at, value: holdfast.Checkpoints(at, takeover=value),
    "fallback": lambda at, value: holdfast.Checkpoints(at, job=ALONE).restore(dict(STATE), fallback=value),
    "overwrite": lambda at, value: holdfast.save(STATE, at / "s", overwrite=value, job=ALONE),
    "objects_may_differ": lambda at, value: holdfast.dcp.save(
        dict(STATE), checkpoint_id=at / "s", objects_may_differ=value, job=ALONE
    ),
    "lazy": lambda at, value: holdfast.load(at / "s", lazy=value),
    "no_dist": lambda at, value: holdfast.Job(no_dist=value),
    "optional": lambda at, value: holdfast.PerRank(1, optional=value),
    **{
        name: lambda at, value, name=name: holdfast.Options(**{name: value})
        for name in ("fingerprint", "link_unchanged", "keep_failed", "nearest_rng")
    },
    **{
        name: lambda at, value, name=name: holdfast.install(**{name: value})
        for name in ("checkpoints", "huggingface", "session")
    },
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_text_is_no_switch(name: str, tmp_path: Path) -> None:
    """`takeover=os.environ["TAKEOVER"]` would take the run of a running job over, also if it says 0."""
    for value in ("0", "no", None):
        with pytest.raises(BadInput, match=re.escape(f"{name} must be True or False, not {value!r}.")):
            SWITCHES[name](tmp_path, value)
    assert not any(tmp_path.iterdir())
    assert not holdfast.installed()


def test_expected_may_be_an_iterator(tmp_path: Path) -> None:
    holdfast.save(STATE, tmp_path / "s", expected=(name for name in ("w",)))
    with pytest.raises(Vanished, match="'gone'"):
        holdfast.save(STATE, tmp_path / "s", expected=iter(["gone"]))


@pytest.mark.parametrize("words", WRONG)
def test_an_argument_of_the_wrong_type_is_one_sentence(words: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=words):
        WRONG[words](tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["save", "restore", "job", "timeout", "participants", "keep", "include"])
def test_a_state_in_the_wrong_place_is_not_printed(call: str, tmp_path: Path) -> None:
    """Of a real model that would be megabytes, which all ranks write into the log."""
    model: Any = nn.Sequential(*(nn.Linear(40, 40) for _ in range(30)))
    state: Any = {"model": model, "weights": model.state_dict()}
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: holdfast.Checkpoints(tmp_path).save(state, 1),  # type: ignore[arg-type]
        "restore": lambda: holdfast.Checkpoints(tmp_path).restore(1, state),  # type: ignore[arg-type]
        "job": lambda: holdfast.save({"w": 1}, tmp_path, job=state),
        "timeout": lambda: holdfast.Job(timeout=state),
        "participants": lambda: holdfast.Job(participants=[state]).ranks(),
        "keep": lambda: holdfast.Checkpoints(tmp_path, keep=state),
        "include": lambda: holdfast.save({"w": 1}, tmp_path, include=model),
    }
    with pytest.raises(BadInput) as error:
        calls[call]()
    assert len(str(error.value)) < 500
    assert "\n" not in str(error.value)
    if call in ("save", "restore"):
        assert "Checkpoints.save(step, state)" in error.value.hint


def test_what_is_known_of_a_rank_twice_is_said_once() -> None:
    """Of one that is stopped, the kernel's word is its state, and the answer where it is."""
    held = "it is stopped by a signal (state T)"
    assert str(RankInfo(1, note=f"it has not entered; {held}", at=held)).count(held) == 1
    assert str(RankInfo(1, note="it has not entered", at="a.py:1 f")).endswith(
        ": it has not entered; a.py:1 f"
    )


def test_a_name_that_a_caller_expects_is_missed_whatever_it_looks_like(tmp_path: Path) -> None:
    """`layer@7` is also the name of a value of rank 7, which a smaller world does not have."""
    with pytest.raises(Vanished, match=r"1 name that expected= has is not in this save: 'layer@7\.w'"):
        holdfast.save({"w": torch.ones(1)}, tmp_path / "it", expected=["w", "layer@7.w"])
