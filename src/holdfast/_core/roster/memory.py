"""An in-process roster: for ranks that are threads (in tests), and for single-process calls."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from holdfast._core.base.values import Message
from holdfast._core.roster.base import decode


@dataclass(eq=False)
class Board:
    """The messages that the ranks of one roster share."""

    messages: dict[str, bytes] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    job: str = field(default_factory=partial(secrets.token_hex, 8))
    _lanes: dict[str, Board] = field(default_factory=dict)

    def lane(self, name: str) -> Board:
        with self.changed:
            made = self._lanes.setdefault(name, Board())
            made.job = self.job
            return made


class MemoryRoster:
    """One rank's view of a board."""

    def __init__(self, rank: int = 0, world_size: int = 1, board: Board | None = None) -> None:
        self.rank: int = rank
        self.world_size: int = world_size
        self.board: Board = board or Board()
        self._lanes: dict[str, MemoryRoster] = {}
        self._base: MemoryRoster | None = None
        """The roster outside all lanes; None if this is it."""

    def put(self, key: str, message: Message) -> None:
        with self.board.changed:
            # Encoded as in a real store: ranks share no dict, and a value that is not JSON fails here, too.
            self.board.messages[key] = msgspec.json.encode(message)
            self.board.changed.notify_all()

    def get(self, keys: Sequence[str]) -> list[Message | None]:
        with self.board.changed:
            encoded = [self.board.messages.get(key) for key in keys]
        return [None if data is None else decode(data, key) for key, data in zip(keys, encoded, strict=True)]

    def claim(self, key: str, message: Message) -> Message:
        with self.board.changed:
            standing = self.board.messages.setdefault(key, msgspec.json.encode(message))
            self.board.changed.notify_all()
        return decode(standing, key)

    def count(self, key: str) -> int:
        with self.board.changed:
            # No notify: `wait` waits for messages, not for counters.
            self.board.counters[key] = self.board.counters.get(key, 0) + 1
            return self.board.counters[key]

    def wait(self, key: str, seconds: float) -> bool:
        with self.board.changed:
            return self.board.changed.wait_for(lambda: key in self.board.messages, seconds)

    def delete(self, keys: Sequence[str]) -> None:
        with self.board.changed:
            for key in keys:
                self.board.messages.pop(key, None)
                self.board.counters.pop(key, None)

    def job(self) -> str:
        return self.board.job

    def lane(self, name: str) -> MemoryRoster:
        if name not in self._lanes:
            made = self._lanes[name] = MemoryRoster(self.rank, self.world_size, self.board.lane(name))
            made._base = self.base()
        return self._lanes[name]

    def base(self) -> MemoryRoster:
        return self._base or self

    def bounded(self) -> MemoryRoster:
        return self

    def way(self) -> tuple[str, str]:
        return "", ""

    def serves(self) -> bool:
        return False
