"""Somebody who has the address of the message store alone: he reads what lies there, and makes seals of it."""

from __future__ import annotations

import msgspec

from holdfast._core.base.options import read_environment
from holdfast._core.base.values import Message
from holdfast._core.roster.seal import Seal
from holdfast._core.roster.tcp_client import TcpClient

OF_TORCH = ("0//", "default_pg/0//", "")
"""Prefixes that versions of torch put before the keys of the default process group."""


class Forger:
    """A client of the store at an address. Use it after a rank has made its first call."""

    def __init__(self, host: str, port: int) -> None:
        self._client = TcpClient(host, port, 10.0)
        incarnation = read_environment().incarnation
        names = [f"{prefix}holdfast/{incarnation}/secret" for prefix in OF_TORCH]
        drawn = next(value.decode() for value in self._client.get(names) if value is not None)
        self.best = Seal(drawn, "", incarnation)
        self._prefix = f"holdfast/{Seal(drawn).job}/"

    def read(self, key: str) -> Message:
        """Return a message that is there: it is sealed, not encrypted."""
        (data,) = self._client.get([self._prefix + key])
        assert data is not None
        return msgspec.json.decode(data[data.index(b"{") :], type=Message)

    def write(self, key: str, message: object, seal: Seal | None = None) -> None:
        """Write a message; without a seal given, with the best that he can make."""
        name = self._prefix + key
        self._client.set(name, (seal or self.best).sign(name, msgspec.json.encode(message)))
        self._client.get([name])  # the server does not answer a `set`

    def close(self) -> None:
        self._client.close()
