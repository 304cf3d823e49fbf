"""The roster over `torch.distributed`'s own key-value store: TCPStore under any launcher.

The store is the one that the default process group was started with, so there is nothing to set up; our keys
have a prefix. We use clients of our own, because one client runs its calls one after the other, and a wait
would block the training's own calls. They are kept for the next call as long as the store is there: at each
connection the server looks up the client's name, and serves nobody else until a name server has answered.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias
from weakref import finalize, ref

import msgspec
import torch.distributed as dist

from holdfast._core.base.options import read_environment
from holdfast._core.base.values import Message
from holdfast._core.process.native_calls import native_call
from holdfast._core.roster.base import decode
from holdfast._core.roster.presence import spread
from holdfast._core.roster.process import listens
from holdfast._core.roster.seal import Seal
from holdfast._core.roster.tcp_client import PATIENCE, TcpClient, agrees_with
from holdfast._core.torch_private import TorchStore, clone_store, default_store, tcp_store
from holdfast.errors import RosterLost

_NOTHING = "\0"
"""Never a message. `compare_set` of it with itself reads a key without waiting: `get` of a store waits for a
key that is not there."""


AT_ONCE = 1024
"""Number of ranks that may connect at the same time."""
CONNECTED = 10_000
"""Connections per second in a larger world."""


class _ServerEnded(ConnectionRefusedError):
    """The server has closed a connection in order, and refuses another: its process has ended. A refusal
    alone may be a firewall's."""


class _TorchClient:
    """torch's own client, for stores other than a TCPStore. Same methods as `TcpClient`."""

    closed_in_order = False

    def __init__(self, store: TorchStore) -> None:
        self._store: Any = clone_store(store)  # the stubs of torch lack `set` of bytes

    def way(self) -> tuple[str, str]:
        return "", ""

    def is_open(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing: the connection is closed with the last reference."""

    def set(self, name: str, value: bytes) -> None:
        with native_call():
            self._store.set(name, value)

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        with native_call():
            values = [self._store.compare_set(name, _NOTHING, _NOTHING) for name in names]
        return [None if value == _NOTHING.encode() else value for value in values]

    def claim(self, name: str, value: bytes) -> bytes:
        with native_call():
            # Expecting "" writes only if the key is absent, atomically, and returns the value that is there.
            return bytes(self._store.compare_set(name, "", value.decode()))

    def add(self, name: str) -> int:
        with native_call():
            return int(self._store.add(name, 1))

    def delete(self, names: Sequence[str]) -> None:
        with suppress(Exception), native_call():  # a store that can't delete keeps a few hundred bytes
            for name in names:
                self._store.delete_key(name)

    def wait(self, name: str, seconds: float) -> bool:
        # Polled, because this client writes a warning to the terminal each time that its wait ends without
        # the key.
        ends = time.monotonic() + seconds
        pause = 0.001
        while True:
            with native_call():
                if self._store.check([name]):
                    return True
            left = ends - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, 0.05)


_Client: TypeAlias = TcpClient | _TorchClient


class _Connections:
    """This process's clients of one store, created at first use and closed with the store, and the secret
    that seals messages.

    It does not keep the store alive: after `destroy_process_group` the server of the default process group's
    store must end with it, or the next process group on that port would see the messages of the last.
    """

    def __init__(self, store: TorchStore, delay: float) -> None:
        self._idle: dict[float | None, list[_Client]] = {}
        self.parent = ref(store, partial(_close, self._idle))
        finalize(self, _close, self._idle).atexit = False
        self._delay = delay
        """Seconds that this rank waits before connecting, to spread the connections of a large world."""
        self._pid = os.getpid()
        self._seal: Seal | None = None
        self.prefix = ""
        """The prefix of our keys, because other worlds may use the same server."""
        self._speaks_tcp: bool | None = None
        self._was_closed = False
        """Whether the server closed a connection with FIN, and none was made since."""

    @contextmanager
    def client(self, patience: float | None) -> Iterator[_Client]:
        """Lend a client to one call; that of a call that fails is closed. It may have to connect first."""
        if self._pid != os.getpid():  # a fork must not speak on connections of its parent
            self._pid = os.getpid()
            _close(self._idle)
        idle = self._idle.setdefault(patience, [])
        client = self._open_one(idle) or self._connect(patience)
        try:
            yield client
        except BaseException:
            self._was_closed = self._was_closed or client.closed_in_order
            client.close()
            raise
        idle.append(client)
        if self.parent() is None:  # the store has gone meanwhile, and with it who closes idle clients
            _close(self._idle)

    def _open_one(self, idle: list[_Client]) -> _Client | None:
        """Take a client whose server is there; close those of which it has closed the connection."""
        with suppress(IndexError):  # other threads take clients, too
            while True:
                client = idle.pop()
                if client.is_open():
                    return client
                self._was_closed = self._was_closed or client.closed_in_order
                client.close()
        return None

    def _connect(self, patience: float | None) -> _Client:
        store = self.store()
        tcp = tcp_store(store)
        if tcp is None or self._speaks_tcp is False:
            return _TorchClient(store)
        time.sleep(self._delay)
        try:
            client = TcpClient(tcp.host, tcp.port, patience)
        except ConnectionRefusedError as error:
            raise (_ServerEnded(*error.args) if self._was_closed else error) from None
        self._was_closed = False
        if self._speaks_tcp is None:
            with native_call():
                self._speaks_tcp = agrees_with(client, tcp)
            if not self._speaks_tcp:
                client.close()
                return _TorchClient(store)
        return client

    def seal(self) -> Seal:
        """Return the seal of this job. The first rank generates its secret, the others read it."""
        if self._seal is None:
            # Through the store itself: worlds that share a server are told apart by the prefixes of their
            # stores.
            with _reachable("reading the job's secret"), native_call():
                environment = read_environment()
                key = f"holdfast/{environment.incarnation}/secret"
                drawn = self.store().compare_set(key, "", secrets.token_hex(16)).decode()
            self.prefix = f"holdfast/{Seal(drawn).job}/"
            # The second secret is never sent, so a stranger who can read the store does not have it. If the
            # first one of an earlier start is copied to here, nothing of that start is readable all the same.
            self._seal = Seal(drawn, environment.secret, environment.incarnation)
        return self._seal

    def store(self) -> TorchStore:
        store = self.parent()
        if store is None:
            raise RosterLost(
                "The default process group that this roster belongs to was destroyed.",
                hint="Call Checkpoints.close(), or committed() of what a save returned, before "
                "torch.distributed.destroy_process_group().",
                details={"destroyed": True},
            )
        return store


def _close(idle: dict[float | None, list[_Client]], store: object = None) -> None:
    """Close clients that no call uses. store: a reference to it, if it has gone."""
    for clients in list(idle.values()):
        try:  # not `suppress`, which is gone by then if a store goes when the interpreter ends
            while True:
                clients.pop().close()
        except IndexError:
            pass


class TorchRoster:
    """One rank's view of a `torch.distributed.Store`.

    store: None for that of the default process group, which must be initialised then. rank, world_size:
        default to those of the default process group.
    """

    def __init__(
        self, store: TorchStore | None = None, rank: int | None = None, world_size: int | None = None
    ) -> None:
        self.rank = dist.get_rank() if rank is None else rank
        self.world_size = dist.get_world_size() if world_size is None else world_size
        delay = spread(self.rank) * max(0, self.world_size - AT_ONCE) / CONNECTED
        self._connections = _Connections(default_store() if store is None else store, delay)
        self._given = store
        """A reference to the store that a caller gave, which keeps that one alive."""
        self._lane, self._patience = "", None
        self._family: dict[tuple[str, float | None], TorchRoster] = {("", None): self}
        """All rosters over these connections, by lane and patience."""

    def _member(self, lane: str, patience: float | None) -> TorchRoster:
        if (lane, patience) not in self._family:
            made = type(self).__new__(type(self))
            vars(made).update(vars(self), _lane=lane, _patience=patience)
            self._family.setdefault((lane, patience), made)
        return self._family[lane, patience]

    def _name(self, key: str) -> str:
        self._connections.seal()  # which finds the prefix
        return f"{self._connections.prefix}{self._lane}{key}"

    def _signed(self, name: str, message: Message) -> bytes:
        return self._connections.seal().sign(name, msgspec.json.encode(message))

    def _read(self, name: str, sealed: bytes) -> Message:
        return decode(self._connections.seal().check(name, sealed), name)

    @contextmanager
    def _client(self, doing: str) -> Iterator[_Client]:
        with _reachable(doing), self._connections.client(self._patience) as client:
            yield client

    def put(self, key: str, message: Message) -> None:
        name = self._name(key)
        data = self._signed(name, message)
        with self._client(f"writing {key!r}") as client:
            client.set(name, data)

    def get(self, keys: Sequence[str]) -> list[Message | None]:
        names = list(map(self._name, keys))
        with self._client("reading") as client:
            sealed = client.get(names)
        return [
            None if data is None else self._read(name, data) for name, data in zip(names, sealed, strict=True)
        ]

    def claim(self, key: str, message: Message) -> Message:
        name = self._name(key)
        data = self._signed(name, message)
        with self._client(f"claiming {key!r}") as client:
            standing = client.claim(name, data)
        return self._read(name, standing)

    def count(self, key: str) -> int:
        with self._client(f"counting {key!r}") as client:
            return client.add(self._name(key))

    def wait(self, key: str, seconds: float) -> bool:
        with self._client(f"waiting for {key!r}") as client:
            return client.wait(self._name(key), seconds)

    def delete(self, keys: Sequence[str]) -> None:
        with suppress(RosterLost), self._client("tidying up") as client:
            client.delete(list(map(self._name, keys)))

    def job(self) -> str:
        return self._connections.seal().job

    def lane(self, name: str) -> TorchRoster:
        return self._member(f"{self._lane}lane-{name}/", self._patience)

    def base(self) -> TorchRoster:
        return self._member("", self._patience)

    def bounded(self) -> TorchRoster:
        return self._member(self._lane, PATIENCE)

    def way(self) -> tuple[str, str]:
        with suppress(RosterLost), self._client("asking for the way") as client:
            return client.way()
        return "", ""

    def serves(self) -> bool:
        tcp = tcp_store(self._connections.store())
        return tcp is not None and listens(tcp.port)


@contextmanager
def _reachable(doing: str) -> Iterator[None]:
    """Turn the exceptions of a store and of sockets into RosterLost."""
    try:
        yield
    except RosterLost:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        # torch may append a C++ stack trace to the first line.
        text = str(error).split("\n")[0]
        raise RosterLost(
            f"The message store can't be reached ({doing}: {text[:200]}).",
            hint="Its host, mostly rank 0's process or the launcher, has ended; look there for the first "
            "error.",
            details={
                "refused": isinstance(error, ConnectionRefusedError),
                "ended": isinstance(error, _ServerEnded),
            },
        ) from None
