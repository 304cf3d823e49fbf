"""For how long requests are tried again, and which are not."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing

import pytest
import torch

import holdfast
from holdfast._core.base.deadline import Deadline
from holdfast._core.store import object_client, object_publish, object_writer
from holdfast._core.store.local import open_store
from holdfast.errors import HoldfastError, StorageError
from tests.support.object_servers import Proxy
from tests.support.waiting import wait_for_threads

pytest.importorskip("obstore")
ALONE = holdfast.Job(no_dist=True)
REFUSALS = 15
"""More than obstore would repeat a request of its own accord (10)."""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, names in (
        (object_client, "FIRST_PAUSE LONGEST_PAUSE"),
        (object_publish, "_FIRST_PAUSE _LONGEST_PAUSE"),
    ):
        for name in names.split():
            monkeypatch.setattr(module, name, 0.01)


def refuse_each(proxy: Proxy, fault: str) -> None:
    """Answer the first REFUSALS requests of each kind to each object by a fault."""
    seen, lock = Counter[tuple[str, str, str]](), threading.Lock()

    def rule(method: str, path: str, query: str, number: int) -> str:
        with lock:
            seen[method, path, query] += 1
            return fault if seen[method, path, query] <= REFUSALS else "pass"

    proxy.rule = rule


@pytest.mark.parametrize("fault", ["503", pytest.param("429", marks=pytest.mark.soak)])
def test_a_server_that_asks_for_fewer_requests_ends_no_save_or_load(
    proxy: Proxy, place: str, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Of many ranks at once, a bucket refuses requests for a while, the first of a process among them."""
    monkeypatch.setattr(object_writer, "PART", 5 << 20)  # the least that S3 takes: so there are parts
    state = {"w": torch.randn(6 << 18)}
    refuse_each(proxy, fault)
    holdfast.save(state, place, job=ALONE)
    back = {"w": torch.zeros(6 << 18)}
    holdfast.load(back, place, job=ALONE)
    assert torch.equal(back["w"], state["w"])
    assert sum(fault in line for line in proxy.requests()) >= 5 * REFUSALS


def test_pauses_grow_while_a_server_stays_busy(
    proxy: Proxy, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of obstore, which draws each by chance."""
    for name, seconds in (("FIRST_PAUSE", 0.002), ("LONGEST_PAUSE", 0.5), ("PATIENCE", 1.5)):
        monkeypatch.setattr(object_client, name, seconds)
    open_store(place).list()
    proxy.requests()
    proxy.rule = lambda *_: "503"
    with pytest.raises(StorageError, match="SlowDown"):
        open_store(place).list()
    assert len(proxy.requests()) < 25  # about 10; 80 if they did not grow


def test_parts_of_a_save_in_the_background_are_tried_again(proxy: Proxy, place: str) -> None:
    """Their process only writes parts; the pauses there are those of a user."""
    state = {"w": torch.randn(5 << 20)}  # 20 MiB: two parts
    refused = Counter[str]()

    def rule(method: str, path: str, query: str, number: int) -> str:
        refused["parts"] += "partNumber=1" in query
        return "503" if "partNumber=1" in query and refused["parts"] <= 3 else "pass"

    proxy.rule = rule
    holdfast.async_save(state, place, job=ALONE).committed(120)
    assert refused["parts"] == 4
    back = {"w": torch.zeros(5 << 20)}
    holdfast.load(back, place, job=ALONE)
    assert torch.equal(back["w"], state["w"])


@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_a_body_that_came_too_slowly_is_sent_again(proxy: Proxy, place: str, method: str) -> None:
    """S3 says it by a status of 400, which the library does not repeat."""
    seen = set[str]()

    def rule(asking: str, path: str, query: str, number: int) -> str:
        if asking != method or path in seen:
            return "pass"
        seen.add(path)
        return "slow"

    proxy.rule = rule
    holdfast.save({"w": torch.ones(3)}, place, job=ALONE)
    back = {"w": torch.zeros(3)}
    holdfast.load(back, place, job=ALONE)
    assert torch.equal(back["w"], torch.ones(3))
    assert len(seen) >= 2


@pytest.mark.parametrize("fault", ["slow", "short", "denied"])
def test_an_upload_that_did_not_begin_is_begun_again(
    proxy: Proxy, place: str, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The library does not repeat these. The last one: its credentials were being renewed."""
    monkeypatch.setattr(object_writer, "PART", 5 << 20)
    store, data, refused = open_store(place), bytes(6 << 20), list[str]()
    store.list()

    def rule(method: str, path: str, query: str, number: int) -> str:
        if not query.startswith("uploads") or refused:
            return "pass"
        refused.append(query)
        monkeypatch.setenv("AWS_SESSION_TOKEN", fault)
        return fault

    proxy.rule = rule
    writer = store.create("data", len(data))
    writer.write_at(0, [data])
    writer.finish()
    assert refused
    with closing(store.open("data")) as reader:
        assert reader.read(0, len(data)) == data


def test_an_upload_that_is_given_up_is_not_looked_at(
    proxy: Proxy, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_writer, "PART", 5 << 20)
    writer = open_store(place).create("data", 6 << 20)
    writer.write_at(0, [bytes(6 << 20)])
    writer.discard()
    assert proxy.counts()["HEAD"] == 0


def test_versions_of_objects_are_noted_by_several_threads(proxy: Proxy, place: str) -> None:
    client, errors = object_client.client_of("s3", "bucket"), []

    def note(thread: int) -> None:
        try:
            for number in range(20_000):
                client.note_version(f"{thread}/{number}", bytes(16), {"e_tag": "x"})
        except Exception as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=note, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert errors == []


def test_a_server_that_has_answered_is_waited_for(proxy: Proxy, place: str) -> None:
    open_store(place).list()
    refuse_each(proxy, "drop")
    assert open_store(place).list() == []


def test_data_is_sent_again_by_a_process_that_has_had_no_answer(
    proxy: Proxy, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer process of a save in the background, while the server restarts."""
    monkeypatch.setattr(object_client, "FIRST_ANSWER", 0.0)
    refuse_each(proxy, "drop")
    writer = open_store(place).create("data", 1)
    writer.write_at(0, [b"1"])
    writer.finish()
    assert len(proxy.requests()) == REFUSALS + 1


def test_a_server_that_never_answered_is_soon_given_up(
    proxy: Proxy, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong address."""
    monkeypatch.setattr(object_client, "FIRST_ANSWER", 1.0)
    monkeypatch.setattr(object_client, "LONGEST_PAUSE", 15.0)  # the pauses of a user, but for the first one
    proxy.rule = lambda *_: "drop"
    begun = time.monotonic()
    with pytest.raises(StorageError, match="the connection broke off"):
        open_store(place).list()
    assert 1.0 <= time.monotonic() - begun < object_client.PATIENCE / 3
    assert len(proxy.requests()) > 5


def test_a_first_request_that_hangs_is_made_again(
    proxy: Proxy, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One connection that a load balancer has lost, and that takes longer than a wrong address may."""
    monkeypatch.setattr(object_client, "READ", 0.5)
    monkeypatch.setattr(object_client, "FIRST_ANSWER", 0.4)
    proxy.rule = lambda method, path, query, number: "hang" if number < 2 else "pass"
    assert open_store(place).list() == []


@pytest.mark.parametrize("doing", ["Deleting", "Publishing", "Writing", "Opening", "Looking at"])
def test_a_request_that_the_server_does_not_know_is_not_repeated(
    proxy: Proxy, place: str, doing: str
) -> None:
    """As the deletion of several objects is unknown to some; 501 is the status of a server's fault otherwise."""
    store = open_store(place)
    store.publish("before", b"1" * 64, None)
    proxy.requests()
    proxy.rule = lambda *_: "unknown"

    def write() -> None:
        writer = store.create("data")
        writer.write_at(0, [b"1"])
        writer.finish()

    acts: dict[str, Callable[[], object]] = {
        "Deleting": lambda: store.delete("before"),
        "Publishing": lambda: store.publish("index", b"2" * 64, None),
        "Writing": write,
        "Opening": lambda: store.open("before"),
        "Looking at": lambda: store.stat("before"),
    }
    with pytest.raises(StorageError, match=f"{doing} .*does not know such requests") as told:
        acts[doing]()
    assert ("conditional writes" in told.value.hint) == (doing == "Publishing")
    assert len(proxy.requests()) == 1


def test_a_request_that_nobody_waits_for_is_not_repeated(proxy: Proxy, place: str) -> None:
    store = open_store(place)
    store.list()
    proxy.requests()
    proxy.rule = lambda *_: "503"
    before = threading.enumerate()
    with pytest.raises(StorageError):
        store.bounded(Deadline(0.5)).stat("index")
    wait_for_threads(before)  # far sooner than PATIENCE
    assert proxy.requests()


def test_a_server_that_stays_busy_is_given_up_in_time(
    proxy: Proxy, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_client, "PATIENCE", 1.0)
    proxy.rule = lambda *_: "503"
    begun = time.monotonic()
    with pytest.raises(StorageError, match=r"asks to be asked less often \(SlowDown\), and went on for"):
        open_store(place).list()
    assert time.monotonic() - begun >= 1.0
    assert len(proxy.requests()) > 12


@pytest.mark.parametrize(
    ("method", "doing"), [("GET", "Listing"), ("PUT", "Publishing"), ("POST", "Writing")]
)
def test_a_warning_names_a_request_that_does_not_succeed(
    proxy: Proxy,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    doing: str,
) -> None:
    monkeypatch.setattr(object_client, "SLOW", 0.3)
    monkeypatch.setattr(object_writer, "PART", 5 << 20)
    store, asked = open_store(place), threading.Event()
    store.publish("before", b"1" * 64, None)
    proxy.rule = lambda asking, path, query, number: (
        "503" if asking == method and not asked.is_set() else "pass"
    )

    def act() -> None:
        if doing == "Listing":
            store.list()
        elif doing == "Publishing":
            store.publish("index", b"2" * 64, None)
        else:
            writer = store.create("data", 6 << 20)
            writer.write_at(0, [bytes(6 << 20)])
            writer.finish()

    caplog.set_level(logging.WARNING, "holdfast")
    acting = threading.Thread(target=act)
    acting.start()
    try:
        ends = time.monotonic() + 60
        while not caplog.messages and time.monotonic() < ends:
            time.sleep(0.02)
    finally:
        monkeypatch.setattr(object_client, "SLOW", 60.0)  # those that follow may take a while on a busy host
        asked.set()
        acting.join(60)
    assert not acting.is_alive()
    (warning,) = caplog.messages
    assert warning.startswith(f"{doing} {place}")
    assert "has not succeeded for" in warning


def test_a_request_that_succeeds_at_once_is_not_warned_of(
    proxy: Proxy, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    holdfast.save({"w": torch.ones(3)}, place, job=ALONE)
    with pytest.raises(HoldfastError):
        holdfast.load({"w": torch.ones(4)}, place, job=ALONE)
    assert not caplog.messages
