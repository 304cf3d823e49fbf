"""Message authentication: each message carries a keyed hash (MAC) over its key and content, the seal.

A TCPStore serves every client that can reach its port. Messages without the job's seal are refused, so a
message from another job, an earlier run of this one, or a client without the secret can't decide a save.
docs/security.md lists the limits of this protection.
"""

from __future__ import annotations

import hmac
import logging
from hashlib import blake2b

from holdfast.errors import RosterLost

log = logging.getLogger("holdfast")
_SIZE = 8
_HEX = 2 * _SIZE
TOLD = 8
"""Maximum number of warnings about foreign messages per process."""


class Seal:
    """Signs and checks messages with a secret that all ranks of a job share."""

    def __init__(self, *secrets: str) -> None:
        # Hashed first, because BLAKE2b takes a key of 64 bytes at most and HOLDFAST_SECRET may be longer.
        self._key = blake2b("\0".join(secrets).encode(), digest_size=32).digest()
        self._foreign: set[str] = set()
        """Keys of foreign messages that were logged."""
        self.job = self._of("job", b"").decode()
        """A name of the job, equal for all processes with the secret."""

    def sign(self, key: str, data: bytes) -> bytes:
        """Return the data with its seal in front."""
        return self._of(key, data) + data

    def check(self, key: str, sealed: bytes) -> bytes:
        """Return the data without its seal. Raises RosterLost if it is not the seal of this job."""
        seal, data = sealed[:_HEX], sealed[_HEX:]
        # Not `==`: its time would tell how many leading characters of a guess are right.
        if not hmac.compare_digest(seal, self._of(key, data)):
            what = f"The message {key!r} in the store does not carry this job's seal, so it was not read."
            # Logged also for optional messages, whose reader goes on without them.
            if key not in self._foreign and len(self._foreign) < TOLD:
                self._foreign.add(key)
                log.warning("%s Something else writes into this store; see docs/security.md.", what)
            raise RosterLost(
                what,
                details={"foreign": True},
                hint="Something else writes into the store of this job: another job on the same port, "
                "another value of HOLDFAST_SECRET on some ranks, or a stranger. See docs/security.md.",
            )
        return data

    def _of(self, key: str, data: bytes) -> bytes:
        # The key is hashed, too, so that a message copied to another key is refused. In hex, because
        # `compare_set` of torch's stores takes text.
        return blake2b(key.encode() + b"\0" + data, key=self._key, digest_size=_SIZE).hexdigest().encode()
