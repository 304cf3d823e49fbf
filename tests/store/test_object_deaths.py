"""Death at each request of a save: of the process that saves, of its writer process, and of the server; and real
servers that ignore conditions of writes."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast._core.io import file_writer
from holdfast._core.saving import commit, job
from holdfast._core.store.local import open_store
from holdfast.errors import CommitUnconfirmed, HoldfastError, StorageError
from tests.support.object_servers import BUCKET, Proxy, moto, request, s3_environment
from tests.support.ports import HOST, held_port
from tests.support.processes import ProcessWorld, Result
from tests.support.waiting import wait_for_threads

pytest.importorskip("obstore")
ALONE = holdfast.Job(no_dist=True)
STATE = {"w": torch.arange(999.0)}


@pytest.fixture
def server() -> Iterator[int]:
    with moto() as port:
        yield port


def whole_or_absent(place: str) -> bool:
    """Return whether a checkpoint is there; then it is whole."""
    if holdfast.latest(place.rpartition("/")[0]) != place:
        return False
    back = {"w": torch.zeros(999)}
    holdfast.load(back, place, job=ALONE)
    assert torch.equal(back["w"], STATE["w"])
    return True


def saves(rank: int, place: str, in_background: bool) -> str:
    try:
        if in_background:
            holdfast.async_save(STATE, place, job=ALONE).committed()
        else:
            holdfast.save(STATE, place, job=ALONE)
    except CommitUnconfirmed:
        return "unconfirmed"
    except HoldfastError as error:
        return str(error)
    return "committed"


def writer_of(pid: int) -> int | None:
    """Return the pid of the writer process that a process has started."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if pid else ():
        with suppress(OSError):
            if b"writer_start" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return None


def kill_at(proxy: Proxy, place: str, number: int, writer: bool, fate: str) -> tuple[Result, bool]:
    """Save, and kill the saving process, or its writer, at a request. Return how it ended, and whether one was
    killed."""
    with ProcessWorld(1, env=s3_environment(proxy.port)) as world:
        killed: list[int] = []

        def rule(method: str, path: str, query: str, at: int) -> str:
            victim = writer_of(world.pid(0)) if writer else world.pid(0)
            if at < number or killed or victim is None:
                return "pass"
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)
            return fate

        proxy.requests()
        proxy.rule = rule
        world.start(saves, place, writer)
        (result,) = world.collect(60)
    proxy.rule = lambda *_: "pass"
    return result, bool(killed)


@pytest.mark.parametrize("fate", ["pass", "drop"])
def test_a_process_that_is_killed_at_the_commit(proxy: Proxy, fate: str) -> None:
    place = f"s3://{BUCKET}/commit-{fate}/step-1"
    result, killed = kill_at(proxy, place, 7, False, fate)
    assert killed
    assert result.died == -signal.SIGKILL
    assert whole_or_absent(place) == (fate == "pass")


@pytest.mark.soak
@pytest.mark.parametrize("fate", ["pass", "drop"])
def test_a_process_that_is_killed_at_a_request(proxy: Proxy, fate: str) -> None:
    there = []
    for number in itertools.count():
        place = f"s3://{BUCKET}/client-{fate}/step-{number}"
        result, killed = kill_at(proxy, place, number, False, fate)
        if not killed:
            assert result.value == "committed"
            break
        assert result.died == -signal.SIGKILL
        there.append(whole_or_absent(place))
    assert number == 8, "four requests try the bucket, four save"
    assert there == sorted(there), "once it is committed, it stays so"
    assert there[-1] == (fate == "pass"), "the last request puts the index in place"


@pytest.mark.soak
@pytest.mark.parametrize("fate", ["pass", "drop"])
def test_a_writer_process_that_is_killed_at_a_request(proxy: Proxy, fate: str) -> None:
    ends = set()
    for number in itertools.count():
        place = f"s3://{BUCKET}/writer-{fate}/step-{number}"
        result, killed = kill_at(proxy, place, number, True, fate)
        assert whole_or_absent(place) == (result.value == "committed"), result
        ends.add("committed" if result.value == "committed" else "failed")
        if result.value != "committed":
            assert "writer process" in result.value
        if not killed:
            break
    assert ends == {"committed", "failed"}


@pytest.mark.parametrize(
    "number", [0, 7, *(pytest.param(number, marks=pytest.mark.soak) for number in range(1, 7))]
)
def test_a_server_that_is_killed_at_a_request(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (commit, "LOOK_AGAIN"),
        (job, "DISCARDED_WITHIN"),
        (file_writer, "DISCARDED_WITHIN"),
    ):
        monkeypatch.setattr(module, name, 0.5)
    started: list[subprocess.Popen[bytes]] = []
    before = threading.enumerate()
    with moto(started) as port:
        proxy = Proxy(port)
        for name, value in s3_environment(proxy.port).items():
            monkeypatch.setenv(name, value)

        def rule(method: str, path: str, query: str, at: int) -> str:
            if at == number:
                started[0].kill()
                started[0].wait(30)
            return "pass"

        proxy.rule = rule
        begun = time.monotonic()
        with pytest.raises(HoldfastError) as caught:
            holdfast.save(STATE, f"s3://{BUCKET}/gone/step-1", job=holdfast.Job(no_dist=True, timeout=2.0))
        assert time.monotonic() - begun < 2.0 + 3.0
        sent = any(line.startswith("PUT") and "index.safetensors" in line for line in proxy.requests())
        assert isinstance(caught.value, CommitUnconfirmed) == sent, caught.value
        proxy.close()
        wait_for_threads(before)  # or their requests go to the server of the next test


# -- real servers that lie ----------------------------------------------------------------------------------------


def find(name: str) -> str | None:
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


COMMANDS = {
    "nanio": ["serve", "--host", HOST, "--data-dir", "{folder}", "--port", "{port}"],
    "localbucket": ["--host", HOST, "--port", "{port}", "{folder}"],
}


@pytest.mark.soak
@pytest.mark.parametrize("name", COMMANDS)
def test_a_real_server_that_ignores_conditions_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = find(name)
    if program is None:
        pytest.skip(f"{name} (of PyPI) is not installed")
    with held_port() as port:
        command = [part.format(folder=tmp_path, port=port) for part in COMMANDS[name]]
        keys = {"NANIO_ACCESS_KEY": "key", "NANIO_SECRET_KEY": "very-secret"}
        for key, value in s3_environment(port).items():
            monkeypatch.setenv(key, value)
        (tmp_path / BUCKET).mkdir()  # both keep a bucket as a folder
        server = subprocess.Popen(
            [program, *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **keys},
        )
        try:
            ends = time.monotonic() + 60
            while True:
                with suppress(OSError):
                    request(port, "GET", "/")
                    break
                assert time.monotonic() < ends, f"{name} did not start"
                time.sleep(0.1)
            store = open_store(f"s3://{BUCKET}/run")
            # Not by a save: nanio does not know ranges that end behind an object, and fails before.
            with pytest.raises(StorageError, match="its server ignores conditions of writes"):
                store.publish("index", b"1" * 64, None)
            assert store.list() == []
        finally:
            server.kill()
            server.wait(30)
