"""What users touch first: names, imports, errors, options, deadlines and events."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
import holdfast._core.protocol.runner
import holdfast._core.store.base  # declares one more error
from holdfast import Options, errors, events
from holdfast._core.base.deadline import Deadline, check_seconds
from holdfast._core.base.options import read_environment
from holdfast.errors import (
    BadInput,
    DeadlineExceeded,
    HoldfastError,
    MissingTensors,
    RankInfo,
    StorageError,
    from_message,
)
from holdfast.testing import ManualClock
from tests.support.threads import on_ranks

# -- names and imports -----------------------------------------------------------------------------


def test_all_names_are_listed_and_resolve() -> None:
    assert sorted([*holdfast.__all__, "open"]) == dir(holdfast)  # `import *` must not hide Python's `open`
    assert len(set(holdfast.__all__)) == len(holdfast.__all__) <= 31
    for name in dir(holdfast):
        value = getattr(holdfast, name)
        assert value is getattr(holdfast, name)
        assert value.__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = holdfast.nothing
    namespace: dict[str, Any] = {}
    exec("from holdfast import *", namespace)
    assert set(holdfast.__all__) <= set(namespace)


def test_testing_names_resolve() -> None:
    for name in holdfast.testing.__all__:
        assert getattr(holdfast.testing, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = holdfast.testing.nothing


def imported_by(code: str) -> set[str]:
    code += "\nimport sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.splitlines()[-1].split())


def test_importing_holdfast_imports_neither_torch_nor_numpy() -> None:
    found = imported_by("import holdfast; dir(holdfast); holdfast.__all__")
    assert "holdfast" in found
    assert not found & {"torch", "numpy", "msgspec", "pytest"}


def test_looking_for_the_latest_step_needs_no_torch(tmp_path: Path) -> None:
    found = imported_by(
        f"import holdfast; holdfast.latest({str(tmp_path)!r});"
        "holdfast.errors; holdfast.events; holdfast.Options()"
    )
    assert not found & {"torch", "numpy", "pytest"}


def test_the_command_line_is_a_module_too() -> None:
    words = [sys.executable, "-m", "holdfast", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == f"holdfast, version {holdfast.__version__}"


# -- errors ----------------------------------------------------------------------------------------


def every_error() -> list[type[HoldfastError]]:
    found, todo = [], [HoldfastError]
    while todo:
        kind = todo.pop()
        found.append(kind)
        todo += kind.__subclasses__()
    public = {kind for kind in found if not kind.__name__.startswith("_")}
    return sorted(public, key=lambda kind: kind.__name__)


FIELDS: dict[str, Any] = {
    "step": 7,
    "phase": "writing",
    "rank": 3,
    "missing": (RankInfo(1, "node-1", 42, "save: writing", 1.5, "silent"), RankInfo(2)),
    "hint": "Do this.",
    "details": {"tensor": "w", "ranks": [1, 2], "nested": {"a": None}},
}


def same(a: HoldfastError, b: HoldfastError) -> None:
    assert type(a) is type(b)
    assert str(a) == str(b)
    assert a.args == b.args
    for name in ("message", *FIELDS):
        assert getattr(a, name) == getattr(b, name), name


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling_and_messages(kind: type[HoldfastError]) -> None:
    for error in (kind("A sentence."), kind("A sentence.", **FIELDS)):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            same(pickle.loads(pickle.dumps(error, protocol)), error)
        same(from_message(json.loads(json.dumps(error.to_message()))), error)
        assert isinstance(error, HoldfastError)
    full = kind("A sentence.", **FIELDS)
    assert str(full) == "A sentence. Do this."
    assert str(kind("A sentence.")) == "A sentence."
    assert kind.__doc__


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    listed = {
        line.split("─ ")[1].split()[0].split("(")[0]
        for line in (errors.__doc__ or "").splitlines()
        if "─ " in line
    }
    real = {kind.__name__ for kind in every_error() if kind.__module__ == "holdfast.errors"} - {
        "HoldfastError"
    }
    assert listed == real


def test_errors_are_also_what_python_calls_them() -> None:
    assert issubclass(BadInput, ValueError)
    assert issubclass(StorageError, OSError)
    assert issubclass(holdfast._core.store.base.NotFound, StorageError)
    assert issubclass(DeadlineExceeded, errors.RankFailed)


@pytest.mark.parametrize(
    "message", [{}, {"kind": "Unheard", "message": "x"}, {"kind": None, "missing": None, "details": None}]
)
def test_messages_of_an_unknown_kind_become_the_root(message: dict[str, Any]) -> None:
    error = from_message(message)
    assert type(error) is HoldfastError
    assert error.message == message.get("message", "")
    assert error.missing == ()


@pytest.mark.parametrize("kind", ["os.system", "Exception", "SystemExit", "object"])
def test_a_message_can_name_no_class_of_others(kind: str) -> None:
    assert type(from_message({"kind": kind, "message": "x"})) is HoldfastError


def test_rank_infos_read_as_sentences() -> None:
    assert str(RankInfo(2)) == "rank 2, which has not been heard of"
    assert (
        str(RankInfo(1, "n1", 42, "save: writing", 1.46))
        == "rank 1 (host n1, pid 42), last seen in phase 'save: writing' 1.5 s ago"
    )
    assert str(RankInfo(1, phase="x", note="gone")).endswith(": gone")


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"check_replicas": "maybe"},
            r"check_replicas must be one of \('auto', 'full', 'sample', 'off'\), not 'maybe'",
        ),
        ({"columns": "auto"}, "columns must be a tuple of name patterns, not 'auto'"),
        ({"columns": (1,)}, r"columns must be a tuple of name patterns, not \(1,\)"),
        ({"writer_threads": 0}, "writer_threads must be a whole number of at least 1, not 0"),
        ({"writer_threads": 1.5}, "not 1.5"),
        ({"max_file_bytes": -1}, "max_file_bytes must be"),
        ({"split_bytes": "1"}, "split_bytes must be .* not '1'"),
    ],
)
def test_options_say_what_they_want(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        Options(**arguments)


def test_options_are_values() -> None:
    assert Options() == Options()
    assert hash(Options()) == hash(Options())
    with pytest.raises(AttributeError):
        Options().writer_threads = 2  # type: ignore[misc]


def test_the_environment_is_read_as_torchrun_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert (read_environment().rank, read_environment().world_size) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    first = read_environment()
    assert (first.rank, first.world_size) == (3, 8)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert read_environment().incarnation != first.incarnation
    monkeypatch.setenv("RANK", "three")
    with pytest.raises(BadInput, match=r"RANK, WORLD_SIZE, .* whole numbers"):
        read_environment()


def test_a_world_without_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        BadInput, match=r"WORLD_SIZE is 2, but torch\.distributed is not initialised"
    ) as caught:
        holdfast.save({"a": 1}, tmp_path)
    assert "no_dist=True" in caught.value.hint
    holdfast.save({"a": 1}, tmp_path, job=holdfast.Job(no_dist=True))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"job": {"timeout": 0}}, "timeout must be a positive, finite number of seconds, not 0"),
        ({"job": {"stall_timeout": -1}}, "stall_timeout must be"),
        ({"job": {"participants": []}}, "must be different ranks"),
        ({"job": {"participants": [1]}}, "different ranks of a world of 1"),
        ({"step": -1}, "step must be a whole number"),
        ({"step": True}, "step must be a whole number"),
        ({"expected": "next"}, "expected='next'"),
        ({"include": "a"}, "include takes a list"),
        ({"include": ["zzz"]}, "no name in the state matches 'zzz'"),
    ],
)
def test_calls_that_make_no_sense_write_nothing(
    arguments: dict[str, Any], words: str, tmp_path: Path
) -> None:
    def save(job: dict[str, Any] | None = None, **others: Any) -> None:
        holdfast.save({"a": torch.zeros(1)}, tmp_path / "x", job=holdfast.Job(**(job or {})), **others)

    with pytest.raises(BadInput, match=words):
        save(**arguments)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_a_process_that_is_alone_names_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = holdfast.Job(no_dist=True)
    holdfast.save({"a": torch.zeros(1)}, tmp_path, job=job)
    with pytest.raises(MissingTensors) as caught:
        holdfast.load({"b": torch.zeros(1)}, tmp_path, job=job)
    assert str(caught.value).startswith(f"load of {tmp_path} failed in phase 'reading': {tmp_path} does not")
    assert (caught.value.rank, caught.value.phase) == (0, "reading")
    pending = holdfast.async_save({"a": torch.zeros(1000, 1000)}, tmp_path / "it", job=job)
    if pending.cancel():
        assert str(pending.exception(60)).endswith(f"The save of {tmp_path / 'it'} was cancelled.")
    monkeypatch.setenv("WORLD_SIZE", "2")  # of several, where the process matters, with `no_dist`
    with pytest.raises(MissingTensors, match=rf"failed on rank 0 \(host .*, pid {os.getpid()}\) in phase"):
        holdfast.load({"b": torch.zeros(1)}, tmp_path, job=job)


def test_an_error_of_several_ranks_names_its_rank(tmp_path: Path) -> None:
    def save(roster: Any) -> str:
        state = {"a": torch.zeros(1), "x": lambda: 1} if roster.rank else {"a": torch.zeros(1)}
        with pytest.raises(BadInput) as caught:
            holdfast.save(state, tmp_path, job=holdfast.Job(roster=roster, timeout=60))
        return str(caught.value)

    for said in on_ranks(2, save):
        assert f"failed on rank 1 (host {os.uname().nodename}, pid {os.getpid()}) in phase" in said


# -- time ------------------------------------------------------------------------------------------


def test_a_deadline_by_a_manual_clock() -> None:
    clock = ManualClock(100.0)
    deadline = Deadline(10, clock)
    assert (deadline.left(), deadline.elapsed(), deadline.passed()) == (10, 0, False)
    clock.advance(4)
    assert (deadline.left(), deadline.elapsed(), deadline.passed()) == (6, 4, False)
    clock.sleep(6)
    assert (deadline.left(), deadline.passed()) == (0, True)
    clock.advance(5)
    assert (deadline.left(), deadline.elapsed()) == (0, 15)
    assert clock.slept == [6]
    with pytest.raises(ValueError, match="Time does not go back"):
        clock.advance(-1)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "5", None, True])
def test_seconds_are_positive_finite_numbers(value: Any) -> None:
    with pytest.raises(BadInput, match="must be a positive, finite number of seconds, not"):
        check_seconds("timeout", value)
    with pytest.raises(BadInput, match="timeout"):
        Deadline(value)
    assert check_seconds("timeout", 3) == 3.0


# -- events ----------------------------------------------------------------------------------------


@pytest.fixture
def heard() -> Iterator[list[events.Event]]:
    found: list[events.Event] = []
    stop = events.subscribe(found.append)
    yield found
    stop()


def test_saves_and_loads_tell_what_happens(heard: list[events.Event], tmp_path: Path) -> None:
    holdfast.save({"a": torch.zeros(3)}, tmp_path, step=5)
    names = [event.name for event in heard]
    assert names[0] == "save.entered"
    assert "save.writing" in names
    assert "save.committed" in names
    assert names.index("save.writing") < names.index("save.committed")
    assert all(event.step == 5 and event.path == str(tmp_path) and event.rank == 0 for event in heard)
    heard.clear()
    holdfast.load({"a": torch.zeros(3)}, tmp_path)
    assert heard[0].name == "load.entered"
    assert {event.name.partition(".")[0] for event in heard} == {"load"}


def test_a_failure_is_told(heard: list[events.Event], tmp_path: Path) -> None:
    with pytest.raises(errors.NotCommitted):
        holdfast.load({"a": torch.zeros(3)}, tmp_path)
    (raised,) = [event for event in heard if event.name == "load.raised"]
    assert raised.fields["error"] == "NotCommitted"


def test_a_subscriber_that_raises_breaks_nothing(
    heard: list[events.Event], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(event: events.Event) -> None:
        raise RuntimeError("I am broken")

    stop = events.subscribe(broken)
    later: list[events.Event] = []
    stop_later = events.subscribe(later.append)
    try:
        with caplog.at_level(logging.ERROR, "holdfast"):
            holdfast.save({"a": torch.ones(3)}, tmp_path)
            target = {"a": torch.zeros(3)}
            holdfast.load(target, tmp_path)
    finally:
        stop()
        stop_later()
    assert target["a"].tolist() == [1, 1, 1]
    assert "An event callback raised on save.entered" in caplog.text
    assert "I am broken" in caplog.text
    assert later == heard
    stop()  # twice is once


def test_who_unsubscribed_is_told_no_more() -> None:
    found: list[events.Event] = []
    stop = events.subscribe(found.append)
    events.emit("test.one", rank=2, x=1)
    stop()
    events.emit("test.two")
    assert [(event.name, event.rank, event.fields) for event in found] == [("test.one", 2, {"x": 1})]


def test_who_unsubscribes_when_told_takes_nothing_from_the_next() -> None:
    once: list[str] = []
    always: list[str] = []

    def only_the_first(event: events.Event) -> None:
        once.append(event.name)
        stop_once()

    stop_once = events.subscribe(only_the_first)
    stop_always = events.subscribe(lambda event: always.append(event.name))
    try:
        events.emit("test.one")
        events.emit("test.two")
    finally:
        stop_always()
    assert once == ["test.one"]
    assert always == ["test.one", "test.two"]


@pytest.mark.parametrize(
    ("error", "said"),
    [(ValueError("no\nstack"), "no"), (MemoryError(), "MemoryError"), (RuntimeError(""), "RuntimeError")],
)
def test_an_error_in_one_line(error: Exception, said: str) -> None:
    assert errors.first_line(error) == said
