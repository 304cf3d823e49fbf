"""Every roster against the contract, and what TCPStore adds: loss, and restarts of torchrun."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from torch.distributed import HashStore, TCPStore

from holdfast.errors import RosterLost
from holdfast.roster.base import Roster, Wakeable, decode
from holdfast.roster.memory import Board, MemoryRoster
from holdfast.roster.presence import Identity, Presence, at_key, describe
from holdfast.roster.torch_store import TorchRoster
from holdfast.testing.roster_contract import RosterContract
from tests.support.waiting import wait_until


class TestMemoryRoster(RosterContract):
    @pytest.fixture
    def world(self) -> Callable[[int], list[Roster]]:
        board = Board()
        return lambda size: [MemoryRoster(rank, size, board) for rank in range(size)]


class TestTcpStore(RosterContract):
    @pytest.fixture
    def world(self) -> Callable[[int], list[Roster]]:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return lambda size: [TorchRoster(store, rank, size) for rank in range(size)]


class TestHashStore(RosterContract):
    @pytest.fixture
    def world(self) -> Callable[[int], list[Roster]]:
        store = HashStore()
        return lambda size: [TorchRoster(store, rank, size) for rank in range(size)]


def test_a_store_whose_host_has_gone_is_roster_lost() -> None:
    program = (
        "import sys, torch.distributed as d;"
        "s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False);"
        "print(s.port, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as host:
        assert host.stdout is not None
        port = int(host.stdout.readline())
        roster = TorchRoster(TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False), 1, 2)
        roster.put("a", {})
        assert roster.get(["a"]) == [{}]
        host.kill()
        host.wait(10)
        with pytest.raises(RosterLost, match="message store can't be reached"):
            roster.claim("b", {})
        with pytest.raises(RosterLost):
            roster.get(["a"])


def test_messages_of_an_earlier_incarnation_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun keeps one store over its restarts; what dead ranks said there must not count."""
    store = HashStore()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    TorchRoster(store, 0, 2).claim("save/x/outcome", {"state": "abandoned"})
    assert TorchRoster(store, 1, 2).get(["save/x/outcome"]) == [{"state": "abandoned"}]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert TorchRoster(store, 1, 2).get(["save/x/outcome"]) == [None]


def test_what_is_not_a_message_is_refused() -> None:
    for bad in (b"\x80\x04K\x01.", b"[1, 2]", b"not json"):
        with pytest.raises(RosterLost, match="not what a rank of Holdfast writes"):
            decode(bad, "k")
    assert decode(b'{"a":1}', "k") == {"a": 1}


def test_a_message_without_the_seal_of_the_job_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    first, second = TorchRoster(store, 0, 2), TorchRoster(store, 1, 2)
    first.put("k", {"state": "agreed"})
    key = "holdfast//0/k"
    sealed = store.get(key)
    assert second.get(["k"]) == [{"state": "agreed"}]
    for forged in (sealed[16:], b"0" * 16 + sealed[16:], sealed[:16] + b'{"state":"abandoned"}', b""):
        store.set(key, forged)
        with pytest.raises(RosterLost, match="does not carry this job's seal"):
            second.get(["k"])
        if forged:
            with pytest.raises(RosterLost, match="does not carry this job's seal"):
                second.claim("k", {})
    store.set("holdfast//0/other", sealed)  # a message belongs to its key
    with pytest.raises(RosterLost, match="does not carry this job's seal"):
        second.get(["other"])
    monkeypatch.setenv("HOLDFAST_SECRET", "only this rank has it")
    store.set(key, sealed)
    with pytest.raises(RosterLost, match="another value of HOLDFAST_SECRET"):
        TorchRoster(store, 1, 2).get(["k"])


def test_reading_a_message_that_is_deleted_meanwhile_waits_for_nothing() -> None:
    """`get` of a store waits for minutes for a key that is not there: ours must not, whoever deletes it
    when."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = TorchRoster(store, 0, 2), TorchRoster(store, 1, 2)
    stop = threading.Event()

    def flicker() -> None:
        while not stop.is_set():
            first.put("k", {"x": 1})
            first.delete(["k"])

    thread = threading.Thread(target=flicker)
    thread.start()
    try:
        found = [second.get(["k"])[0] for _ in range(2000)]
    finally:
        stop.set()
        thread.join(10)
    assert {None if message is None else message["x"] for message in found} == {None, 1}


def test_a_thread_waits_for_long_and_asks_nobody_and_hears_that_the_store_ends() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = TorchRoster(store, 0, 2), TorchRoster(store, 1, 2)
    assert isinstance(first, Wakeable)
    assert not isinstance(MemoryRoster(), Wakeable)
    assert first.base("where") is first.lane("beside").base("where")
    ended = threading.Event()
    first.on_end(ended.set)
    thread = threading.Thread(target=first.base("where").wait_long, args=("key",))
    thread.start()
    second.lane("beside").put("key", {})
    thread.join(0.3)
    assert thread.is_alive(), "a lane has messages of its own"
    second.lane("beside").base().put("key", {})
    thread.join(10)
    assert not thread.is_alive()
    assert not ended.is_set()
    del first, second, store
    gc.collect()
    assert ended.is_set()


def test_the_store_of_a_destroyed_process_group_ends() -> None:
    """Else the next process group on that port meets the messages of the last."""
    script = """
import gc, os, sys
import torch.distributed as dist
from holdfast.torch_private import default_store
from weakref import ref
from holdfast.protocol.call import find_roster
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
for life in range(2):
    dist.init_process_group("gloo")
    roster = find_roster(None, False)
    assert roster.get(["left over"]) == [None], life
    roster.put("left over", {})
    store = ref(default_store())
    dist.destroy_process_group()
    gc.collect()
    assert store() is None
"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-c", script, str(port)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_process_that_has_ended_is_seen_on_its_host() -> None:
    me = Identity(3)
    message = {"machine": me.machine, "pid": me.pid, "started": me.started}
    assert me.alive(message) is True
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as other:
        with open(f"/proc/{other.pid}/stat", encoding="ascii") as file:
            started = file.read().rpartition(")")[2].split()[19]
        theirs = {"machine": me.machine, "pid": other.pid, "started": started}
        assert me.alive(theirs) is True
        assert me.alive({**theirs, "started": "1"}) is False  # the pid was given to another process
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # a zombie is dead, too
        assert me.alive(theirs) is False
    assert me.alive(theirs) is False
    assert me.alive({**message, "machine": "elsewhere"}) is None


def test_a_rank_never_heard_of_is_described_so() -> None:
    assert str(describe(4, None, 0.0)) == "rank 4, which has not been heard of"
    part = {"title": "save of x", "phase": "writing", "doing": "at a wall"}
    message = {
        "host": "n1",
        "pid": 12,
        "wall": 3.0,
        "operations": {"a": part, "b": {**part, "phase": "written"}},
    }
    heard = describe(4, message, 5.5, "its process has ended", "a")
    assert str(heard) == (
        "rank 4 (host n1, pid 12), last seen in phase 'save of x: writing' 2.5 s ago: its process has ended; "
        "at a wall"
    )
    assert describe(4, message, 5.5, "", "c").phase == "save of x: written"
    gone = {**message, "operations": {}, "last": part}
    assert describe(4, gone, 5.5).phase == "idle since save of x: writing"


class TestPresence:
    """What one rank shows of itself while several of its threads are in calls."""

    def test_operations_do_not_hide_each_other(self) -> None:
        roster = MemoryRoster(0, 2)
        one, two = Presence(roster, "save of x", 5.0), Presence(roster, "load of y", 5.0)
        one.begin("save/1", "save/1/outcome")
        two.begin("load/1", "load/1/outcome")
        one.phase, two.progress = "writing", 7
        one.beacon.send()
        (message,) = roster.get([at_key(0)])
        assert message is not None
        assert message["operations"]["save/1"]["phase"] == "writing"
        assert message["operations"]["load/1"]["progress"] == 7
        one.leave()
        (message,) = roster.get([at_key(0)])
        assert message is not None
        assert list(message["operations"]) == ["load/1"]
        assert message["last"]["title"] == "save of x"
        two.leave()
        two.stop()

    def test_one_beat_serves_all_and_ends_with_the_last(self) -> None:
        roster = MemoryRoster(0, 2)
        calls = [Presence(roster, f"save of {number}", 0.01) for number in range(3)]
        for number, call in enumerate(calls):
            call.begin(f"save/{number}", f"save/{number}/outcome")
        assert [thread.name for thread in threading.enumerate()].count("holdfast-beat") == 1
        roster.put("save/1/outcome", {"state": "abandoned"})
        assert calls[1].noticed.wait(10)
        assert not calls[0].noticed.is_set()
        for call in calls:
            call.leave()
            call.stop()
        wait_until(lambda: "holdfast-beat" not in [thread.name for thread in threading.enumerate()])
