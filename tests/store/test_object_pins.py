"""Readers of steps in object stores, and who removes the steps: no interleaving of their requests harms either."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast._core.io import removal
from holdfast._core.io.old_steps import remove_step
from holdfast._core.store import object_client, pins
from holdfast._core.store.base import Store
from holdfast._core.store.local import open_store
from holdfast._core.store.pins import Pin
from holdfast._tools.checkpoints.verify import Verified, verify
from holdfast.errors import Conflict, HoldfastError, NotCommitted, Replaced
from tests.support.object_servers import BUCKET, Proxy, hurry, s3_environment
from tests.support.waiting import wait_until

pytest.importorskip("obstore")
pytestmark = pytest.mark.usefixtures("deletions_are_waited_for")
ALONE = holdfast.Job(no_dist=True)
SOURCE = str(Path(holdfast.__file__).parents[1])


@pytest.fixture
def run(place: str, proxy: Proxy) -> str:
    return place


def state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((999,), float(step)), "v": torch.arange(5.0)}


def folder(step: int) -> str:
    return f"step-{step:08d}"


def save(run: str, *steps: int) -> None:
    for step in steps:
        holdfast.save(state(step), f"{run}/{folder(step)}", step=step, job=ALONE)


def objects(store: Store, below: str = "") -> list[str]:
    found = []
    for name in store.list(below):
        path = f"{below}/{name}" if below else name
        found += objects(store, path[:-1]) if name.endswith("/") else [path]
    return found


def plant(store: Store, what: dict[str, bytes]) -> None:
    for path, data in what.items():
        writer = store.create(path)
        writer.write_at(0, [data])
        writer.finish()


@pytest.fixture(scope="module")
def steps(server: int) -> dict[str, bytes]:
    """Two steps, as objects to plant: a save takes longer."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment(server).items():
            patch.setenv(name, value)
        run = f"s3://{BUCKET}/planted"
        save(run, 1, 2)
        store = open_store(run)
        return {path: store.open(path).read(0, 1 << 20) for path in objects(store)}


def read(place: str) -> str:
    """Open and read a checkpoint; say how that ended."""
    try:
        checkpoint = holdfast.open(place)
    except NotCommitted:
        return "gone"
    with checkpoint:
        value = checkpoint["w"][...]
        assert torch.equal(value, state(1)["w"])
        return "read"


# -- each step of a reader against each of a remover ------------------------------------------------------


class Turns:
    """Holds the requests of two threads, and lets them pass in a given order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._may = dict.fromkeys(("reader", "remover"), 0)
        self.made = dict.fromkeys(self._may, 0)
        self._stands = set[str]()
        self._turn = threading.Condition()
        self._threads: dict[str, threading.Thread] = {}
        self.ended: dict[str, object] = {}
        real, turns = object_client.Request, self

        class Held(real):  # type: ignore[misc, valid-type]
            def __init__(self, action: Callable[[], object]) -> None:
                turns.wait()
                super().__init__(action)

        patch.setattr(object_client, "Request", Held)

    def wait(self) -> None:
        who = threading.current_thread().name
        with self._turn:
            if who in self._may:
                self._stands.add(who)
                self._turn.notify_all()
                assert self._turn.wait_for(lambda: self.made[who] < self._may[who], 60)
                self._stands.remove(who)
                self.made[who] += 1

    def start(self, who: str, action: Callable[[], object]) -> None:
        def work() -> None:
            try:
                found: object = action()
            except BaseException as error:
                found = error
            with self._turn:
                self.ended[who] = found
                self._turn.notify_all()

        self._threads[who] = threading.Thread(target=work, name=who)
        self._threads[who].start()

    def let(self, who: str, more: int = 10**6) -> None:
        """Let a thread make so many requests more, and wait until it stands before the next one, or has
        ended."""
        with self._turn:
            self._may[who] += more
            self._turn.notify_all()
            assert self._turn.wait_for(
                lambda: who in self.ended or (who in self._stands and self.made[who] == self._may[who]), 60
            ), (who, self.made)
        if more == 10**6:
            self._threads[who].join(60)
            assert not self._threads[who].is_alive()


def interleaved(
    run: str, steps: dict[str, bytes], patch: pytest.MonkeyPatch, order: list[tuple[str, int]]
) -> tuple[object, dict[str, int]]:
    """Read step 1 and remove it, in this order of requests. Return how the read ended, and how many requests
    each made."""
    store, place = open_store(run), f"{run}/{folder(1)}"
    plant(store, steps)
    with patch.context() as patched:
        turns = Turns(patched)
        turns.start("reader", lambda: read(place))
        turns.start("remover", lambda: remove_step(store, folder(1)))
        for who, more in order:
            turns.let(who, more)
        for who in ("reader", "remover"):
            if who not in turns.ended:
                turns.let(who)
    ended = turns.ended["reader"]
    assert ended in ("read", "gone"), (order, ended)
    assert isinstance(turns.ended["remover"], bool), (order, turns.ended["remover"])
    # Whatever came first: the next time the step goes, and nothing of it stays.
    removal.finish_removals(store)
    if folder(1) + "/" in store.list():
        assert remove_step(store, folder(1)), (order, objects(store))
        removal.finish_removals(store)
    assert {path.split("/")[0] for path in objects(store)} == {folder(2)}, order
    return ended, turns.made


def test_a_reader_against_each_step_of_a_remover(
    run: str, steps: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, made = interleaved(f"{run}/0", steps, monkeypatch, [("reader", 10**6)])
    assert first == "read"
    assert made["reader"] >= 3
    assert made["remover"] >= 8
    seen = set()
    for one, other in (("reader", "remover"), ("remover", "reader")):
        for count in range(made[one] + 1):
            order = [(one, count), (other, 10**6)]
            seen.add(interleaved(f"{run}/{one}-{count}", steps, monkeypatch, order)[0])
    assert seen == {"read", "gone"}


@pytest.mark.soak
def test_a_reader_and_a_remover_that_stop_at_any_two_requests(
    run: str, steps: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in range(4):
        for other in range(9):
            reader, remover = ("reader", one), ("remover", other)
            for number, order in enumerate(([reader, remover], [remover, reader])):
                then = [(who, 10**6) for who, _ in order]
                interleaved(f"{run}/{one}-{other}-{number}", steps, monkeypatch, [*order, *then])


@pytest.mark.soak
def test_a_reader_against_a_remover_in_any_order(
    run: str, steps: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(500):
        chance = random.Random(seed)
        order = [(chance.choice(("reader", "remover")), 1) for _ in range(24)]
        interleaved(f"{run}/{seed}", steps, monkeypatch, order)


# -- what a pin does --------------------------------------------------------------------------------------


def test_a_step_that_is_being_read_stays_until_then(proxy: Proxy, run: str) -> None:
    with holdfast.Checkpoints(run, keep=1, asynchronous=False, job=ALONE) as checkpoints:
        checkpoints.save(1, state(1))
        with holdfast.open(f"{run}/{folder(1)}") as reader:
            checkpoints.save(2, state(2))
            assert checkpoints.steps() == [1, 2]
            with pytest.raises(Conflict, match="is being read"):
                checkpoints.delete(1)
            assert torch.equal(reader["w"][...], state(1)["w"])
        checkpoints.save(3, state(3))
        assert checkpoints.steps() == [3]
    assert {path.split("/")[0] for path in objects(open_store(run))} == {folder(3)}


def removed_while_it_is_opened(run: str, steps: dict[str, bytes], patch: pytest.MonkeyPatch) -> Pin:
    """Remove step 1, whose reader comes when its index has just been deleted; return its pin."""
    plant(open_store(run), steps)
    store, real, pins = open_store(run), removal.has_live_pin, list[Pin]()

    def looks(step: Store, names: list[str]) -> bool:
        pins.append(Pin(step))
        return real(step)

    with patch.context() as patched:
        patched.setattr(removal, "has_live_pin", looks)
        assert not remove_step(store, folder(1))
    assert holdfast.latest(run) == f"{run}/{folder(2)}"
    with pytest.raises(NotCommitted):
        holdfast.open(f"{run}/{folder(1)}")
    assert any("/data/" in path for path in objects(store) if path.startswith(folder(1)))
    return pins[0]


def test_data_that_is_being_read_goes_with_the_next_save_also_of_a_later_process(
    run: str, steps: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    pin, store = removed_while_it_is_opened(run, steps, monkeypatch), open_store(run)
    with holdfast.Checkpoints(run, keep=2, asynchronous=False, job=ALONE) as checkpoints:
        checkpoints.save(3, state(3))
        assert any("/data/" in path for path in objects(store) if path.startswith(folder(1)))
        pin.close()
        checkpoints.save(4, state(4))
    assert {path.split("/")[0] for path in objects(store)} == {folder(3), folder(4)}


def test_a_step_that_is_saved_again_while_its_old_data_waits_keeps_its_own(
    run: str, steps: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = removed_while_it_is_opened(run, steps, monkeypatch)
    save(run, 1)
    pin.close()
    store = open_store(run)
    [ended] = removal.finish_removals(store)
    assert ended.folder == folder(1)
    found = verify(f"{run}/{folder(1)}")
    assert isinstance(found, Verified)
    assert found.whole
    assert len(store.list(f"{folder(1)}/data")) == 1


def test_a_pin_of_a_process_that_was_killed_expires_by_the_clock_of_the_storage(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 1, 2)
    store = open_store(run)
    program = (
        "import sys, time\n"
        "from holdfast._core.store.local import open_store\n"
        "from holdfast._core.store.pins import Pin\n"
        "pin = Pin(open_store(sys.argv[1]))\n"
        "print(pin.holds, flush=True)\n"
        "time.sleep(600)\n"
    )
    place, env = f"{run}/{folder(1)}", {**os.environ, "PYTHONPATH": SOURCE}
    with subprocess.Popen(
        [sys.executable, "-c", program, place], stdout=subprocess.PIPE, text=True, env=env
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "True\n"
        reader.kill()
    # No clock of this host decides: one that is a year ahead changes nothing.
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert not remove_step(store, folder(1))
    monkeypatch.setattr(pins, "EXPIRES", 1.0)
    wait_until(lambda: remove_step(store, folder(1)), 30.0)
    assert {path.split("/")[0] for path in objects(store)} == {folder(2)}


def test_a_long_read_renews_its_pin(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "RENEWED", 0.3)
    monkeypatch.setattr(pins, "EXPIRES", 3.0)
    save(run, 1)
    store = open_store(run)
    with closing(Pin(store.child(folder(1)))):
        first = store.list(f"{folder(1)}/.holdfast-pins")
        time.sleep(4.5)
        assert store.list(f"{folder(1)}/.holdfast-pins") != first
        assert len(store.list(f"{folder(1)}/.holdfast-pins")) in (1, 2)  # while it is being renewed
        assert not remove_step(store, folder(1))
    assert remove_step(store, folder(1))


def test_a_pin_that_is_renewed_while_a_remover_looks_counts(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 1)
    store = open_store(run)
    step, real = store.child(folder(1)), pins.look_at_files

    def look(*args: Any) -> Any:
        [held] = (
            one for one in pins._live if one._store.url == step.url
        )  # those of other tests may be there
        held._renew()
        return real(*args)

    monkeypatch.setattr(pins, "look_at_files", look)
    with closing(Pin(step)):
        assert not remove_step(store, folder(1))
    assert remove_step(store, folder(1))


def test_a_process_that_ends_leaves_no_pin(run: str) -> None:
    save(run, 1)
    code = "import sys, holdfast\nopened = holdfast.open(sys.argv[1])\nprint(len(opened))"
    env = {**os.environ, "PYTHONPATH": SOURCE}
    done = subprocess.run(
        [sys.executable, "-c", code, f"{run}/{folder(1)}"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "2\n"
    assert not any("pins" in path for path in objects(open_store(run)))


def test_a_reader_that_may_not_write_gets_an_error_and_never_other_bytes(proxy: Proxy, run: str) -> None:
    save(run, 1, 2)
    place = f"{run}/{folder(1)}"
    proxy.rule = lambda method, path, query, number: "denied" if method in ("PUT", "POST") else "pass"
    back = {name: torch.zeros_like(tensor) for name, tensor in state(1).items()}
    holdfast.load(back, place, job=ALONE)
    assert torch.equal(back["w"], state(1)["w"])
    with holdfast.open(place) as reader:
        proxy.rule = lambda *_: "pass"
        assert remove_step(open_store(run), folder(1))
        save(run, 1)  # again, with other objects
        with pytest.raises(Replaced, match="or, as an object store, may not be written to"):
            reader["w"][...]


def test_only_steps_are_pinned(proxy: Proxy, run: str) -> None:
    holdfast.save(state(1), f"{run}/model", job=ALONE)
    proxy.requests()
    back = {name: torch.zeros_like(tensor) for name, tensor in state(1).items()}
    holdfast.load(back, f"{run}/model", job=ALONE)
    assert not any(line.startswith(("PUT", "POST")) for line in proxy.requests())


def test_a_step_that_is_not_there_is_explained_as_before(run: str) -> None:
    save(run, 1)
    with pytest.raises(NotCommitted, match=r"it does not exist; the newest committed steps in .* are 1"):
        holdfast.load(state(1), f"{run}/{folder(7)}", job=ALONE)
    assert [path.split("/")[0] for path in objects(open_store(run))] == [folder(1)] * 2


# -- faults in each request of retention ------------------------------------------------------------------

FAULTS = ("503", "lost", "late:0.3", "hang", "drop", "expired", "500", "429", "cut", "short")
QUICK = ("503", "lost", "late:0.3")


@pytest.mark.parametrize(
    ("read_meanwhile", "fault"),
    [
        pytest.param(read, fault, marks=[pytest.mark.soak] * (read or fault not in QUICK))
        for read in (False, True)
        for fault in FAULTS
    ],
)
def test_a_fault_in_each_request_of_a_removal(
    proxy: Proxy,
    run: str,
    steps: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    read_meanwhile: bool,
) -> None:
    """No step that is committed lacks data, a pinned one never loses any, and the next time all of it goes."""
    hurry(monkeypatch, fault)
    count = 0
    for number in range(-1, 99):
        if number >= count:
            break
        at = f"{run}/{number}"
        pin = removed_while_it_is_opened(at, steps, monkeypatch) if read_meanwhile else None
        if pin is None:
            plant(open_store(at), steps)
        store = open_store(at)
        data = {path for path in objects(store) if path.startswith(f"{folder(1)}/data/")}
        proxy.requests()
        proxy.rule = lambda method, path, query, nth, number=number: fault if nth == number else "pass"
        with suppress(HoldfastError):
            if read_meanwhile:
                removal.finish_removals(store)
            else:
                remove_step(store, folder(1))
        if number < 0:  # there is no such request
            count = len(proxy.requests())
        proxy.rule = lambda *_: "pass"
        if fault.startswith("late"):
            time.sleep(0.4)
        for step in holdfast.Checkpoints(at, job=ALONE).steps():
            checked = verify(f"{at}/{folder(step)}")
            assert isinstance(checked, Verified)
            assert checked.whole, (number, fault)
        if pin is not None:
            assert data <= set(objects(store)), (number, fault)
            pin.close()
        removal.finish_removals(store)
        if store.child(folder(1)).list():
            remove_step(store, folder(1))
            removal.finish_removals(store)
        assert {path.split("/")[0] for path in objects(store)} == {folder(2)}, (number, fault)
    assert count >= 7


def test_a_remover_that_is_killed_at_each_request_leaves_nothing_for_good(
    proxy: Proxy, run: str, steps: dict[str, bytes]
) -> None:
    code = """if True:
        import sys
        from holdfast._core.io.old_steps import remove_step
        from holdfast._core.store.local import open_store
        remove_step(open_store(sys.argv[1]), "step-00000001")
    """
    env = {**os.environ, "PYTHONPATH": SOURCE}
    for number in (3, 4, 6):  # the note, the index and the data
        at = f"{run}/{number}"
        plant(open_store(at), steps)
        proxy.requests()
        reached = threading.Event()

        def rule(
            method: str,
            path: str,
            query: str,
            nth: int,
            number: int = number,
            reached: threading.Event = reached,
        ) -> str:
            if nth == number:
                reached.set()
                return "lost"
            return "pass" if nth < number else "drop"

        proxy.rule = rule
        with subprocess.Popen([sys.executable, "-c", code, at], env=env) as remover:
            assert reached.wait(60)
            remover.send_signal(signal.SIGKILL)
        proxy.rule = lambda *_: "pass"
        time.sleep(0.1)
        store = open_store(at)
        removal.finish_removals(store)
        if store.child(folder(1)).list():
            found = verify(f"{at}/{folder(1)}")
            assert isinstance(found, Verified)
            assert found.whole
            assert remove_step(store, folder(1))
        removal.finish_removals(store)
        assert {path.split("/")[0] for path in objects(store)} == {folder(2)}, number
