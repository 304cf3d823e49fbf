"""Every roster against the contract, and what TCPStore adds: loss, and restarts of torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from torch.distributed import HashStore, TCPStore

from holdfast.errors import RosterLost
from holdfast.roster.base import Roster, decode
from holdfast.roster.memory import Board, MemoryRoster
from holdfast.roster.presence import Identity, describe
from holdfast.roster.torch_store import TorchRoster
from holdfast.testing.roster_contract import RosterContract


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
        "import sys, torch.distributed as d; s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False);"
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
    store = HashStore()
    roster = TorchRoster(store, 0, 1)
    prefix = roster._prefix
    for bad in (b"\x80\x04K\x01.", b"[1, 2]", b"not json"):
        store.set(prefix + "k", bad)
        with pytest.raises(RosterLost, match="not what a rank of Holdfast writes"):
            roster.get(["k"])
    assert decode(b'{"a":1}', "k") == {"a": 1}


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
    heard = describe(
        4, {"host": "n1", "pid": 12, "phase": "writing", "wall": 3.0}, 5.5, "its process has ended"
    )
    said = "rank 4 (host n1, pid 12), last seen in phase 'writing' 2.5 s ago: its process has ended"
    assert str(heard) == said
