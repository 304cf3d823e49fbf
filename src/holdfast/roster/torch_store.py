"""The roster over `torch.distributed`'s own key-value store: TCPStore under any launcher.

The store is the one that the default process group was started with, so there is nothing to set up; our keys
have a prefix. We use clients of our own, because one client runs its calls one after the other, and a wait
would block the training's own calls: one client for operations, one for concurrent work, shared by all lanes,
and one on which a rank waits to be asked where it is (`protocol/whereabouts.py`). So a world of ten thousand
ranks has three more connections per rank.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import finalize, ref

import msgspec
import torch.distributed as dist

from holdfast.errors import RosterLost
from holdfast.native_calls import native_call
from holdfast.options import read_environment
from holdfast.roster.base import decode
from holdfast.roster.seal import Seal
from holdfast.torch_private import clone_store, default_store, waits_by_itself
from holdfast.values import Message

Client = Any
"""A client of torch's store. torch.distributed does not export its class."""

_NOTHING = "\0"
"""Never a message. `compare_set` of it with itself reads a key without waiting: `get` of a store waits for a
key that is not there."""
_FEW = 8
"""Up to this many messages are read one by one."""
_WAIT = timedelta(seconds=10)
"""Timeout of a read of several messages, one of which is deleted meanwhile."""
_LONG = timedelta(days=20)
"""The longest wait of a store's client, which counts milliseconds in 31 bits."""
_SELDOM = 1.0
"""Seconds between two looks for a key, on a store whose clients can't wait for keys."""


class _Connections:
    """This process's clients of one store, created at first use, and the secret that seals messages.

    It does not keep the store alive: after `destroy_process_group` the server of the default process group's
    store must end with it, or the next process group on that port would see the messages of the last.
    """

    def __init__(self, store: Client) -> None:
        self.parent: Callable[[], Client | None] = ref(store)
        self.bases: dict[str, TorchRoster] = {}
        self._clients: dict[str, Client] = {}
        self._seal: Seal | None = None
        self.prefix = f"holdfast/{read_environment().incarnation}/"

    def client(self, name: str) -> Client:
        """Return the client of this name. Connecting may block, so this is called on worker threads."""
        if name not in self._clients:
            parent = self.parent()
            if parent is None:
                raise RosterLost(
                    "The default process group that this roster belongs to was destroyed.",
                    hint="Call Checkpoints.close(), or committed() of what a save returned, before "
                    "torch.distributed.destroy_process_group().",
                )
            with _reachable("opening a client"):
                made = clone_store(parent)
                # A store that is its own clone (HashStore) belongs to the program, and so does its timeout.
                if made is not parent:
                    made.set_timeout(_WAIT)
                self._clients[name] = made
        return self._clients[name]

    def seal(self, client: Client) -> Seal:
        """Return the seal of this job. The first rank draws its secret, the others read it."""
        if self._seal is None:
            with _reachable("reading the job's secret"):
                # The first rank sets the secret; all others get the one that is there.
                drawn = client.compare_set(f"{self.prefix}secret", "", secrets.token_hex(16)).decode()
            # The second secret is never sent, so a stranger who can read the store does not have it.
            self._seal = Seal(drawn, read_environment().secret)
        return self._seal

    def forget(self) -> None:
        self._clients = {}


class TorchRoster:
    """One client of a `torch.distributed.Store`.

    store: None for that of the default process group, which must be initialised then. rank, world_size:
        default to those of the default process group.
    """

    def __init__(
        self, store: Client | None = None, rank: int | None = None, world_size: int | None = None
    ) -> None:
        self.rank = dist.get_rank() if rank is None else rank
        self.world_size = dist.get_world_size() if world_size is None else world_size
        connections = _Connections(default_store() if store is None else store)
        self._set(connections, store, "main", "")

    def _set(self, connections: _Connections, store: Client | None, client: str, lane: str) -> None:
        self._connections, self._name, self._lane = connections, client, lane
        self._given = store
        """A reference to the store that a caller gave, which keeps that one alive."""
        self._prefix = connections.prefix + lane
        self._kept: dict[str, TorchRoster] = {}

    def _like(self, kept: dict[str, TorchRoster], kept_as: str, client: str, lane: str) -> TorchRoster:
        if kept_as not in kept:
            made = TorchRoster.__new__(TorchRoster)
            made.rank, made.world_size = self.rank, self.world_size
            # A base must not keep the store alive: its thread waits until the store ends, so neither would.
            made._set(
                self._connections, None if kept is self._connections.bases else self._given, client, lane
            )
            kept[kept_as] = made
        return kept[kept_as]

    @property
    def _store(self) -> Client:
        return self._connections.client(self._name)

    def _signed(self, key: str, message: Message) -> bytes:
        return self._connections.seal(self._store).sign(key, msgspec.json.encode(message))

    def _read(self, key: str, sealed: bytes) -> Message:
        return decode(self._connections.seal(self._store).check(key, sealed), key)

    def put(self, key: str, message: Message) -> None:
        name = self._prefix + key
        data = self._signed(name, message)
        with _reachable(f"writing {key!r}"):
            self._store.set(name, data)

    def get(self, keys: Sequence[str]) -> list[Message | None]:
        names = [self._prefix + key for key in keys]
        with _reachable("reading"):
            # The committer reads 64 reports or 256 presences at once: a round trip each would add up.
            sealed = (self._all_at_once(names) if len(names) > _FEW else None) or [
                self._store.compare_set(name, _NOTHING, _NOTHING) for name in names
            ]
        return [
            None if data == _NOTHING.encode() else self._read(name, data)
            for name, data in zip(names, sealed, strict=True)
        ]

    def _all_at_once(self, names: list[str]) -> list[bytes] | None:
        """Read many messages in two round trips; None if one of them is missing."""
        with suppress(dist.DistStoreError):  # one was deleted in between
            # `multi_get` would wait for a key that is not there, so check first.
            if self._store.check(names):
                return list(self._store.multi_get(names))
        return None

    def claim(self, key: str, message: Message) -> Message:
        name = self._prefix + key
        data = self._signed(name, message)
        with _reachable(f"claiming {key!r}"):
            # Expecting "" writes only if the key is absent, atomically, and returns the value that is there.
            standing = self._store.compare_set(name, "", data.decode())
        return self._read(name, standing)

    def count(self, key: str) -> int:
        with _reachable(f"counting {key!r}"):
            return int(self._store.add(self._prefix + key, 1))

    def wait(self, key: str, seconds: float) -> bool:
        # Polled, because a client of the store writes a warning to the terminal each time that its wait ends
        # without the key.
        ends = time.monotonic() + seconds
        pause = 0.001
        # Seconds. Grows with the world, so that all ranks together look at most 50,000 times per second.
        slowest = max(0.02, 2e-5 * self.world_size)
        with _reachable(f"waiting for {key!r}"):
            while not self._store.check([self._prefix + key]):
                left = ends - time.monotonic()
                if left <= 0:
                    return False
                time.sleep(min(pause, left))
                pause = min(pause * 1.5, slowest)
        return True

    def delete(self, keys: Sequence[str]) -> None:
        with suppress(Exception):  # tidying up; a store that can't delete keeps a few hundred bytes
            for key in keys:
                self._store.delete_key(self._prefix + key)

    def job(self) -> str:
        return self._connections.seal(self._store).job

    def second(self) -> TorchRoster:
        return self._like(self._kept, "second client", "beside", self._lane)

    def lane(self, name: str) -> TorchRoster:
        return self._like(self._kept, f"lane {name}", self._name, f"{self._lane}lane-{name}/")

    def base(self, client: str = "main") -> TorchRoster:
        return self._like(self._connections.bases, client, client, "")

    def wait_long(self, key: str) -> None:
        name, store = self._prefix + key, self._store
        with _reachable(f"waiting for {key!r}"):
            if waits_by_itself(store):
                store.wait([name], _LONG)
            else:
                while not store.check([name]):
                    time.sleep(_SELDOM)

    def on_end(self, listener: Callable[[], None]) -> None:
        parent = self._connections.parent()
        if parent is not None:
            # Not at the interpreter's exit: there `exits` ends the threads, in its own order.
            finalize(parent, listener).atexit = False

    def renew(self) -> None:
        self._connections.forget()


@contextmanager
def _reachable(doing: str) -> Iterator[None]:
    """Turn the store's exceptions into RosterLost."""
    try:
        with native_call():
            yield
    except (RuntimeError, ValueError) as error:
        # torch may append a C++ stack trace to the first line.
        text = str(error).split("\n")[0]
        raise RosterLost(
            f"The message store can't be reached ({doing}: {text[:200]}).",
            hint="Its host, mostly rank 0's process or the launcher, has ended; look there for the first "
            "error.",
        ) from None
