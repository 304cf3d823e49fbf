"""Finds out what a file is, and has the right reader read it into the evidence."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from holdfast._recording import EVENTS
from holdfast._watch.collector import Collector
from holdfast._watch.dumps import is_stacks, rank_of_name, read_json, read_pickle, read_stacks
from holdfast._watch.evidence import Evidence, Source
from holdfast._watch.log import LogReader
from holdfast._watch.ras import is_ras, read_ras
from holdfast._watch.shared_call import ROLL_CALLS, parts
from holdfast.errors import BadInput

LARGEST_DUMP = 256 << 20
"""Bytes of a dump that is read as a whole; logs are streamed."""
FILES = 20_000
_IS_OF_RANK = re.compile(r"^rank-\d+\.json$")
_NO_EVIDENCE = (
    ".part",
    ".safetensors",
    ".distcp",
    ".pt",
    ".pth",
    ".bin",
    ".npy",
    ".py",
    ".so",
    ".zip",
    ".gz",
)
"""Files of a folder that are not looked at."""


def read_all(paths: Iterable[str]) -> Evidence:
    """Read files, and all files of folders, into one evidence. Raises BadInput."""
    collector = Collector()
    for path in map(_newest_call, paths):
        for part in parts(path):
            if part.number:
                collector.remark("job", part.said(), Source(path))
        for file in _files(path):
            _read(file, collector)
    if not collector.files:
        raise BadInput("There is nothing to read.", hint="Give logs, dumps, or a folder of them.")
    return collector.evidence()


def _newest_call(path: str) -> str:
    """Return the folder of a run's newest call: an earlier one tells of another wait."""
    calls = os.path.join(path, ROLL_CALLS)
    return os.path.join(calls, max(os.listdir(calls), default="")) if os.path.isdir(calls) else path


def _files(path: str) -> list[str]:
    if not os.path.isdir(path):
        return [path]
    if os.path.basename(os.path.dirname(os.path.abspath(path))) == ROLL_CALLS:
        names = sorted(name for name in os.listdir(path) if _IS_OF_RANK.match(name))
        return list(filter(os.path.isfile, (os.path.join(path, name) for name in names)))
    found = sorted(
        file
        for folder, _, names in os.walk(path)
        if folder != os.path.join(path, EVENTS)  # they tell when, and not why
        for name in names
        # Nobody may ever write to a FIFO.
        if not name.endswith(_NO_EVIDENCE) and os.path.isfile(file := os.path.join(folder, name))
    )
    if not found:
        raise BadInput(f"{path} has no files.")
    if len(found) > FILES:
        raise BadInput(f"{path} has {len(found)} files.", hint="Give those that tell of the hang.")
    return found


def _read(path: str, collector: Collector) -> None:
    name = os.path.basename(path) if rank_of_name(os.path.basename(path)) is not None else path
    rank, is_later = rank_of_name(path), "again" in os.path.basename(path)
    try:
        with open(path, "rb") as file:
            head = file.read(1 << 14)
            file.seek(0)
            collector.files.append(path)
            start = head.lstrip()[:1]
            if head[:1] == b"\x80" or start in (b"{", b"["):
                if head[:1] == b"\x80":
                    read_pickle(_whole(file.read(LARGEST_DUMP + 1), path), collector, name, rank)
                    return
                if _is_json(head):
                    read_json(_whole(file.read(LARGEST_DUMP + 1), path), collector, name, rank, is_later)
                    return
            text = head.decode(errors="replace")
            lines = (
                line.decode(errors="replace").rstrip() for line in iter(lambda: file.readline(1 << 16), b"")
            )
            if is_stacks(text):
                read_stacks(lines, collector, name, rank, is_later)
                return
            if is_ras(text):
                read_ras(lines, collector, name)
                file.seek(0)  # the log may go on behind it
            LogReader(collector, name, rank).read(file)
    except OSError as error:
        raise BadInput(f"{path} can't be read: {error.strerror}.") from None


def _is_json(head: bytes) -> bool:
    """Return whether a file is JSON, and no log whose first line begins with a bracket."""
    start = head.lstrip()
    return start[1:].lstrip()[:1] in (b'"', b"{", b"}", b"]") and b'"' in start[:200]


def _whole(data: bytes, path: str) -> bytes:
    if len(data) > LARGEST_DUMP:
        raise BadInput(f"{path} has more than {LARGEST_DUMP >> 20} MiB, and is no log.")
    return data
