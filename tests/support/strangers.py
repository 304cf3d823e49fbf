"""A stranger in the message store: a client that knows Holdfast, its keys, and all that lies in the store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from typing import Any

import msgspec
import pytest
from torch.distributed import TCPStore

import holdfast
from holdfast._core.base.options import read_environment
from holdfast._core.base.values import Message
from holdfast._core.roster.seal import Seal
from holdfast._core.roster.tcp_client import TcpClient
from holdfast._core.roster.torch_store import TorchRoster
from holdfast.errors import HoldfastError

Attack = Callable[[str], object]
"""Is called with the name of a key in the store."""
SEAL = 16
"""Characters of a seal, in front of a message."""


_environment = threading.Lock()
"""Several are made at once, on threads."""


class Stranger:
    """Attacks two or more ranks, which are threads over one TCPStore.

    secret: HOLDFAST_SECRET of the ranks, which the stranger does not know. between: an attack on the key of
        the job's secret, before rank 1 reads it.
    """

    def __init__(
        self,
        ranks: int,
        secret: str,
        monkeypatch: pytest.MonkeyPatch,
        between: Callable[[Stranger, str], object] = lambda stranger, name: None,
    ) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.keys: set[str] = set()
        """All that any rank has written, without the prefix of the job."""
        self.seconds = 30.0
        """Of the calls of the ranks."""
        self.faster = threading.RLock()
        """No rank reads between a write and the attack on it."""
        self._at: list[tuple[str, Attack]] = []
        self._before: list[tuple[str, Attack]] = []
        incarnation = read_environment().incarnation
        key = f"holdfast/{incarnation}/secret"
        with _environment, monkeypatch.context() as patch:
            patch.setenv("HOLDFAST_SECRET", secret)
            self.rosters = [Attacked(self, rank, ranks) for rank in range(ranks)]
            self.rosters[0].job()
            between(self, key)
            for roster in self.rosters:
                roster.job()
        drawn = self.raw(key)
        assert drawn is not None
        self._seal = Seal(drawn.decode(), "", incarnation)

    def at(self, pattern: str, attack: Attack) -> None:
        """Attack right after a rank has written a key (without prefix) that fits the pattern."""
        self._at.append((pattern, attack))

    def before(self, pattern: str, attack: Attack) -> None:
        """Attack right before a rank writes such a key."""
        self._before.append((pattern, attack))

    def rest(self) -> None:
        """Attack no more."""
        self._at.clear()
        self._before.clear()

    def on_write(self, key: str, name: str, write: Callable[[], Any]) -> Any:
        with self.faster:
            self.keys.add(key)
            for pattern, attack in list(self._before):
                if fnmatchcase(key, pattern):
                    attack(name)
            result = write()
            for pattern, attack in list(self._at):
                if fnmatchcase(key, pattern):
                    attack(name)
            return result

    # -- what he does -----------------------------------------------------------------------------

    def _client(self) -> closing[TcpClient]:
        return closing(TcpClient("127.0.0.1", self.store.port, 10.0))

    def raw(self, name: str) -> bytes | None:
        with self._client() as client:
            return client.get([name])[0]

    def read(self, name: str) -> Message:
        """Return a message that is there: it is sealed, not encrypted."""
        data = self.raw(name)
        assert data is not None
        return msgspec.json.decode(data[SEAL:], type=Message)

    def put(self, name: str, data: bytes) -> None:
        with self._client() as client:
            client.set(name, data)
            client.get(
                [name]
            )  # the server does not answer a `set`: it is done by the time of the next answer

    def write(self, name: str, message: object) -> None:
        """Write a message with the best seal that he can make."""
        self.put(name, self._seal.sign(name, msgspec.json.encode(message)))

    def delete(self, name: str) -> None:
        with self._client() as client:
            client.delete([name])


class Attacked(TorchRoster):
    """A rank's roster, whose writes a stranger sees at once."""

    def __init__(self, stranger: Stranger, rank: int, world_size: int) -> None:
        super().__init__(stranger.store, rank, world_size)
        self.stranger = stranger

    @property
    def seconds(self) -> float:
        return self.stranger.seconds

    def put(self, key: str, message: Message) -> None:
        self._seen(key, lambda: super(Attacked, self).put(key, message))

    def claim(self, key: str, message: Message) -> Message:
        claimed: Message = self._seen(key, lambda: super(Attacked, self).claim(key, message))
        return claimed

    def get(self, keys: Sequence[str]) -> list[Message | None]:
        with self.stranger.faster:
            return super().get(keys)

    def count(self, key: str) -> int:
        return int(self._seen(key, lambda: super(Attacked, self).count(key)))

    def _seen(self, key: str, write: Callable[[], Any]) -> Any:
        return self.stranger.on_write(f"{self._lane}{key}", self._name(key), write)


def job_of(roster: TorchRoster, **given: Any) -> holdfast.Job:
    return holdfast.Job(**{"roster": roster, "timeout": 10.0, **given})


def on_each(job: Callable[[TorchRoster], Any], rosters: Sequence[TorchRoster]) -> list[Any]:
    """Run a job on each rank, on a thread of its own; return the results, or the errors of Holdfast."""
    ends: list[Any] = [None] * len(rosters)

    def one(rank: int) -> None:
        try:
            ends[rank] = job(rosters[rank])
        except HoldfastError as error:
            ends[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(rosters))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return ends
