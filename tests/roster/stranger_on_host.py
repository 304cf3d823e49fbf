"""A stranger on a host of his own, at the ports of a job's ranks: an attack for some seconds, and then one line.

python -m tests.roster.stranger_on_host HOST PORT WORLD ATTACK SECONDS      HOST, PORT: of the message store
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from tests.support.forger import Forger

HELD = 2000
"""Connections that he keeps open at once."""
FLOOD = 10_000

ATTACKS: dict[str, Callable[[str], bytes]] = {
    "garbage": lambda token: os.urandom(5000),
    "silence": lambda token: b"",
    "token": lambda token: token.encode(),
    "length": lambda token: b"\xff" * 7 + b"\x7f",
    "flood": lambda token: b"",
}


def attack(what: str, ranks: list[tuple[str, int, str]], seconds: float) -> int:
    """Connect again and again; return how often. A flood has 10,000 connections at least."""
    ends, made, held = time.monotonic() + seconds, 0, deque[socket.socket]()
    while time.monotonic() < ends or (what == "flood" and made < FLOOD):
        for address, port, token in ranks:
            one = socket.socket()
            # In a flood he does not wait until he is served.
            one.settimeout(0.0 if what == "flood" else 1.0)
            with suppress(OSError):
                made += 1
                one.connect((address, port))
                one.sendall(ATTACKS[what](token))
            held.append(one)
        while len(held) > HELD:
            held.popleft().close()
        if what != "flood":
            time.sleep(0.01)
    return made


def main(host: str, port: str, world: str, what: str, seconds: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (HELD + 100, HELD + 100))
    forger, ranks = Forger(host, int(port)), []
    while len(ranks) < int(world):
        who = forger.read(f"at/{len(ranks)}")["who"]
        if who.get("port"):
            ranks.append((who["address"], who["port"], who["token"]))
        else:  # it listens from its next beat on
            time.sleep(0.1)
    print("made", attack(what, ranks, float(seconds)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
