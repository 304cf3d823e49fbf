"""Old steps and those who read them: what is being read stays, what is gone is looked for again."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast._core.io.old_steps import remove_step
from holdfast._core.loading import reading
from holdfast._core.run import choice
from holdfast._core.store import run_folder
from holdfast._core.store.local import LocalStore
from holdfast._core.store.pins import Pin, unpinned
from holdfast._frameworks.torch_dcp.torch_dist import export_torch_dist
from holdfast._tools.checkpoints.prune import prune
from holdfast._tools.checkpoints.verify import Verified, VerifiedRun, verify
from holdfast.errors import HoldfastError
from holdfast.testing import MemoryStore

Meanwhile = Callable[[], None]


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((300,), float(step)) for name in ("v", "w")}


class Run:
    """A run that keeps its newest step only."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.checkpoints = holdfast.Checkpoints(
            place, keep=1, asynchronous=False, job=holdfast.Job(no_dist=True)
        )
        self.newest = 0
        self.save()

    def save(self) -> None:
        self.newest += 1
        self.checkpoints.save(self.newest, state_of(self.newest))

    def step(self, number: int) -> Path:
        return self.place / f"step-{number:08d}"

    def steps(self) -> list[int]:
        return self.checkpoints.steps()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "run")
    yield made
    made.checkpoints.close()


# -- what is being read -------------------------------------------------------------------------------


def once(meanwhile: Meanwhile) -> Callable[..., None]:
    left = [meanwhile]
    return lambda *_: left.pop()() if left else None


def verifies(step: Path, meanwhile: Meanwhile, patch: pytest.MonkeyPatch) -> None:
    found = verify(step, progress=once(meanwhile))
    assert isinstance(found, Verified)
    assert found.whole


def exports(step: Path, meanwhile: Meanwhile, patch: pytest.MonkeyPatch) -> None:
    out = step.parent.parent / "out"
    export_torch_dist(step, out, progress=once(meanwhile))
    loads(out, lambda: None, patch)


def loads(step: Path, meanwhile: Meanwhile, patch: pytest.MonkeyPatch) -> None:
    real, before = reading.read_into, once(meanwhile)

    def read_into(*args: Any) -> int:
        before()
        return real(*args)

    patch.setattr(reading, "read_into", read_into)
    state = state_of(0)
    holdfast.load(state, step, job=holdfast.Job(no_dist=True))
    assert state["w"].tolist() == state_of(1)["w"].tolist()


@pytest.mark.parametrize("read", [verifies, exports, loads])
def test_a_step_that_is_being_read_stays_until_then(
    run: Run, read: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def meanwhile() -> None:
        run.save()
        seen.append(run.steps())

    read(run.step(1), meanwhile, monkeypatch)
    assert seen == [[1, 2]]
    run.save()
    assert run.steps() == [3]
    assert sorted(path.name for path in run.place.iterdir() if path.is_dir()) == ["step-00000003"]


def test_a_pin_ends_with_its_process(run: Run) -> None:
    program = (
        "import sys, time\n"
        "from holdfast._core.store.local import open_store\n"
        "from holdfast._core.store.pins import Pin\n"
        "pin = Pin(open_store(sys.argv[1]))\n"
        "print('reading', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(run.step(1))], stdout=subprocess.PIPE, text=True
    ) as reader:
        try:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "reading\n"
            run.save()
            assert run.steps() == [1, 2]
        finally:
            reader.kill()
    run.save()
    assert run.steps() == [3]


def test_a_fork_of_a_reader_keeps_no_step(run: Run) -> None:
    pin = Pin(LocalStore(run.step(1)))
    ends, begins = os.pipe()
    child = os.fork()
    if not child:
        os.read(ends, 1)
        os._exit(0)
    run.save()
    assert run.steps() == [1, 2]
    pin.close()
    run.save()
    assert run.steps() == [3]
    os.write(begins, b"x")
    assert os.waitpid(child, 0)[1] == 0
    os.close(ends)
    os.close(begins)


def test_a_step_that_is_being_read_can_be_saved_again(run: Run) -> None:
    with closing(Pin(LocalStore(run.step(1)))):
        holdfast.save(state_of(7), run.step(1), step=1, job=holdfast.Job(no_dist=True))
    state = state_of(0)
    holdfast.load(state, run.step(1), job=holdfast.Job(no_dist=True))
    assert state["w"][0] == 7.0


def test_without_locks_old_steps_are_removed_all_the_same(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(fd: int, how: int, what: bytes) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "fcntl", none)
    with closing(Pin(LocalStore(run.step(1)))):
        run.save()
    assert run.steps() == [2]


def test_pruning_says_which_step_is_being_read(run: Run) -> None:
    with closing(Pin(LocalStore(run.step(1)))):
        run.save()
        found = prune(run.place, keep=1)
        assert [(item.path, item.why) for item in found.skipped] == [("step-00000001", "it is being read")]
        assert (found.removed, found.kept) == ((), (1, 2))
    assert prune(run.place, keep=1).kept == (2,)


def test_a_pin_leaves_nothing_behind(run: Run) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    names = sorted(run.step(1).rglob("*"))
    for place in (LocalStore(run.step(1)), LocalStore(run.step(99)), MemoryStore()):
        pin = Pin(place)
        pin.close()
        pin.close()
    assert {*os.listdir("/proc/self/fd")} <= {*before}
    assert sorted(run.step(1).rglob("*")) == names


@pytest.mark.parametrize("names", [("v", "w"), ("v", "x"), ()], ids=["whole", "a name too many", "nothing"])
def test_a_load_keeps_no_step_once_it_has_ended(run: Run, names: tuple[str, ...]) -> None:
    with suppress(HoldfastError):
        holdfast.load({name: torch.zeros(300) for name in names}, run.step(1), job=holdfast.Job(no_dist=True))
    with unpinned(LocalStore(run.step(1))) as free:
        assert free


# -- what is gone ---------------------------------------------------------------------------------------


def test_a_run_whose_only_step_is_replaced_is_never_empty(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders are listed; then a newer step is committed, and the one that was listed is removed."""
    real = run_folder.all_step_folders
    for look, found in (
        (lambda: holdfast.latest(run.place), lambda: str(run.step(run.newest))),
        (lambda: run.checkpoints.restore(state_of(0)), lambda: run.newest),
    ):
        before = once(run.save)

        def listing(
            store: Any, names: list[str] | None = None, before: Callable[[], None] = before
        ) -> list[tuple[int, str]]:
            listed = real(store, names)
            with monkeypatch.context() as patch:
                patch.setattr(run_folder, "all_step_folders", real)
                before()
            return listed

        monkeypatch.setattr(run_folder, "all_step_folders", listing)
        assert look() == found()
    assert run.newest == 3


def test_a_restore_goes_on_with_a_newer_step_if_the_chosen_one_is_removed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, after = choice.newest_steps, once(run.save)

    def newest_steps(*given: Any, **named: Any) -> dict[int, str]:
        found = real(*given, **named)
        after()
        return found

    monkeypatch.setattr(choice, "newest_steps", newest_steps)
    state = state_of(0)
    assert run.checkpoints.restore(state) == 2
    assert state["w"][0] == 2.0


def test_a_run_is_verified_without_steps_that_are_removed_meanwhile(tmp_path: Path) -> None:
    for step in (1, 2):
        holdfast.save(
            state_of(step), tmp_path / f"step-{step:08d}", step=step, job=holdfast.Job(no_dist=True)
        )
    store = LocalStore(tmp_path)
    found = verify(tmp_path, progress=once(lambda: assert_removed(store, "step-00000002")))
    assert isinstance(found, VerifiedRun)
    assert found.whole
    assert [step.step for step in found.steps] == [1]


def assert_removed(store: LocalStore, step: str) -> None:
    assert remove_step(store, step)
