"""The roster over `torch.distributed`'s own key-value store: TCPStore under any launcher.

The store is the one that the default process group was started with, so there is nothing to
set up; its keys get a prefix of ours. We use clients of our own (`clone`), because one client
serialises its calls and a wait would hold the training's own use up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from holdfast.errors import RosterLost
from holdfast.options import read_environment
from holdfast.roster.base import Message, decode, encode
from holdfast.torch_private import default_store


class TorchRoster:
    """One client of a `torch.distributed.Store`."""

    def __init__(
        self, store: Any = None, rank: int | None = None, world_size: int | None = None, lane: str = ""
    ) -> None:
        base = default_store() if store is None else store
        self._parent = base
        self._second: TorchRoster | None = None
        self._lane = lane
        self._lanes: dict[str, TorchRoster] = {}
        self._prefix = f"holdfast/{read_environment().incarnation}/{lane}"
        self._client: Any = None
        self.rank = dist.get_rank() if rank is None else rank
        self.world_size = dist.get_world_size() if world_size is None else world_size

    @property
    def _store(self) -> Any:
        """Our own client, connected at first use: that may block, so it is left to a worker thread."""
        if self._client is None:
            with _Reachable("opening a client"):
                self._client = self._parent.clone()
        return self._client

    def put(self, key: str, message: Message) -> None:
        with _Reachable(f"writing {key!r}"):
            self._store.set(self._prefix + key, encode(message))

    def get(self, keys: Sequence[str]) -> list[Message | None]:
        with _Reachable("reading"):
            names = [self._prefix + key for key in keys]
            if len(names) > 1 and self._store.check(names):  # one round trip when all are there
                found: list[bytes | None] = list(self._store.multi_get(names))
            else:
                found = [self._store.get(name) if self._store.check([name]) else None for name in names]
        return [None if data is None else decode(data, key) for key, data in zip(keys, found, strict=True)]

    def claim(self, key: str, message: Message) -> Message:
        with _Reachable(f"claiming {key!r}"):
            return decode(self._store.compare_set(self._prefix + key, "", encode(message).decode()), key)

    def wait(self, key: str, seconds: float) -> bool:
        # Asked again and again rather than waited for in the store, whose clients write a warning
        # to the terminal each time that a wait ends without the key.
        ends = time.monotonic() + seconds
        pause = 0.001
        slowest = max(0.02, 2e-5 * self.world_size)
        with _Reachable(f"waiting for {key!r}"):
            while not self._store.check([self._prefix + key]):
                left = ends - time.monotonic()
                if left <= 0:
                    return False
                time.sleep(min(pause, left))
                pause = min(pause * 1.5, slowest)
        return True

    def delete(self, keys: Sequence[str]) -> None:
        with suppress(Exception):  # tidying; a store that can't delete keeps a few hundred bytes
            for key in keys:
                self._store.delete_key(self._prefix + key)

    def second(self) -> TorchRoster:
        if self._second is None:  # kept, because a connection costs up to seconds in a large world
            self._second = TorchRoster(self._parent, self.rank, self.world_size, self._lane)
        return self._second

    def lane(self, name: str) -> TorchRoster:
        if name not in self._lanes:
            prefix = f"{self._lane}lane-{name}/"
            self._lanes[name] = TorchRoster(self._parent, self.rank, self.world_size, prefix)
        return self._lanes[name]

    def renew(self) -> None:
        self._client = self._second = None


class _Reachable:
    """Turns the store's exceptions into RosterLost."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or not isinstance(error, RuntimeError | ValueError):
            return
        text = str(error).split("\n")[0]
        raise RosterLost(
            f"The message store can't be reached ({self._doing}: {text[:200]}).",
            hint="Its host, mostly rank 0's process or the launcher, has ended; look there for the first error.",
        ) from None
