"""`prune` in object stores: it removes what is known never to be committed, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch

import holdfast
from holdfast._core.format.names import OWNER
from holdfast._core.run import leftovers, owner
from holdfast._core.run.owner_file import Owner, read_owner
from holdfast._core.store import object_client
from holdfast._core.store.base import Store, replace_file
from holdfast._core.store.local import open_store
from holdfast._core.store.pins import Pin
from holdfast._tools.checkpoints.prune import Pruned, prune
from holdfast._tools.checkpoints.verify import VerifiedRun, verify
from holdfast.errors import HoldfastError
from tests.support.object_servers import Proxy, hurry

pytest.importorskip("obstore")
pytestmark = pytest.mark.usefixtures("deletions_are_waited_for")
ALONE = holdfast.Job(no_dist=True)
SOURCE = str(Path(holdfast.__file__).parents[1])


@pytest.fixture
def run(place: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(owner, "BEAT", 600.0)  # so that the file stays as a test has written it
    return place


def state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((999,), float(step))}


def folder(step: int) -> str:
    return f"step-{step:08d}"


def data_of(run: str, step: int) -> list[str]:
    return open_store(f"{run}/{folder(step)}").list("data")


def put(store: Store, path: str, data: bytes = b"x") -> None:
    writer = store.create(path)
    writer.write_at(0, [data])
    writer.finish()


def owner_of(run: str) -> Owner:
    found, _ = read_owner(open_store(run))
    assert found is not None
    return found


def write_owner(run: str, **changes: object) -> None:
    """Change the owner file as if another owner had written it."""
    changed = msgspec.structs.replace(owner_of(run), version=os.urandom(16).hex(), **changes)
    replace_file(open_store(run), OWNER, msgspec.json.encode(changed))


SAVES = """if True:
    import sys, torch, holdfast
    checkpoints = holdfast.Checkpoints(sys.argv[1], asynchronous=False, job=holdfast.Job(no_dist=True))
    for step in map(int, sys.argv[2:]):
        checkpoints.save(step, {"w": torch.full((999,), float(step))})
    print("saved", flush=True)
    sys.stdin.read()
"""


def killed_in_its_commit(proxy: Proxy, run: str, *steps: int) -> None:
    """Save steps in a process that is killed before the index of the last one is sent."""
    reached = threading.Event()

    def rule(method: str, path: str, query: str, number: int) -> str:
        if method == "PUT" and path.endswith(f"{folder(steps[-1])}/index.safetensors"):
            reached.set()
            return "hang"
        return "pass"

    proxy.rule = rule
    env = {**os.environ, "PYTHONPATH": SOURCE}
    arguments = [sys.executable, "-c", SAVES, run, *map(str, steps)]
    with subprocess.Popen(arguments, env=env, stdin=subprocess.PIPE) as process:
        assert reached.wait(90)
        process.send_signal(signal.SIGKILL)
    proxy.rule = lambda *_: "pass"
    assert data_of(run, steps[-1])


def skipped(found: Pruned) -> str:
    return "; ".join(f"{item.path}: {item.why}" for item in found.skipped)


def whole(run: str) -> list[int | None]:
    found = verify(run)
    assert isinstance(found, VerifiedRun)
    assert found.whole
    return [step.step for step in found.steps]


# -- what goes --------------------------------------------------------------------------------------------


def test_what_a_killed_job_has_left_goes_once_its_end_is_known(proxy: Proxy, run: str) -> None:
    killed_in_its_commit(proxy, run, 1, 2)
    before = data_of(run, 2)
    dry = prune(run, dry_run=True)
    assert [item.path for item in dry.removed] == [f"{folder(2)}/data/{name}" for name in before]
    assert data_of(run, 2) == before
    found = prune(run)
    assert found.removed == dry.removed
    assert found.bytes_freed > 3000
    assert found.kept == (1,)
    assert open_store(run).list() == [OWNER, f"{folder(1)}/"]
    assert whole(run) == [1]


def test_what_a_job_of_another_host_has_left_stays_until_another_job_has_the_run(
    proxy: Proxy, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_in_its_commit(proxy, run, 1, 2)
    write_owner(run, machine="another machine", host="far-away")
    found = prune(run)
    assert not found.removed
    assert "host far-away" in skipped(found)
    assert "may be under way" in skipped(found)
    monkeypatch.setattr(owner, "SILENT", 1.0)
    with holdfast.Checkpoints(run, asynchronous=False, job=ALONE) as checkpoints:
        checkpoints.save(3, state(3))
        # That the other job is silent is no proof: for a while it might still commit.
        found = prune(run)
        assert not found.removed
        assert "is ruled out once another job has had the run for 10 minutes" in skipped(found)
        assert data_of(run, 2)
    assert owner_of(run).ended, "the list is kept when the run is closed"
    monkeypatch.setattr(leftovers, "SETTLED", 0)
    assert len(prune(run).removed) == 1
    assert whole(run) == [1, 3]


def test_the_next_job_of_the_same_host_knows_that_the_one_before_has_ended(proxy: Proxy, run: str) -> None:
    killed_in_its_commit(proxy, run, 1, 2)
    with holdfast.Checkpoints(run, asynchronous=False, job=ALONE) as checkpoints:
        checkpoints.save(3, state(3))
        assert len(prune(run).removed) == 1
        assert not data_of(run, 2)
        checkpoints.save(2, state(2))
    assert whole(run) == [1, 2, 3]
    assert not prune(run).removed
    assert len(owner_of(run).void) == 1


def test_what_a_failed_save_has_left_goes_while_its_job_goes_on(proxy: Proxy, run: str) -> None:
    with holdfast.Checkpoints(run, on_failure="warn", job=ALONE) as checkpoints:
        checkpoints.save(1, state(1)).result()
        # Neither the look at what the writer process has written nor its deletion is answered well.
        proxy.rule = lambda method, path, query, number: (
            "denied" if (method == "GET" and "/data/" in path) or method == "POST" else "pass"
        )
        with pytest.raises(HoldfastError):
            checkpoints.save(2, state(2)).result()
        proxy.rule = lambda *_: "pass"
        assert len(data_of(run, 2)) == 1
        checkpoints.save(3, state(3)).result()  # notes it
        assert len(owner_of(run).void) == 1
        assert len(prune(run).removed) == 1
        assert whole(run) == [1, 3]


def test_old_steps_go(run: str) -> None:
    with holdfast.Checkpoints(run, asynchronous=False, job=ALONE) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state(step))
    pin = Pin(open_store(f"{run}/{folder(1)}"))
    found = prune(run, keep=1)
    assert [item.path for item in found.removed] == [folder(2)]
    assert skipped(found) == f"{folder(1)}: it is being read"
    pin.close()
    assert prune(run, keep=1).kept == (3,)
    assert open_store(run).list() == [f"{folder(3)}/"]


def test_a_removal_that_was_stopped_is_finished(proxy: Proxy, run: str) -> None:
    with holdfast.Checkpoints(run, asynchronous=False, job=ALONE) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state(step))
        deletions: list[str] = []

        def rule(method: str, path: str, query: str, number: int) -> str:
            if method == "POST":
                deletions.append(path)
            return "denied" if method == "POST" and len(deletions) > 1 else "pass"  # after the index

        proxy.rule = rule
        with pytest.raises(HoldfastError):
            checkpoints.delete(1)
        proxy.rule = lambda *_: "pass"
        assert data_of(run, 1)
        pin = Pin(open_store(f"{run}/{folder(1)}"))
        assert skipped(prune(run)) == f"{folder(1)}: it is being read"
        assert data_of(run, 1)
        pin.close()
        dry = prune(run, dry_run=True)
        assert [item.path for item in dry.removed] == [folder(1)]
        assert data_of(run, 1)
        assert prune(run).removed == dry.removed
    assert open_store(run).list() == [f"{folder(2)}/"]


# -- what stays -------------------------------------------------------------------------------------------


def test_what_nobody_has_noted_stays_and_a_sentence_says_why(run: str) -> None:
    holdfast.save(state(1), f"{run}/{folder(1)}", step=1, job=ALONE)
    store = open_store(run)
    for rank in range(3):
        put(store, f"{folder(2)}/data/0123456789ab-r0000{rank}.safetensors")
    put(store, f"{folder(2)}/data/notes.txt")
    found = prune(run)
    assert not found.removed
    [item] = found.skipped
    assert item.path == f"{folder(2)}/data/0123456789ab-r00000.safetensors and 2 more"
    assert "it may have been made without Checkpoints, and still be under way" in item.why
    assert len(data_of(run, 2)) == 4


def test_a_step_that_was_committed_though_its_job_was_killed_stays(run: str) -> None:
    """The owner file lists the attempt of a committed step as under way if the job is killed right after that."""
    with holdfast.Checkpoints(run, asynchronous=False, job=ALONE) as checkpoints:
        checkpoints.save(1, state(1))
        attempt = data_of(run, 1)[0][:12]
        write_owner(run, void=(attempt,), under_way=())
        found = prune(run)
        assert not found.removed
        assert not found.skipped
        assert whole(run) == [1]
        # Also while somebody reads it who opened it before it was removed.
        with holdfast.open(f"{run}/{folder(1)}") as reader:
            open_store(run).delete(f"{folder(1)}/index.safetensors")
            assert skipped(prune(run)) == f"{folder(1)}: it is being read"
            assert torch.equal(reader["w"][...], state(1)["w"])
        assert len(prune(run).removed) == 1


@pytest.mark.parametrize("in_a_run", [True, False])
def test_a_prune_before_each_request_of_a_save_harms_nothing(
    run: str, monkeypatch: pytest.MonkeyPatch, in_a_run: bool
) -> None:
    """Of a run whose job is at work, and of one that is saved into without Checkpoints."""
    found, lock = list[Pruned](), threading.Lock()
    real = object_client.Request

    class Pruning(real):  # type: ignore[misc, valid-type]
        def __init__(self, action: Callable[[], object]) -> None:
            if lock.acquire(blocking=False):  # not in the prune itself
                try:
                    found.append(prune(run))
                finally:
                    lock.release()
            super().__init__(action)

    with holdfast.Checkpoints(run, asynchronous=False, job=ALONE) as checkpoints:
        checkpoints.save(1, state(1))
        with monkeypatch.context() as patch:
            patch.setattr(object_client, "Request", Pruning)
            if in_a_run:
                checkpoints.save(2, state(2))
            else:
                holdfast.save(state(2), f"{run}/{folder(2)}", step=2, job=ALONE)
    assert len(found) >= (5 if in_a_run else 4)
    assert not any(one.removed for one in found)
    why = "may be under way" if in_a_run else "may have been made without Checkpoints"
    assert any(why in skipped(one) for one in found)
    assert whole(run) == [1, 2]


# -- faults -----------------------------------------------------------------------------------------------

FAULTS = [
    ("lost", 4),
    *(pytest.param(one, 1, marks=pytest.mark.soak) for one in ("lost", "503", "late:0.3", "hang", "expired")),
]


@pytest.mark.parametrize(("fault", "every"), FAULTS)
def test_a_fault_in_each_request_of_a_prune(
    proxy: Proxy, run: str, monkeypatch: pytest.MonkeyPatch, fault: str, every: int
) -> None:
    hurry(monkeypatch, fault)
    count = 0
    with holdfast.Checkpoints(run, asynchronous=False, job=ALONE) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state(step))
        store = open_store(run)
        left = [f"{folder(3)}/data/0123456789ab-r0000{rank}.safetensors" for rank in range(2)]
        kept = f"{folder(3)}/data/ba9876543210-r00000.safetensors"
        put(store, kept)
        for number in (-1, *range(0, 99, every)):
            if number >= count:
                break
            for path in left:
                put(store, path)
            write_owner(run, void=("0123456789ab",))
            proxy.requests()
            proxy.rule = lambda method, path, query, nth, number=number: fault if nth == number else "pass"
            with suppress(HoldfastError):
                prune(run)
            if number < 0:  # there is no such request
                count = len(proxy.requests())
            proxy.rule = lambda *_: "pass"
            if fault.startswith("late"):
                time.sleep(0.4)
            prune(run)
            assert data_of(run, 3) == [kept.rpartition("/")[2]]
    assert whole(run) == [1, 2]
    assert count >= 8
