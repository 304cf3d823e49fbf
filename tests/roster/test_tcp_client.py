"""The client of a TCPStore's server, beside torch's own."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore

from holdfast._core.roster import tcp_client
from holdfast._core.roster.process import sockets
from holdfast._core.roster.tcp_client import TcpClient, agrees_with
from holdfast._core.roster.torch_store import TorchRoster
from holdfast.errors import RosterLost
from tests.support.waiting import SLACK, wait_until


@pytest.fixture(params=[True, False], ids=["libuv", "threads"])
def store(request: pytest.FixtureRequest) -> TCPStore:
    """torch has two servers; `USE_LIBUV=0` chooses the older one."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=request.param)


@pytest.fixture
def client(store: TCPStore) -> Iterator[TcpClient]:
    made = TcpClient("127.0.0.1", store.port, 5.0)
    yield made
    made.close()


def test_both_clients_see_the_same(store: TCPStore, client: TcpClient) -> None:
    assert agrees_with(client, store)
    client.set("a/ü", b"1")
    store.set("b", b"2" * 100_000)
    assert store.get("b") == b"2" * 100_000  # its answer says that the server has it: a set has none
    assert client.get(["b", "none", "a/ü", ""]) == [b"2" * 100_000, None, b"1", None]
    assert store.get("a/ü") == b"1"
    assert client.claim("c", b"mine") == b"mine"
    assert store.compare_set("c", "", "theirs") == b"mine"
    assert client.claim("c", b"other") == b"mine"
    assert [client.add("n"), store.add("n", 1), client.add("n")] == [1, 2, 3]
    client.delete(["a/ü", "c", "never there"])
    assert client.get(["a/ü", "c"]) == [None, None]
    assert not store.check(["a/ü"])


def test_thousands_of_keys_at_once(store: TCPStore, client: TcpClient) -> None:
    names = [f"k/{number}" for number in range(3000)]
    for name in names:
        client.set(name, name.encode() * 20)
    assert client.get(names) == [name.encode() * 20 for name in names]
    client.delete(names)
    assert client.get(names) == [None] * len(names)


def test_a_wait_ends_when_the_key_is_set_and_leaves_the_connection_usable(
    store: TCPStore, client: TcpClient
) -> None:
    other = TcpClient("127.0.0.1", store.port)
    begun = time.monotonic()
    assert not client.wait("late", 0.2)
    assert 0.15 < time.monotonic() - begun < SLACK
    timer = threading.Timer(0.2, other.claim, ["late", b"x"])
    timer.start()
    assert client.wait("late", 60.0)
    assert time.monotonic() - begun < SLACK
    assert client.get(["late"]) == [b"x"]
    assert client.wait("late", 10.0)
    timer.join()
    other.close()


def test_reads_of_others_do_not_wake_a_wait(store: TCPStore, client: TcpClient) -> None:
    """A server of torch's wakes those who wait for a key also when another reads it by `compare_set`."""
    other = TcpClient("127.0.0.1", store.port)
    reads = threading.Thread(target=lambda: [other.get(["k"]) for _ in range(500)])
    reads.start()
    begun = time.monotonic()
    assert not client.wait("k", 0.5)
    assert time.monotonic() - begun > 0.45
    reads.join()
    other.close()


@pytest.mark.parametrize("rounds", [20, pytest.param(1000, marks=pytest.mark.soak)])
def test_waits_that_race_with_the_key_are_never_lost(store: TCPStore, client: TcpClient, rounds: int) -> None:
    other = TcpClient("127.0.0.1", store.port)
    for number in range(rounds):
        thread = threading.Thread(target=other.set, args=(f"race/{number}", b""))
        thread.start()
        while not client.wait(f"race/{number}", 0.0005):
            pass
        thread.join()
        assert client.get([f"race/{number}"]) == [b""]
    other.close()


def test_its_connection_is_no_activity_of_the_program(client: TcpClient) -> None:
    """Else a beat a second would keep a process that does nothing for ever (`after_end`)."""
    assert client._socket.fileno() not in {one.fileno() for one in sockets()}
    client.close()
    with socket.socket() as program:
        assert program.fileno() in {one.fileno() for one in sockets()}


def test_another_protocol_is_noticed_and_torchs_client_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(tcp_client, "_key", lambda name: tcp_client._sized(b"other" + name.encode()))
    roster = TorchRoster(PrefixStore("p", store), 0, 2)
    roster.put("k", {"x": 1})
    assert roster.get(["k"]) == [{"x": 1}]
    assert roster.wait("k", 1.0)
    assert store.num_keys() >= 2
    assert not roster._connections._speaks_tcp


SERVE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("resets", [False, True])
def test_the_end_of_the_servers_process_is_told_from_a_port_that_refuses(resets: bool) -> None:
    """A kernel closes the connections of a process that ends in order, unless it has left something unread."""
    command = [sys.executable, "-c", SERVE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        there = TCPStore("127.0.0.1", int(process.stdout.readline()), is_master=False)
        roster = TorchRoster(there, 0, 2).bounded()
        roster.put("a", {})
        assert roster.get(["a"]) == [{}]
        if resets:
            process.send_signal(signal.SIGSTOP)
            tasks = list(Path(f"/proc/{process.pid}/task").iterdir())
            # Until then a thread of the server may still read.
            wait_until(lambda: all(") T " in (task / "stat").read_text() for task in tasks))
            roster.put("b", {})
        process.kill()
        process.wait(20)
        for _ in range(2):  # the first may still find the connection open
            with pytest.raises(RosterLost) as lost:
                roster.get(["a"])
        assert lost.value.details == {"refused": True, "ended": not resets}
