"""A server of objects that does not respond, refuses, or wants new credentials in the middle of a job: what goes on,
what is said, and for how long a call waits."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast._core.base.deadline import Deadline
from holdfast._core.io.index_file import open_index
from holdfast._core.protocol.call import begin_call
from holdfast._core.roster.memory import MemoryRoster
from holdfast._core.run import local_tier, owner
from holdfast._core.saving import commit, job
from holdfast._core.saving.request import SaveRequest
from holdfast._core.state.flatten import flatten
from holdfast._core.store import object_client, pins
from holdfast._core.store.local import open_store
from holdfast._tools.checkpoints.verify import Verified, verify
from holdfast.errors import CommitUnconfirmed, HoldfastError, StorageError
from tests.support.object_servers import Asked, Proxy, forward, hurry
from tests.support.threads import on_ranks
from tests.support.waiting import wait_until

pytest.importorskip("obstore")
ALONE = holdfast.Job(no_dist=True)
SOON = 20.0
"""Seconds: far below those for which requests are tried again."""


def state(step: int = 0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((999,), float(step))}


def test_an_object_that_may_not_be_read_is_not_called_damaged(proxy: Proxy, place: str) -> None:
    """Whether it is can't be told; one that is gone is a finding."""
    holdfast.save(state(), f"{place}/step-00000001", step=1, job=ALONE)
    for name in ("index.safetensors", "-r00000.safetensors"):
        proxy.rule = lambda method, path, *_, name=name: (
            "denied" if method == "GET" and path.endswith(name) else "pass"
        )
        for asked in (place, f"{place}/step-00000001"):
            with pytest.raises(StorageError, match="may not read"):
                verify(asked)
    proxy.rule = lambda *_: "pass"
    store = open_store(f"{place}/step-00000001")
    store.delete(f"data/{store.list('data')[0]}")
    found = verify(f"{place}/step-00000001")
    assert isinstance(found, Verified)
    assert found.damage[0].problem == "the file is missing"


# -- credentials ----------------------------------------------------------------------------------------


def test_credentials_that_are_renewed_in_the_environment_reach_a_job_that_is_running(
    proxy: Proxy, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = set()

    def only_valid(asked: Asked) -> Any:
        signed = {name.lower(): value for name, value in asked.headers.items()}["authorization"]
        (key,) = re.findall("Credential=([^/]+)/", signed)
        keys.add(key)
        if key != os.environ["AWS_ACCESS_KEY_ID"]:
            return 400, [], b"<Error><Code>ExpiredToken</Code><Message>m</Message></Error>"
        return forward(asked.port, asked.method, asked.path, asked.headers, asked.body)

    proxy.change = only_valid
    back = state()
    with holdfast.Checkpoints(place, keep=2, job=ALONE) as checkpoints:
        checkpoints.save(1, state(1)).committed()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "renewed")
        checkpoints.save(2, state(2)).committed()
        assert checkpoints.latest() == 2
        assert checkpoints.restore(back) == 2
    assert torch.equal(back["w"], state(2)["w"])
    assert keys == {"key", "renewed"}


def test_a_reader_that_was_opened_before_goes_on_with_them(
    proxy: Proxy, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(place)
    writer = store.create("data")
    writer.write_at(0, [bytes(1 << 20)])
    writer.finish()
    reader = store.open("data")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "renewed")
    seen: list[str] = []

    def note(asked: Asked) -> Any:
        if asked.path.endswith("/data"):
            seen.append(asked.headers["authorization"])
        return forward(asked.port, asked.method, asked.path, asked.headers, asked.body)

    proxy.change = note
    assert reader.read(500_000, 500_000) == bytes(500_000)
    assert [("Credential=renewed/" in one) for one in seen] == [True]


@pytest.mark.parametrize("publishes", [False, True], ids=["a listing", "a publishing"])
def test_a_request_between_two_variables_of_new_credentials_is_made_again(
    proxy: Proxy, place: str, monkeypatch: pytest.MonkeyPatch, publishes: bool
) -> None:
    store = open_store(place)
    store.publish("before", b"1" * 64, None)
    asked = []

    def change(one: Asked) -> Any:
        if place.rpartition("/")[2] not in one.path:  # a renewal of another test's
            return forward(one.port, one.method, one.path, one.headers, one.body)
        asked.append(one.method)
        if len(asked) == 1:  # the key is set, and its secret comes while the request is on its way
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "new")
            return 403, [], b"<Error><Code>SignatureDoesNotMatch</Code><Message>m</Message></Error>"
        return forward(one.port, one.method, one.path, one.headers, one.body)

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "renewed")
    proxy.change = change
    if publishes:
        store.publish("index", b"2" * 64, None)
    else:
        assert store.list() == ["before"]
    assert len(asked) == 2


def test_credentials_that_come_while_a_connection_is_made_are_used(
    proxy: Proxy, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, make = open_store(place), object_client._obstore
    store.publish("before", b"1" * 64, None)

    def renewed_after(scheme: str, bucket: str, retries: int) -> object:
        made = make(scheme, bucket, retries)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "new")  # the last of them
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "renewed")
        return made

    def only_renewed(asked: Asked) -> Any:
        signed = {name.lower(): value for name, value in asked.headers.items()}["authorization"]
        if place.rpartition("/")[2] in asked.path and "Credential=renewed/" not in signed:
            return 403, [], b"<Error><Code>InvalidAccessKeyId</Code><Message>m</Message></Error>"
        return forward(asked.port, asked.method, asked.path, asked.headers, asked.body)

    monkeypatch.setattr(object_client, "_obstore", renewed_after)
    proxy.change = only_renewed
    monkeypatch.setenv("AWS_SESSION_TOKEN", "renewed")
    assert store.stat("before") is not None


# -- no response ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["hang", pytest.param("503", marks=pytest.mark.soak)])
def test_a_run_without_a_save_under_way_is_closed_soon(
    proxy: Proxy, place: str, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(owner, "GIVING_UP", 2.0)
    checkpoints = holdfast.Checkpoints(place, job=ALONE)
    checkpoints.save(1, state()).committed()
    proxy.rule = lambda *_: fault
    begun = time.monotonic()
    checkpoints.close(timeout=5)
    assert time.monotonic() - begun < SOON


def test_a_bucket_that_another_thread_tries_is_not_waited_for(proxy: Proxy, place: str) -> None:
    """The first publishing of a process tries its bucket."""
    store, ended = open_store(place), threading.Event()
    store.list()
    proxy.rule = lambda *_: "503" if not ended.is_set() else "pass"
    other = threading.Thread(target=store.publish, args=("other", b"1" * 64, None))
    other.start()
    wait_until(lambda: bool(proxy.requests()))
    begun = time.monotonic()
    try:
        with pytest.raises(StorageError, match="could not be tried before the first publishing"):
            store.bounded(Deadline(1.0)).publish("index", b"2" * 64, None)
        assert time.monotonic() - begun < SOON
    finally:
        ended.set()
        other.join(60)
    assert not other.is_alive()


def test_several_runs_are_given_back_at_once_when_a_process_ends(
    proxy: Proxy, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "GIVING_UP", 2.0)
    runs = [holdfast.Checkpoints(f"{place}/{number}", job=ALONE) for number in range(4)]
    for run in runs:
        run.save(1, state()).committed()
    proxy.rule = lambda *_: "hang"
    begun = time.monotonic()
    owner._give_back()
    assert time.monotonic() - begun < 3 * 2.0
    proxy.rule = lambda *_: "pass"
    for run in runs:
        run.close()


def test_a_given_step_is_restored_within_the_timeout(proxy: Proxy, place: str) -> None:
    job = holdfast.Job(no_dist=True, timeout=4.0)
    with holdfast.Checkpoints(place, job=ALONE) as checkpoints:
        checkpoints.save(1, state()).committed()
    checkpoints = holdfast.Checkpoints(place, job=job)
    proxy.rule = lambda *_: "hang"
    begun = time.monotonic()
    with pytest.raises(HoldfastError):
        checkpoints.restore(state(), 1)
    assert time.monotonic() - begun < SOON
    proxy.rule = lambda *_: "pass"
    checkpoints.close()


def test_the_first_save_of_a_start_is_committed_on_its_host_without_the_run(
    proxy: Proxy, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch, "hang")
    monkeypatch.setattr(local_tier, "RUN_LOOK", 1.0)
    proxy.rule = lambda *_: "hang"
    checkpoints = holdfast.Checkpoints(place, local=tmp_path, job=ALONE, on_failure="warn")
    begun = time.monotonic()
    saved = checkpoints.save(1, state(1))
    assert saved is not None
    report = saved.committed(SOON)
    assert time.monotonic() - begun < SOON
    assert report.path.startswith(str(tmp_path))
    back = state()
    holdfast.load(back, report.path, job=ALONE)
    assert torch.equal(back["w"], state(1)["w"])
    proxy.rule = lambda *_: "pass"
    assert saved.durable(120).path.startswith(place)
    checkpoints.close()


# -- after the deadline ---------------------------------------------------------------------------------


def errors_of_two_ranks(proxy: Proxy, place: str, sent: str) -> tuple[str, list[HoldfastError]]:
    """Save on two ranks whose deadline passes after this was sent. Return where, and the error of each."""

    def one(roster: MemoryRoster) -> HoldfastError:
        limits = holdfast.Job(roster=roster, timeout=seconds)
        with pytest.raises(HoldfastError) as caught:
            holdfast.save({f"w{roster.rank}": torch.ones(9)}, folder, job=limits)
        return caught.value

    for seconds in (2.0, 8.0, 30.0):  # a busy machine may not have sent it by then
        folder = f"{place}/{seconds:g}"
        errors = on_ranks(2, one)
        if any(line.startswith("PUT") and sent in line for line in proxy.requests()):
            return folder, errors
    raise AssertionError(f"{sent} was not sent within 30 s")


def test_a_rank_deletes_its_file_though_the_deadline_has_passed(proxy: Proxy, place: str) -> None:
    proxy.rule = lambda method, path, *_: "hang" if method == "PUT" and "-r00001" in path else "pass"
    folder, errors = errors_of_two_ranks(proxy, place, "-r00000")
    assert not any(isinstance(error, CommitUnconfirmed) for error in errors)
    proxy.rule = lambda *_: "pass"
    wait_until(lambda: open_store(folder).list() == [])


def test_the_index_is_seen_though_the_deadline_has_passed(
    proxy: Proxy, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (commit, job):
        monkeypatch.setattr(module, "LOOK", SOON)
    holdfast.save(state(), place, job=ALONE)
    call = begin_call(holdfast.Job(no_dist=True, timeout=0.1))
    wait_until(call.deadline.passed)
    saving = job.SaveJob(
        SaveRequest(store=open_store(place), collect=lambda rank: flatten(state(), rank), call=call)
    )
    with open_index(open_store(place)) as index:
        saving.operation.attempt = str(index.about["attempt"])
    assert saving.is_committed()
    data = open_store(place).open("index.safetensors").read(0, 1 << 20)
    found = commit.Commit(
        saving.store, "save", call.deadline, {}, None, None, "", lambda name: [], lambda: None, data=data
    )
    assert found._is_there(0.0)


# -- refusals -------------------------------------------------------------------------------------------


def test_an_owner_that_can_not_be_renewed_is_warned_of_once(
    proxy: Proxy, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(owner, "BEAT", 0.5)
    checkpoints = holdfast.Checkpoints(place, job=ALONE)
    checkpoints.save(1, state()).committed()
    proxy.requests()
    refused = threading.Event()
    proxy.rule = lambda *_: "pass" if refused.is_set() else "denied"

    def renewals() -> int:
        return sum("denied" in line for line in proxy.requests())

    try:
        tried = 0
        while tried < 6:
            tried += renewals()
            time.sleep(0.05)
        said = [text for text in caplog.messages if f"The owner of {place} could not be written" in text]
    finally:
        refused.set()
    assert len(said) == 1, said
    checkpoints.close()


def test_a_renewal_that_was_given_up_and_comes_late_is_no_takeover(
    proxy: Proxy, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "BEAT", 1000.0)
    checkpoints = holdfast.Checkpoints(place, job=ALONE)
    checkpoints.save(1, state()).committed()
    lease = checkpoints._lease
    before, tail = lease._read()
    assert before is not None
    delayed, arrived = threading.Event(), threading.Event()

    def change(asked: Asked) -> Any:
        is_first = asked.method == "PUT" and owner.OWNER in asked.path and not delayed.is_set()
        if is_first:
            delayed.set()
            time.sleep(1.5)
        answer = forward(asked.port, asked.method, asked.path, asked.headers, asked.body)
        if is_first:
            arrived.set()
        return answer

    proxy.change = change
    with lease._lock, pytest.raises(HoldfastError):
        lease._write(before, tail, open_store(place).bounded(Deadline(0.5)))
    assert not arrived.is_set()
    assert arrived.wait(30)  # after the file was read, and before it is written the next time
    with lease._lock:
        lease._write(before, tail)
    checkpoints.save(2, state(1)).committed()
    checkpoints.close()


def test_a_read_that_began_while_pins_were_refused_is_pinned_later(
    proxy: Proxy, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pins, "REQUEST", 1.0)
    monkeypatch.setattr(pins, "TRIED_AGAIN", 0.3)
    run = open_store(place)
    with holdfast.Checkpoints(place, keep=1, job=ALONE, asynchronous=False) as checkpoints:
        checkpoints.save(1, state(1))
        proxy.rule = lambda method, path, query, number: (
            "503" if method == "PUT" and pins.PINS in path else "pass"
        )
        with holdfast.open(f"{place}/step-00000001") as reader:
            (said,) = [text for text in caplog.messages if "is read without a pin until" in text]
            assert f"{place}/step-00000001" in said
            proxy.rule = lambda *_: "pass"
            wait_until(lambda: run.list(f"step-00000001/{pins.PINS}"))
            checkpoints.save(2, state(2))  # removes step 1, but for its data
            assert torch.equal(reader["w"][:], state(1)["w"])
    wait_until(lambda: not run.list(f"step-00000001/{pins.PINS}"))


def refuse_deletions(proxy: Proxy, code: str, times: int) -> list[str]:
    """Answer the next deletions as S3 does: a 200, and an error for the object. Return a list that receives these."""
    refused: list[str] = []

    def change(asked: Asked) -> Any:
        if asked.method == "POST" and asked.path.endswith("?delete") and len(refused) < times:
            (key,) = re.findall("<Key>(.*?)</Key>", asked.body.decode())
            refused.append(key)
            told = f"<Error><Key>{key}</Key><Code>{code}</Code><Message>m</Message></Error>"
            head = '<?xml version="1.0" encoding="UTF-8"?><DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            return 200, [("Content-Type", "application/xml")], f"{head}{told}</DeleteResult>".encode()
        return forward(asked.port, asked.method, asked.path, asked.headers, asked.body)

    proxy.change = change
    return refused


def test_a_run_of_a_job_that_may_not_delete_is_free_once_it_is_closed(proxy: Proxy, place: str) -> None:
    refuse_deletions(proxy, "AccessDenied", 1000)
    for step in (1, 2):
        with holdfast.Checkpoints(place, job=ALONE) as checkpoints:
            checkpoints.save(step, state(step)).committed()


def test_a_deletion_without_the_right_says_so(proxy: Proxy, place: str) -> None:
    refuse_deletions(proxy, "AccessDenied", 1)
    with pytest.raises(StorageError, match=r"these credentials may not delete objects \(s3:DeleteObject"):
        open_store(place).delete("x")


@pytest.mark.parametrize("code", ["ServiceUnavailable", "SlowDown", "InternalError"])
def test_a_deletion_that_is_refused_for_now_is_tried_again(proxy: Proxy, place: str, code: str) -> None:
    store = open_store(place)
    writer = store.create("x")
    writer.write_at(0, [b"1"])
    writer.finish()
    refused = refuse_deletions(proxy, code, 2)
    store.delete("x")
    assert len(refused) == 2
    assert store.list() == []
