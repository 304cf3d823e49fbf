"""`keep=` in object stores: what it costs a save, and what it does where deletions are refused."""

from __future__ import annotations

import logging
import re
import threading
import time
from typing import Any

import msgspec
import pytest
import torch

import holdfast
from holdfast._core.format.names import OWNER, REMOVED
from holdfast._core.io.refusals import MOST_NOTES, MOST_REFUSED
from holdfast._core.io.removal import Note
from holdfast._core.store.base import Store
from holdfast._core.store.local import open_store
from tests.support.object_servers import Asked, Proxy, forward
from tests.support.wide import wide

pytest.importorskip("obstore")
pytestmark = pytest.mark.usefixtures("deletions_are_waited_for")
ALONE = holdfast.Job(no_dist=True)
SAVE = 11 + 1
"""Requests of a save that removes nothing."""
REMOVES = 12
"""More that removes one step."""


def state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((99,), float(step))}


def folder(step: int) -> str:
    return f"step-{step:08d}"


def run_of(place: str, **rules: Any) -> holdfast.Checkpoints:
    return holdfast.Checkpoints(place, asynchronous=False, job=ALONE, **rules)


def put(store: Store, path: str, data: bytes = b"x") -> None:
    writer = store.create(path)
    writer.write_at(0, [data])
    writer.finish()


def objects(store: Store, of: str = "") -> list[str]:
    found = []
    for name in store.list(of):
        path = f"{of}/{name}".lstrip("/")
        found += objects(store, path[:-1]) if name.endswith("/") else [path]
    return found


def refuse(proxy: Proxy, keys: str = "") -> None:
    """Answer deletions as S3 does of who has no such right: with status 200, and an error for the key."""

    def answered(asked: Asked) -> Any:
        found = re.search(rb"<Key>(.*?)</Key>", asked.body)
        if asked.method == "POST" and found and re.search(keys, key := found[1].decode()):
            code = f"<Error><Key>{key}</Key><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            text = f'<?xml version="1.0" encoding="UTF-8"?><DeleteResult>{code}</DeleteResult>'
            return 200, [("Content-Type", "application/xml")], text.encode()
        return forward(asked.port, asked.method, asked.path, asked.headers, asked.body)

    proxy.change = answered


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# -- deletions are refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("answer", wide(["200 with an error for the key", "403"], suite=["403"]))
def test_a_run_that_may_delete_nothing_says_so_once_and_its_saves_stay_as_cheap(
    proxy: Proxy, place: str, caplog: pytest.LogCaptureFixture, answer: str
) -> None:
    run, store = run_of(place, keep=1), open_store(place)
    run.save(1, state(1))
    if answer == "403":
        proxy.rule = lambda method, path, query, number: "denied" if method == "POST" else "pass"
    else:
        refuse(proxy)
    run.save(2, state(2))
    for step in range(3, 9):
        proxy.requests()
        run.save(step, state(step))
        own = place.rpartition("/")[2]
        seen = [line for line in proxy.requests() if own in line or line.startswith("LIST")]
        assert len(seen) <= SAVE + 1, seen
    assert run.steps() == [*range(1, 9)]
    [told] = warnings(caplog)
    assert told.startswith(f"Old steps of {place} are not removed, and take up space: Deleting {place}/step-")
    assert "Give this job the right to delete there (s3:DeleteObject; " in told
    assert len(store.list(REMOVED)) == 1
    proxy.rule = lambda *_: "pass"
    refuse(proxy, "/step-")  # the file of the run's owner goes with its end
    run.close()
    for step in range(9, 15):  # starts anew each time, so that each tries again
        with run_of(place, keep=1) as run:
            run.save(step, state(step))
    noted = [name.partition(".")[0] for name in store.list(REMOVED)]
    assert len(noted) > MOST_REFUSED
    assert len(noted) == len(set(noted)), "whoever tries the same again makes no second note"
    proxy.change = None
    with run_of(place, keep=1) as run:
        run.save(15, state(15))
        assert run.steps() == [15]
    assert {path.split("/")[0] for path in objects(store)} == {folder(15)}


def test_removals_go_on_in_a_process_that_may_delete_again(proxy: Proxy, place: str) -> None:
    refuse(proxy)
    with run_of(place, keep=2) as run:
        for step in range(1, 7):
            run.save(step, state(step))
        proxy.change = None
        run.save(7, state(7))
        assert run.steps() == [6, 7]
    assert {path.split("/")[0] for path in objects(open_store(place))} == {folder(6), folder(7)}


@pytest.mark.parametrize("what", wide(["", "index", "data"], suite=["data"]))
def test_a_step_that_somebody_holds_keeps_no_other_one(
    proxy: Proxy, place: str, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """As by a hold of Google's or Azure's."""
    refuse(proxy, f"{folder(1)}/{what}|{folder(3)}/{what}")
    run, store = run_of(place, keep=1), open_store(place)
    for step in range(1, 12):
        proxy.requests()
        run.save(step, state(step))
        seen = proxy.requests()
        assert len(seen) <= SAVE + MOST_REFUSED * REMOVES, seen
    assert run.steps() == ([11] if what == "data" else [1, 3, 11])
    held = {path.split("/")[0] for path in objects(store)} - {OWNER, REMOVED}
    assert held == {folder(1), folder(3), folder(11)}
    assert len(store.list(REMOVED)) == 2
    assert len(warnings(caplog)) == 1
    proxy.change = None
    for step in (12, 13):
        run.save(step, state(step))
    run.close()
    assert {path.split("/")[0] for path in objects(store)} == {folder(13)}


def test_a_save_goes_on_with_some_of_many_notes(proxy: Proxy, place: str) -> None:
    """As removals have left them that were refused, one at each save, when each try wrote one."""
    store, many = open_store(place), 3 * MOST_NOTES
    run = run_of(place, keep=1)
    run.save(100, state(100))
    for step in range(1, many + 1):
        note = Note(folder(step), [f"data/{step:012x}-r00000.safetensors"])
        put(store, f"{folder(step)}/{note.files[0]}")
        put(store, f"{REMOVED}/{folder(step)}.{step:016x}", msgspec.json.encode(note))
    refuse(proxy, folder(2))  # those that come after it in the same turn are not kept
    left = []
    for step in range(101, 106):
        proxy.requests()
        run.save(step, state(step))
        seen = proxy.requests()
        read = [line for line in seen if line.startswith("GET") and f"/{REMOVED}/" in line]
        assert len(read) <= MOST_NOTES, read
        left.append(len(store.list(REMOVED)))
    run.close()
    assert left[0] == many - 1
    assert left[-1] == 1
    assert {path.split("/")[0] for path in objects(store)} == {REMOVED, folder(2), folder(105)}


# -- what steps that stay cost ---------------------------------------------------------------------------


def test_steps_that_stay_by_their_number_cost_a_save_nothing(proxy: Proxy, place: str) -> None:
    store = open_store(place)
    for step in range(10, 1001, 10):
        put(store, f"{folder(step)}/index.safetensors")
    with run_of(place, keep=2, keep_every=10) as run:
        for step in range(1001, 1006):
            run.save(step, state(step))
            seen = proxy.requests()
            removes = step >= 1003
            looks = [
                line for line in seen if line.startswith("HEAD") and line.endswith("/index.safetensors pass")
            ]
            if step > 1001:  # the first one tries the bucket, and takes the run
                assert len(seen) <= SAVE + removes * REMOVES, seen
                assert len(looks) <= 1 + removes * 3, looks
        assert run.steps() == [*range(10, 1001, 10), 1004, 1005]


def test_the_best_step_is_sought_with_a_bounded_number_of_requests_at_once(proxy: Proxy, place: str) -> None:
    store = open_store(place)
    for step in range(1, 101):
        put(store, f"{folder(step)}/index.safetensors")
    lock, now, most = threading.Lock(), [0], [0]

    def slowly(asked: Asked) -> Any:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        if asked.method == "HEAD":
            time.sleep(0.3)
        with lock:
            now[0] -= 1
        return forward(asked.port, asked.method, asked.path, asked.headers, asked.body)

    proxy.change = slowly
    proxy.requests()
    with run_of(place, keep=1, best="loss", best_mode="min") as run:
        run.save(1002, state(1002), metrics={"loss": 1.0})
    assert 16 < most[0] <= 32
    assert sum(line.startswith("HEAD") for line in proxy.requests()) >= 100
