"""Reads the event logs of a run folder, in bounded memory. Invalid lines are skipped and counted."""

from __future__ import annotations

import errno
import os
import re
from typing import NamedTuple

import msgspec

from holdfast._core.base.shared_folder import SharedFolder
from holdfast._core.base.values import NO_JSON
from holdfast._core.process.recording import EVENTS, EventLine
from holdfast._core.ready import ready
from holdfast._watch.collector import RANKS
from holdfast.errors import BadInput

IN_ALL = 256 << 20
"""Maximum number of bytes read in total, divided among the ranks; the newest lines of each are kept."""
LONGEST = 1 << 16
"""Maximum length of a line in bytes."""
LATEST = 1e11
"""Upper bound for a valid Unix time."""
_NO_FILE = {errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EPERM}
"""Error codes for a file that is missing or not a regular file."""
_FILE = re.compile(r"rank-([0-9]{1,6})(\.old)?\.jsonl")


class EventLogs(NamedTuple):
    """The event logs of all ranks of a run."""

    ranks: dict[int, list[EventLine]]
    """The lines of each rank, in the order written."""
    skipped: int
    """Number of invalid lines."""


def read_events(run: str, in_all: int = IN_ALL) -> EventLogs:
    """Read the event logs in a run folder; there may be none. in_all: maximum number of bytes. Raises
    BadInput if they can't be read."""
    logs, skipped = {}, 0
    try:
        with SharedFolder(run, EVENTS, of_anyone=True) as folder:
            found = map(_FILE.fullmatch, folder.list())
            ranks = sorted({int(one[1]) for one in found if one is not None and int(one[1]) < RANKS})
            for rank in ranks:
                logs[rank], wrong = _read(folder, f"rank-{rank}", in_all // len(ranks))
                skipped += wrong
    except (FileNotFoundError, NotADirectoryError):
        return EventLogs({}, 0)
    except OSError as error:
        folder_name = os.path.join(run, EVENTS)
        raise BadInput(f"The event logs in {folder_name} can't be read: {error.strerror}.") from None
    return EventLogs(logs, skipped)


def _read(folder: SharedFolder, start: str, most: int) -> tuple[list[EventLine], int]:
    """Return the newest lines of one rank, and the number of invalid ones. start: prefix of file names."""
    data, read = b"", set()
    for name in (
        f"{start}.jsonl",
        f"{start}.old.jsonl",
    ):  # log rotation may rename the first to the second meanwhile
        room = most - len(data)
        if room <= 0:
            continue
        try:
            with folder.open(name) as file:
                if (number := os.fstat(file.fileno()).st_ino) in read:
                    continue
                read.add(number)
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - room, 0))
                part = file.read(room)
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            continue
        data = (part if size <= room else part.partition(b"\n")[2]) + data
    lines, skipped = [], 0
    decode = msgspec.json.Decoder(ready(EventLine)).decode
    for text in data[: data.rfind(b"\n") + 1].splitlines():  # the last line may be incomplete
        try:
            line = decode(text) if len(text) <= LONGEST else None
        except NO_JSON:
            line = None
        if line is None or not 0 <= line.at < LATEST:
            skipped += 1
        else:
            lines.append(line)
    return lines, skipped
