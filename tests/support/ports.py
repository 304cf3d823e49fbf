"""Ports for servers that other processes start."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

HOST = "127.0.0.1"


@contextmanager
def held_port() -> Iterator[int]:
    """Yield a free port, and hold it: until the end of the block the kernel chooses it for nobody, and a server
    that sets SO_REUSEADDR (torch's, Python's, node's do) can listen on it.

    Between a port that is only asked for and the server that listens on it, another process can get the port."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((HOST, 0))
        yield held.getsockname()[1]
