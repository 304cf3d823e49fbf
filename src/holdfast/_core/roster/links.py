"""TCP connections between ranks on different hosts, by which the kernel reports the end of a process.

A rank listens on a port. Another connects, and reads the token that this rank has published in the message
store; nothing is sent back, so there is nothing to parse. The kernel accepts connections and answers probes
also while the process holds the GIL or is stopped, and ends them when the process has ended, however it did.
An end or a refusal counts only on a path over which the token has come before: a port that a firewall closes
looks just like one that nobody listens on.

A firewall that begins to refuse later looks like that, too, but for one thing: the kernel of a process that
ends closes its connections in order (FIN), and a firewall resets them (RST).

All of this runs on the heart's thread.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto

from holdfast._core.process.heart import heart

BACKLOG = 128
"""The listen backlog, and the maximum number of connections accepted between two beats."""
HELD = 64
"""Maximum open connections; beyond it (unknown clients), the oldest are closed."""
CONNECT_WITHIN = 1.0
"""Connect timeout in seconds; a reachable host answers in milliseconds."""
_PROBES = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 6}
"""The kernel probes a connection without data every 2 s; after six probes it is broken."""
_UNANSWERED = 2
"""Consecutive unanswered keepalive probes after which the other host counts as unreachable."""
_RESET = struct.pack("ii", 1, 0)
"""struct linger: close with a reset (RST), which peers do not take for the end of this process."""
_NO_ANSWER = {None, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
"""errno values for an unreachable host; None: Python's own `TimeoutError`."""
_BYE = b"!"
"""Sent by a process that stops listening and goes on; no token has this character."""


class Listener:
    """The listening socket of this process.

    address: the IP address of this host. on_knock: called when a client has connected.
    """

    def __init__(self, address: str, token: str, on_knock: Callable[[], None]) -> None:
        self._token, self._on_knock = token.encode(), on_knock
        self._held: dict[socket.socket, None] = {}
        """Accepted connections, oldest first."""
        self._socket = socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=BACKLOG
        )
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        heart.on_readable(self._socket, self.accept)

    def close(self) -> None:
        for connection in list(self._held):
            with suppress(OSError):
                connection.send(_BYE)
            self._let_go(connection)
        heart.forget(self._socket)
        self._socket.close()

    def accept(self) -> None:
        """Hold connections that were made, so many at most. To be called now and then, too: with no
        descriptor left, or after so many, the heart looks here no more."""
        try:
            for _ in range(BACKLOG):
                connection, _ = self._socket.accept()
                self._hold(connection)
                self._on_knock()
        except BlockingIOError:
            heart.on_readable(self._socket, self.accept)
            return
        except OSError:
            pass  # the connection waits on, and would wake the heart again and again
        # After so many, too: a stranger may connect as fast as the heart accepts, which has more to do.
        heart.forget(self._socket)

    def _hold(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._held[connection] = None
        if len(self._held) > HELD:
            oldest = next(iter(self._held))
            oldest.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._let_go(oldest)
        # The other side sends nothing: what can be read is its end.
        heart.on_readable(connection, lambda: self._let_go(connection))
        with suppress(OSError):
            connection.send(self._token)

    def _let_go(self, connection: socket.socket) -> None:
        self._held.pop(connection, None)
        heart.forget(connection)
        connection.close()


class Path(Enum):
    """The state of the process at the other end of a connection, from the kernel."""

    OPEN = auto()
    """It is alive."""
    ENDED = auto()
    """It has ended: its kernel has closed the connection in order, and its port refuses another."""
    REFUSED = auto()
    """Its port refuses connections: it has ended, or a firewall has closed it."""
    UNREACHABLE = auto()
    """Its host does not answer."""
    UNKNOWN = auto()
    """Its token has not come over this path, or it does not listen any more."""


class Link:
    """A permanent connection to one rank's process. on_end: called when the connection has ended."""

    def __init__(self, address: str, port: int, token: str, on_end: Callable[[], None]) -> None:
        self._place, self._token, self._on_end = (address, port), token.encode(), on_end
        self._socket: socket.socket | None = None
        self._received = b""
        self._verified = False
        """Whether the token has been received."""
        self._closed = False
        """Whether a connection over which the token had come was closed in order, and none was made since."""
        self._over = False

    def look(self) -> Path:
        """Return the current state; connects first if there is no connection."""
        if self._over:
            return Path.UNKNOWN
        if self._socket is None:
            path = self._connect()
        else:
            path = Path.UNREACHABLE if _unanswered(self._socket) >= _UNANSWERED else Path.OPEN
        return path if self._verified else Path.UNKNOWN

    def is_up(self) -> bool:
        """Return whether a connection is open over which the token has come."""
        return self._socket is not None and self._verified

    def close(self) -> None:
        if self._socket is not None:
            heart.forget(self._socket)
            self._socket.close()
            self._socket = None

    def _connect(self) -> Path:
        try:
            made = socket.create_connection(self._place, CONNECT_WITHIN)
        except ConnectionRefusedError:
            return Path.ENDED if self._closed else Path.REFUSED
        except OSError as error:
            # Any other is of this process: it has no descriptor or port left, or may not connect.
            return Path.UNREACHABLE if error.errno in _NO_ANSWER else Path.UNKNOWN
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._socket, self._received = made, b""
        heart.on_readable(made, self._read)
        return Path.OPEN

    def _read(self) -> None:
        assert self._socket is not None
        in_order = True
        try:
            data = self._socket.recv(256)
        except BlockingIOError:
            return
        except OSError:  # reset, or the probes were not answered
            data, in_order = b"", False
        self._received += data
        came = self._received.removesuffix(_BYE) == self._token
        self._verified = self._verified or came
        if came:
            self._closed = not data and in_order
        self._over = came and self._received.endswith(_BYE)
        if not data or self._over or len(self._received) > len(self._token) + 1:
            self.close()
            if came:  # else whoever listens there now is a stranger: the next beat is soon enough
                self._on_end()


def _unanswered(connection: socket.socket) -> int:
    """Return the number of consecutive unanswered keepalive probes."""
    # `tcpi_probes` is the fourth byte of struct tcp_info, of linux/tcp.h.
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[3]


def knock(address: str, port: int) -> None:
    """Wake the heart of a process by connecting to its port."""
    with suppress(OSError):
        socket.create_connection((address, port), CONNECT_WITHIN / 5).close()
