"""Connections between processes of different hosts, here over the loopback: what the kernel tells of the other
end, and what strangers can do."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest

from holdfast._core.process.heart import heart
from holdfast._core.roster import links
from holdfast._core.roster.links import BACKLOG, HELD, Link, Listener, knock
from tests.support.threads import in_a_fork
from tests.support.waiting import wait_until

T = TypeVar("T")
TOKEN = "0123456789abcdef"
LISTEN = f"""
import os, sys, time
from holdfast._core.process.heart import heart
from holdfast._core.roster.links import Listener
from tests.support.gil import hold_the_gil
class Listens:
    interval = 60.0
    listener = None
    def beat(self):
        if self.listener is not None:
            self.listener.accept()
            return
        self.listener = Listener("127.0.0.1", "{TOKEN}", self.knocked)
        print(self.listener.port, flush=True)
    def knocked(self):
        print("knock", flush=True)
        heart.hurry(self)
    def close(self):
        self.listener.close()
listens = Listens()
heart.begin(listens, delay=0.0)
def follow(order):
    if order == "leave":
        heart.end(listens)
    elif order == "gil":
        hold_the_gil(60)
    elif order == "fork" and not os.fork():
        time.sleep(60)
    print(order, flush=True)
for line in sys.stdin:
    follow(line.strip())
"""


class Hands:
    """Does what tests want on the heart's thread, where links live."""

    interval = 60.0

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def beat(self) -> None:
        while self.work:
            self.work.pop(0)()

    def close(self) -> None: ...

    def do(self, call: Callable[[], T]) -> T:
        done: list[T] = []
        self.work.append(lambda: done.append(call()))
        heart.hurry(self)
        wait_until(lambda: done)
        return done[0]


@pytest.fixture
def hands() -> Iterator[Hands]:
    before = len(os.listdir("/proc/self/fd"))
    made = Hands()
    heart.begin(made)
    yield made
    heart.end(made)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


class Other:
    """A process that listens."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.port = int(self.said())

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


@pytest.fixture
def other() -> Iterator[Other]:
    command = [sys.executable, "-c", LISTEN]
    with subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield Other(process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def linked(hands: Hands, port: int, token: str = TOKEN) -> Iterator[tuple[Link, list[float]]]:
    ends: list[float] = []
    link = Link("127.0.0.1", port, token, lambda: ends.append(time.monotonic()))
    hands.do(link.look)
    yield link, ends
    hands.do(link.close)


def path(hands: Hands, link: Link) -> str:
    return hands.do(link.look).name


def test_a_connection_is_kept_and_a_killed_process_is_known_at_once(hands: Hands, other: Other) -> None:
    with linked(hands, other.port) as (link, ends):
        wait_until(lambda: path(hands, link) == "OPEN")
        kept = link._socket
        time.sleep(0.3)
        assert path(hands, link) == "OPEN"
        assert link._socket is kept
        assert not ends
        killed = time.monotonic()
        other.process.kill()
        wait_until(lambda: ends)
        assert ends[0] - killed < 2.0
        assert path(hands, link) == "ENDED"
        assert path(hands, link) == "ENDED"


def test_a_stopped_process_is_there_and_lets_others_connect(hands: Hands, other: Other) -> None:
    with linked(hands, other.port) as (link, ends):
        wait_until(lambda: path(hands, link) == "OPEN")
        other.process.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        assert path(hands, link) == "OPEN"
        with linked(hands, other.port) as (second, _):
            # It has not been seen over this one, so nothing is said.
            assert path(hands, second) == "UNKNOWN"
            other.process.send_signal(signal.SIGCONT)
            wait_until(lambda: path(hands, second) == "OPEN")
        assert not ends


def test_a_process_that_holds_the_gil_is_there(hands: Hands, other: Other) -> None:
    with linked(hands, other.port) as (link, ends):
        wait_until(lambda: path(hands, link) == "OPEN")
        other.tell("gil")
        time.sleep(1.0)
        assert path(hands, link) == "OPEN"
        assert not ends
        other.process.kill()
        wait_until(lambda: path(hands, link) == "ENDED")


def test_a_process_that_listens_no_more_and_goes_on_has_not_ended(hands: Hands, other: Other) -> None:
    with linked(hands, other.port) as (link, _):
        wait_until(lambda: path(hands, link) == "OPEN")
        other.tell("leave")
        wait_until(lambda: path(hands, link) == "UNKNOWN")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", other.port), 5)
        assert path(hands, link) == "UNKNOWN"


def test_a_refusal_counts_only_where_the_token_came_before(hands: Hands) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with linked(hands, port) as (link, _):  # closed from the start, as by a firewall
        assert path(hands, link) == "UNKNOWN"
    server = socket.create_server(("127.0.0.1", 0))
    with server, linked(hands, server.getsockname()[1]) as (link, ends):
        stranger, _ = server.accept()
        stranger.send(b"220 smtp ready\r\n")
        time.sleep(0.1)
        assert path(hands, link) == "UNKNOWN"
        stranger.close()
        server.close()
        for _ in range(3):
            assert path(hands, link) == "UNKNOWN"
        assert not ends


def test_a_reset_is_not_the_end_of_a_process(hands: Hands) -> None:
    """So a firewall begins to refuse; the kernel of a process that ends closes its connections in order."""
    for linger, known in ((struct.pack("ii", 1, 0), "REFUSED"), (struct.pack("ii", 0, 0), "ENDED")):
        server = socket.create_server(("127.0.0.1", 0))
        with server, linked(hands, server.getsockname()[1]) as (link, ends):
            hands.do(link.look)
            end, _ = server.accept()
            end.send(TOKEN.encode())
            wait_until(lambda link=link: path(hands, link) == "OPEN")
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            server.close()
            end.close()
            wait_until(lambda ends=ends: ends)
            assert path(hands, link) == known


def test_a_connection_that_is_let_go_for_others_does_not_look_like_an_end(other: Other) -> None:
    crowd = [socket.create_connection(("127.0.0.1", other.port), 10) for _ in range(HELD + 1)]
    crowd[0].settimeout(10)
    assert crowd[0].recv(100) == TOKEN.encode()
    with pytest.raises(ConnectionResetError):
        crowd[0].recv(100)
    for stranger in crowd:
        stranger.close()


def server_at(port: int) -> socket.socket:
    """Listen at a port, which a connection of another test may have for a while."""
    found: list[socket.socket] = []

    def listens() -> bool:
        with suppress(OSError):
            found.append(socket.create_server(("127.0.0.1", port)))
        return bool(found)

    wait_until(listens)
    return found[0]


def test_a_stranger_who_takes_the_port_is_no_reason_to_hurry(hands: Hands, other: Other) -> None:
    """Each time it closes the connection, this would connect again at once."""
    with linked(hands, other.port) as (link, ends):
        wait_until(lambda: path(hands, link) == "OPEN")
        other.process.kill()
        wait_until(lambda: ends)
        with server_at(other.port) as server:
            for _ in range(3):
                hands.do(link.look)
                server.accept()[0].close()
                wait_until(lambda: link._socket is None)
            assert len(ends) == 1
        assert path(hands, link) == "ENDED"


@pytest.mark.parametrize(
    ("number", "known"),
    [
        (errno.EHOSTUNREACH, "UNREACHABLE"),
        (errno.ENETUNREACH, "UNREACHABLE"),
        (errno.ETIMEDOUT, "UNREACHABLE"),
        (errno.EMFILE, "UNKNOWN"),
        (errno.EADDRNOTAVAIL, "UNKNOWN"),
        (errno.EPERM, "UNKNOWN"),
    ],
)
def test_what_fails_here_says_nothing_of_the_other_host(
    number: int, known: str, hands: Hands, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    with linked(hands, other.port) as (link, _):
        wait_until(lambda: path(hands, link) == "OPEN")
        hands.do(link.close)

        def refuse(*where: object) -> None:
            raise OSError(number, "no")

        monkeypatch.setattr(links.socket, "create_connection", refuse)
        assert path(hands, link) == known


# -- strangers at the port ------------------------------------------------------------------------------


def test_strangers_get_the_token_and_cost_nothing(hands: Hands, other: Other) -> None:
    before = other.descriptors()
    with linked(hands, other.port) as (link, _):
        wait_until(lambda: path(hands, link) == "OPEN")
        for number in range(300):
            stranger = socket.create_connection(("127.0.0.1", other.port), 10)
            if number % 3 == 0:
                stranger.send(os.urandom(5000))  # not read: it is closed at the first byte
            elif number % 3 == 1:
                stranger.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
                )  # ends by a reset
            stranger.close()
        # Held connections are bounded; a rank whose connection is closed for that makes another.
        wait_until(lambda: path(hands, link) == "OPEN" and other.descriptors() == before + 1)
        crowd = [socket.create_connection(("127.0.0.1", other.port), 10) for _ in range(HELD + 40)]
        wait_until(lambda: other.descriptors() <= before + HELD)
        wait_until(lambda: path(hands, link) == "OPEN")
        for stranger in crowd:
            stranger.close()
        wait_until(lambda: path(hands, link) == "OPEN" and other.descriptors() == before + 1)


def test_a_stranger_who_connects_as_fast_as_the_heart_accepts_does_not_hold_it_up(hands: Hands) -> None:
    made: list[socket.socket] = []

    def connect() -> None:
        """For each connection that is accepted, one more waits."""
        if len(made) < 4 * BACKLOG:
            made.append(socket.create_connection(("127.0.0.1", listener.port), 10))

    with socket.socket() as stranger:
        listener = hands.do(lambda: Listener("127.0.0.1", TOKEN, connect))
        stranger.connect(("127.0.0.1", listener.port))
        wait_until(lambda: made)
        assert hands.do(lambda: len(made)) <= BACKLOG
        for _ in range(4):
            hands.do(listener.accept)  # as at beats
        wait_until(lambda: len(made) == 4 * BACKLOG)
        hands.do(listener.close)
    for one in made:
        one.close()


def test_what_a_stranger_hears_is_the_token_alone(other: Other) -> None:
    with socket.create_connection(("127.0.0.1", other.port), 10) as stranger:
        stranger.settimeout(10)
        assert stranger.recv(1000) == TOKEN.encode()
        stranger.send(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionResetError):
            assert stranger.recv(1000) == b""


def test_a_knock_wakes_a_process_and_leaves_nothing(other: Other) -> None:
    before = other.descriptors()
    knock("127.0.0.1", other.port)
    assert other.said() == "knock"
    wait_until(lambda: other.descriptors() == before)
    knock("127.0.0.1", 1)  # where nobody listens: nothing


def test_a_process_without_descriptors_does_not_spin_and_accepts_later() -> None:
    def listen() -> None:
        hands = Hands()
        heart.begin(hands)
        knocks: list[int] = []
        listener = hands.do(lambda: Listener("127.0.0.1", TOKEN, lambda: knocks.append(1)))
        strangers = [socket.socket() for _ in range(2)]
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limit[1]))
        for stranger in strangers:
            stranger.connect(("127.0.0.1", listener.port))
        cpu = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - cpu < 0.3
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        assert not knocks
        hands.do(listener.accept)  # as at a beat
        assert len(knocks) == 2
        with socket.create_connection(("127.0.0.1", listener.port)):
            wait_until(lambda: len(knocks) == 3)

    in_a_fork(listen)


# -- forks ---------------------------------------------------------------------------------------------------


def test_a_fork_does_not_answer_for_its_parent(hands: Hands, other: Other) -> None:
    """DataLoader workers outlive a killed rank for a while."""
    with linked(hands, other.port) as (link, ends):
        wait_until(lambda: path(hands, link) == "OPEN")
        other.tell("fork")
        assert "fork" in (other.said(), other.said())
        time.sleep(0.2)
        assert path(hands, link) == "OPEN"
        other.process.kill()
        wait_until(lambda: ends, 5.0)
        assert path(hands, link) == "ENDED"


def test_a_fork_keeps_no_connection_of_its_parent(hands: Hands, other: Other) -> None:
    with linked(hands, other.port) as (link, ends):
        wait_until(lambda: path(hands, link) == "OPEN")
        held = other.descriptors()

        ready, go = os.pipe()

        def child() -> None:
            assert link._socket is not None
            assert link._socket.fileno() == -1
            os.read(ready, 1)

        thread = threading.Thread(target=in_a_fork, args=(child,))
        thread.start()
        time.sleep(0.3)  # the fork is there
        hands.do(link.close)
        wait_until(lambda: other.descriptors() == held - 1)
        os.write(go, b"!")
        thread.join()
        for end in (ready, go):
            os.close(end)
        assert not ends
