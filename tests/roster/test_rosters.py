"""Every roster against the contract, and what TCPStore adds: loss, and restarts of torchrun."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from stat import S_ISSOCK

import psutil
import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from holdfast._core.roster.base import Roster, decode
from holdfast._core.roster.memory import Board, MemoryRoster
from holdfast._core.roster.tcp_client import PATIENCE, TcpClient
from holdfast._core.roster.torch_store import TorchRoster, _Connections
from holdfast.errors import RosterLost
from holdfast.testing.roster_contract import RosterContract
from tests.support.ports import held_port
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
    for bad in (b"\x80\x04K\x01.", b"[1, 2]", b"not json", b'{"a":"\xff"}', b'{"a":' + b"[" * 50_000):
        with pytest.raises(RosterLost, match="not what a rank of Holdfast writes"):
            decode(bad, "k")
    assert decode(b'{"a":1}', "k") == {"a": 1}


def test_a_message_without_the_seal_of_the_job_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    first, second = TorchRoster(store, 0, 2), TorchRoster(store, 1, 2)
    first.put("k", {"state": "agreed"})
    key = first._name("k")
    sealed = store.get(key)
    assert second.get(["k"]) == [{"state": "agreed"}]
    for forged in (sealed[16:], b"0" * 16 + sealed[16:], sealed[:16] + b'{"state":"abandoned"}', b""):
        store.set(key, forged)
        with pytest.raises(RosterLost, match="does not carry this job's seal"):
            second.get(["k"])
        if forged:
            with pytest.raises(RosterLost, match="does not carry this job's seal"):
                second.claim("k", {})
    store.set(first._name("other"), sealed)  # a message belongs to its key
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
        # On a busy machine the other thread may not have had its turn between any two of these reads.
        wait_until(lambda: found.append(second.get(["k"])[0]) or any(found))
    finally:
        stop.set()
        thread.join(10)
    assert {None if message is None else message["x"] for message in found} == {None, 1}


def connections_to(port: int) -> int:
    """How many sockets of this process are ends of a connection to this port."""
    found = 0
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6):
                        found += port in (one.getsockname()[1], one.getpeername()[1])
    return found


def test_connections_are_kept_for_the_next_call_until_the_store_goes() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, roster = store.port, TorchRoster(store, 0, 2)
    wait_until(lambda: connections_to(port) == 2)  # torch's own client, with both ends in this process
    for _ in range(3):
        roster.lane("beside").get(["a"])
        roster.bounded().get(["a"])
    wait_until(lambda: connections_to(port) == 2 + 4)
    del store, roster
    gc.collect()
    wait_until(lambda: connections_to(port) == 0)


def test_a_connection_that_the_server_has_closed_is_replaced() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    roster = TorchRoster(store, 0, 2)
    roster.put("a", {"x": 1})
    assert not roster.wait("nothing", 0.01)  # whose answer is still to come
    (kept,) = [client for clients in roster._connections._idle.values() for client in clients]
    assert kept.is_open()
    kept._socket.shutdown(socket.SHUT_RDWR)
    assert not kept.is_open()
    assert roster.get(["a"]) == [{"x": 1}]


def test_a_store_that_does_not_answer_is_waited_for_but_not_by_what_must_not_hang() -> None:
    program = (
        "import sys, torch.distributed as d;"
        "s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False);"
        "print(s.port, flush=True); sys.stdin.read()"
    )
    with (
        subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as host,
        ExitStack() as ending,
    ):
        ending.callback(host.kill)  # stopped, it would not end by itself
        assert host.stdout is not None
        port = int(host.stdout.readline())
        roster = TorchRoster(TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False), 1, 2)
        assert not roster.serves()
        roster.put("a", {})
        host.send_signal(signal.SIGSTOP)
        # Its thread that serves the store may answer until it stops, too.
        threads = [psutil.Process(each.id) for each in psutil.Process(host.pid).threads()]
        wait_until(lambda: all(thread.status() == psutil.STATUS_STOPPED for thread in threads))
        begun = time.monotonic()
        with pytest.raises(RosterLost, match="timed out"):
            roster.bounded().get(["a"])
        assert time.monotonic() - begun < PATIENCE + 1.0
        threading.Timer(PATIENCE + 1.0, host.send_signal, [signal.SIGCONT]).start()
        assert roster.get(["a"]) == [{}]
        assert time.monotonic() - begun > PATIENCE + 0.5


def test_worlds_that_share_a_server_do_not_see_each_other() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    one, other = (TorchRoster(PrefixStore(name, store), 0, 2) for name in ("a", "b"))
    one.put("k", {"x": 1})
    assert other.get(["k"]) == [None]
    assert one.job() != other.job()
    assert one.serves()


def test_the_store_of_a_destroyed_process_group_ends() -> None:
    """Else the next process group on that port meets the messages of the last."""
    script = """
import gc, os, sys
import torch.distributed as dist
from holdfast._core.torch_private import default_store
from weakref import ref
from holdfast._core.protocol.call import find_roster
from holdfast._core.protocol.job import Job
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
for life in range(2):
    dist.init_process_group("gloo")
    roster = find_roster(Job())
    assert roster.get(["left over"]) == [None], life
    roster.put("left over", {})
    store = ref(default_store())
    dist.destroy_process_group()
    gc.collect()
    assert store() is None
"""
    with held_port() as port:
        done = subprocess.run(
            [sys.executable, "-c", script, str(port)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr


def test_a_client_that_is_lent_when_its_store_goes_is_closed() -> None:
    """By a thread that asks while the program destroys the process group: the next world would begin with a descriptor
    more."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connections = _Connections(store, 0.0)
    with connections.client(None) as client:
        assert isinstance(client, TcpClient)
        assert client.is_open()
        del store
        gc.collect()
        assert connections.parent() is None
    assert client._socket.fileno() == -1
    assert not any(connections._idle.values())
