"""A process at its limits: an asynchronous save says which limit it has met, and the next save works."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import NotStarted
from tests.groups.session.launch import Forks

PROGRAM = """
import os, resource, sys, torch, holdfast
which, value, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
state, job = {"w": torch.ones(1 << 20)}, holdfast.Job(no_dist=True)
# Imports all that is used: another user may not read where this library lies.
save = holdfast.async_save
with holdfast.Checkpoints(folder + "-before") as before:
    before.save(1, state)
limit = getattr(resource, "RLIMIT_" + which)
before = resource.getrlimit(limit)
if which == "AS":  # what it has now, and no room for the copy
    value += int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
if which == "NPROC":
    os.setresuid(65534, 65534, 0)  # root is not limited; and back
resource.setrlimit(limit, (value, before[1]))
try:
    save(state, folder, job=job).committed(60)
except holdfast.errors.HoldfastError as error:
    assert type(error).__module__ == "holdfast.errors" and hasattr(holdfast.errors, type(error).__name__)
    print(type(error).__name__, error)
resource.setrlimit(limit, before)
if which == "NPROC":
    os.setresuid(0, 0, 0)
with holdfast.Checkpoints(folder + "-after") as after:  # the writer of the first save has its limits still
    print(after.save(1, state).committed(60).tensors)
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("tests.support.run_code") as made:
        yield made


@pytest.mark.parametrize(
    ("which", "value", "words"),
    [
        (
            "FSIZE",
            1 << 20,
            ("SaveFailed", "The copy of the state", "(4 MiB of", "size of a file", "1 MiB", "ulimit -f"),
        ),
        pytest.param(
            "AS",
            3 << 20,
            ("SaveFailed", "The copy of the state", "Cannot allocate", "address space", "ulimit -v"),
            marks=pytest.mark.wide,
        ),
        pytest.param("NPROC", 1, ("NotStarted", "could not be started", "ulimit -u")),
    ],
)
def test_what_a_limit_forbids_is_said(
    which: str, value: int, words: tuple[str, ...], forks: Forks, tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)
    args = [PROGRAM, which, str(value), str(tmp_path / "step")]
    ended = forks.run(args, [0], 1, tmp_path / "terminal", 120.0)
    assert ended.codes == [0], ended.said
    said, saved = ended.said.splitlines()
    assert all(word in said for word in words), said
    assert "could not be read" not in said
    assert saved == "1"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EAGAIN, "Raise the limit of processes and threads (ulimit -u"),
        (errno.ENOMEM, "Raise the limit of processes and threads (ulimit -u"),
        (errno.EMFILE, "Raise the limit of open files (ulimit -n)."),
        (errno.EACCES, f"Permission denied. It executes {sys.executable}: this user must be able to."),
        (errno.EIO, "could not be started: Input/output error."),
    ],
)
def test_a_writer_that_the_system_does_not_start(
    number: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **named: object) -> None:
        raise OSError(number, os.strerror(number))

    state, job = {"w": torch.ones(3)}, holdfast.Job(no_dist=True)
    with holdfast.Checkpoints(tmp_path, job=job, on_failure="warn") as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", refuse)
            pending = checkpoints.save(1, state)
            assert pending is not None
            with pytest.raises(NotStarted, match="The writer process of an asynchronous save") as caught:
                pending.committed(60)
        assert words in str(caught.value)
        assert number not in (errno.EACCES, errno.EIO) or "limit" not in str(caught.value)
        checkpoints.save(2, state)
    assert checkpoints.steps() == [2]


@pytest.mark.parametrize("executable", ["", None])
def test_a_program_that_embeds_python_is_told_what_it_lacks(
    executable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = holdfast.Job(no_dist=True)
    # With a writer of its own, which is not started yet.
    with holdfast.Checkpoints(tmp_path, job=job, on_failure="warn") as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", executable)
            pending = checkpoints.save(1, {"w": torch.ones(3)})
            assert pending is not None
            with pytest.raises(NotStarted, match=r"sys\.executable, the path of this Python, is not set"):
                pending.committed(60)
        checkpoints.save(2, {"w": torch.ones(3)})
    assert checkpoints.steps() == [2]
