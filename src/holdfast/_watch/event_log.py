"""Reads the event logs of a run folder, in bounded memory. What nobody can have written is skipped and
counted."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from typing import NamedTuple

import msgspec

from holdfast._ready import ready
from holdfast._recording import EVENTS, Line
from holdfast._watch.collector import RANKS
from holdfast.errors import BadInput

IN_ALL = 256 << 20
"""Bytes that are read of all ranks together: the newest ones of each."""
LONGEST = 1 << 16
"""Bytes of a line."""
LATEST = 1e11
"""No time is after this one, in seconds since 1970."""
_FILE = re.compile(r"rank-([0-9]{1,6})(\.old)?\.jsonl")


class EventLogs(NamedTuple):
    """What the ranks of a run have recorded."""

    ranks: dict[int, list[Line]]
    """The lines of each rank, as they were written."""
    skipped: int
    """Lines that were no event."""


def read_events(run: str, in_all: int = IN_ALL) -> EventLogs:
    """Read what is recorded in a run folder, which may be nothing. in_all: bytes to read. Raises BadInput if
    it can't be read."""
    folder = os.path.join(run, EVENTS)
    try:
        names = os.listdir(folder) if os.path.isdir(folder) else []
        found = (_FILE.fullmatch(name) for name in names)
        ranks = sorted({int(one[1]) for one in found if one is not None and int(one[1]) < RANKS})
        logs, skipped = {}, 0
        for rank in ranks:
            logs[rank], wrong = _read(os.path.join(folder, f"rank-{rank}"), in_all // len(ranks))
            skipped += wrong
    except OSError as error:
        raise BadInput(f"The event logs in {folder} can't be read: {error.strerror}.") from None
    return EventLogs(logs, skipped)


def _read(start: str, most: int) -> tuple[list[Line], int]:
    """Return the newest lines of one rank, and how many of them are none. start: of its files' paths."""
    data, read = b"", set()
    for path in (f"{start}.jsonl", f"{start}.old.jsonl"):  # the first becomes the second, also meanwhile
        room = most - len(data)
        with suppress(FileNotFoundError):
            if room <= 0 or not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would wait for a writer
                continue
            with open(path, "rb") as file:
                if (number := os.fstat(file.fileno()).st_ino) in read:
                    continue
                read.add(number)
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - room, 0))
                part = file.read(room)
            data = (part if size <= room else part.partition(b"\n")[2]) + data
    lines, skipped = [], 0
    decode = msgspec.json.Decoder(ready(Line)).decode
    for text in data[: data.rfind(b"\n") + 1].splitlines():  # the last one may be half written
        try:
            line = decode(text) if len(text) <= LONGEST else None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            line = None
        if line is None or not 0 <= line.at < LATEST:
            skipped += 1
        else:
            lines.append(line)
    return lines, skipped
