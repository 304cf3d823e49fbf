"""Faults of HTTP in each request of a save, and two jobs that race while replies are lost."""

from __future__ import annotations

import random
import threading

import pytest
import torch

import holdfast
from holdfast._core.store import object_writer
from holdfast._core.store.base import Unsettled
from holdfast._core.store.local import open_store
from holdfast._tools.checkpoints.verify import Verified, verify
from holdfast.errors import CommitUnconfirmed, Conflict, HoldfastError
from tests.support.object_servers import BUCKET, Proxy, hurry, uploads

pytest.importorskip("obstore")
ALONE = holdfast.Job(no_dist=True)
SLOW = [pytest.param(fault, marks=pytest.mark.soak) for fault in ("500", "429", "cut", "late:0.2")]
FAULTS = ["503", "409", "expired", "200err", "hang", "drop", "lost", "short", *SLOW]


def holds(place: str, state: dict[str, torch.Tensor], proxy: Proxy) -> bool:
    """Return whether a place holds this state; if not, it holds nothing that is committed."""
    proxy.rule = lambda *_: "pass"
    if holdfast.latest(place.rpartition("/")[0]) != place:
        assert "index.safetensors" not in open_store(place).list()
        return False
    found = verify(place)
    assert isinstance(found, Verified)
    assert found.whole
    back = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    holdfast.load(back, place, job=ALONE)
    return all(torch.equal(back[name], state[name]) for name in state)


def save_with(proxy: Proxy, state: dict[str, torch.Tensor], place: str, number: int, fault: str) -> bool:
    """Save with a fault in one request. Return whether there was such a request."""
    proxy.requests()
    proxy.rule = lambda method, path, query, at: fault if at == number else "pass"
    committed, doubtful = True, False
    try:
        holdfast.save(state, place, job=holdfast.Job(no_dist=True, timeout=30.0))
    except CommitUnconfirmed:
        doubtful = True
    except HoldfastError:
        committed = False
    count = len(proxy.requests())
    there = holds(place, state, proxy)
    assert doubtful or there == committed, (number, fault)
    return number < count


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_each_request_of_a_save(proxy: Proxy, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    hurry(monkeypatch, fault)
    state = {"w": torch.randn(999)}
    holdfast.save(state, f"s3://{BUCKET}/{fault[:4]}/step-1", job=ALONE)  # tries the bucket
    number = 0
    while save_with(proxy, state, f"s3://{BUCKET}/{fault[:4]}/step-{number + 2}", number, fault):
        number += 1
    assert number == 4, "the index, the file's own name, the data, the index"


@pytest.mark.parametrize(
    "fault",
    [
        "lost",
        *(
            pytest.param(fault, marks=pytest.mark.soak)
            for fault in ("503", "drop", "200err", "hang", "expired")
        ),
    ],
)
def test_a_fault_in_each_request_of_an_upload_in_parts(
    proxy: Proxy, server: int, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(object_writer, "PART", 5 << 20)  # the least that S3 takes
    hurry(monkeypatch, fault)
    state = {"w": torch.randn(11 << 18)}  # 11 MiB: three parts
    run = f"s3://{BUCKET}/parts-{fault}"
    holdfast.save(state, f"{run}/step-1", job=ALONE)
    before = uploads(server)
    # The requests before: of the index, and of the file's own name. Then it begins, has three parts, and ends.
    for number in range(2, 7):
        assert save_with(proxy, state, f"{run}/step-{number}", number, fault)
    # Of an upload whose number is never heard, only the server knows.
    assert uploads(server) - before <= (1 if fault in ("lost", "hang") else 0)


def test_a_save_that_fails_leaves_no_upload(
    proxy: Proxy, server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_writer, "PART", 5 << 20)
    before = uploads(server)
    proxy.rule = lambda method, path, query, number: "denied" if "partNumber=3" in query else "pass"
    with pytest.raises(HoldfastError, match=r"may not write objects|another part was refused"):
        holdfast.save({"w": torch.randn(5 << 20)}, f"s3://{BUCKET}/left", job=ALONE)
    proxy.rule = lambda *_: "pass"
    assert uploads(server) == before
    assert open_store(f"s3://{BUCKET}/left").list() == []


def race(proxy: Proxy, place: str, seed: int) -> None:
    """Two jobs publish at once, and a part of the replies is lost: one wins, and its version stands."""
    chance = random.Random(seed)
    proxy.rule = lambda method, path, query, number: (
        chance.choice(("pass", "lost", "lost", "drop", "409", "pass")) if method == "PUT" else "pass"
    )
    versions, outcomes = [bytes([65 + one]) * 64 for one in range(2)], [object(), object()]
    gate = threading.Barrier(2)

    def publish(one: int) -> None:
        gate.wait(30)
        try:
            outcomes[one] = open_store(place).publish("index", versions[one], None)
        except (Conflict, Unsettled) as error:
            outcomes[one] = error

    threads = [threading.Thread(target=publish, args=(one,)) for one in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    proxy.rule = lambda *_: "pass"
    won = [one for one in range(2) if outcomes[one] is None]
    assert len(won) == 1, outcomes
    assert isinstance(outcomes[1 - won[0]], Conflict), outcomes
    reader = open_store(place).open("index")
    assert reader.read(0, 64) == versions[won[0]]


def test_of_two_jobs_one_wins_though_replies_are_lost(proxy: Proxy) -> None:
    open_store(f"s3://{BUCKET}/race").publish("first", b"1" * 64, None)
    for seed in range(100):
        race(proxy, f"s3://{BUCKET}/race/{seed}", seed)


@pytest.mark.soak
def test_of_two_jobs_one_wins_a_thousand_times(proxy: Proxy) -> None:
    for seed in range(1000):
        race(proxy, f"s3://{BUCKET}/long-race/{seed}", seed)


def test_a_reader_of_a_large_object_never_sees_two_versions(proxy: Proxy) -> None:
    store = open_store(f"s3://{BUCKET}/reader")
    first, second = b"1" * 200_000, b"2" * 200_000
    store.publish("index", first, None)
    reader = store.open("index")
    store.publish("index", second, first[-16:])
    with pytest.raises(HoldfastError, match="was replaced since it was opened"):
        reader.read(100_000, 100_000)
