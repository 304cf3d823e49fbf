"""The file in a run folder that names the job that saves there: see `owner`."""

from __future__ import annotations

import time
from contextlib import closing

import msgspec

from holdfast._core.base.values import NO_JSON
from holdfast._core.format.names import OWNER
from holdfast._core.ready import ready
from holdfast._core.store.base import VERSION_BYTES, NotFound, Store


class Owner(msgspec.Struct, frozen=True):
    """The content of the file."""

    job: str
    """The same on all ranks of a job, and different for every other job."""
    name: str
    """The launcher's name for the job, which restarts keep; "" if it has none."""
    restarts: int
    process: str
    rank: int
    host: str
    machine: str
    pid: int
    started: str
    """By the kernel's clock; distinguishes a later process with the same pid."""
    since: float
    """Wall-clock seconds, for messages."""
    beat: int
    took: bool = False
    """Whether this owner, or an earlier one, took the folder from an owner not known to have ended."""
    ended: bool = False
    """Whether it has released the folder."""
    under_way: tuple[str, ...] = ()
    """Attempts of saves that may still be committed (`attempts`)."""
    void: tuple[str, ...] = ()
    """Attempts that are known never to be committed: what they have left may be deleted."""
    doubtful: tuple[str, ...] = ()
    """Attempts of owners before this one that are not known to have ended."""
    version: str = ""
    """Random, new at each write: the last bytes of the file identify its version."""

    def __str__(self) -> str:
        begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.name or 'a job'} (rank {self.rank}, host {self.host}, pid {self.pid}, since {begun})"


def read_owner(store: Store) -> tuple[Owner | None, bytes | None]:
    """Read the owner of a run folder and the version of the file; a damaged file has no owner."""
    try:
        reader = store.open(OWNER)
    except NotFound:
        return None, None
    with closing(reader):
        # Bounded, because the file may be damaged; an owner takes a few hundred bytes, and 15 an attempt.
        data = reader.read(0, 1 << 16)
    try:
        return msgspec.json.decode(data, type=ready(Owner)), data[-VERSION_BYTES:]
    except NO_JSON:
        return None, data[-VERSION_BYTES:]
