"""Reads the event logs of a run folder, in bounded memory. What nobody can have written is skipped and
counted."""

from __future__ import annotations

import os
import re
import stat
from typing import NamedTuple

import msgspec

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
        files: dict[int, list[str]] = {}
        for name in sorted(names, key=lambda name: ".old." not in name):  # the older file first
            if (found := _FILE.fullmatch(name)) is not None and int(found[1]) < RANKS:
                files.setdefault(int(found[1]), []).append(os.path.join(folder, name))
        logs, skipped = {}, 0
        for rank, paths in sorted(files.items()):
            logs[rank], wrong = _read(paths, in_all // len(files))
            skipped += wrong
    except OSError as error:
        raise BadInput(f"The event logs in {folder} can't be read: {error.strerror}.") from None
    return EventLogs(logs, skipped)


def _read(paths: list[str], most: int) -> tuple[list[Line], int]:
    """Return the newest lines of one rank, and how many of them are none."""
    data = b""
    for path in reversed(paths):
        room = most - len(data)
        # A pipe in its place would wait for a writer.
        if room > 0 and stat.S_ISREG(os.stat(path).st_mode):
            with open(path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - room, 0))
                part = file.read(room)
                data = (part if size <= room else part.partition(b"\n")[2]) + data
    lines, skipped = [], 0
    decode = msgspec.json.Decoder(Line).decode
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
