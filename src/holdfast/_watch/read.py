"""Detects the type of a file, and reads it with the right reader into the evidence."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from itertools import islice

from holdfast._core.process.recording import EVENTS
from holdfast._watch.collector import Collector
from holdfast._watch.dumps import PICKLE, is_stacks, number_of_name, ranks_of_names, read_dump, read_stacks
from holdfast._watch.evidence import Evidence, SourceLine
from holdfast._watch.log import LogReader, is_of_one_rank
from holdfast._watch.log_lines import is_json_of_forwarder
from holdfast._watch.packed import HEAD, opened
from holdfast._watch.ras import is_ras, read_ras
from holdfast._watch.shared_call import ROLL_CALLS, parts
from holdfast.errors import BadInput

LARGEST_DUMP = 256 << 20
"""Maximum size of a dump in bytes, as it is read as a whole; logs are streamed."""
FILES = 20_000
_IS_OF_RANK = re.compile(r"^rank-\d+\.json$")
_NO_EVIDENCE = (".part", ".safetensors", ".distcp", ".pt", ".pth", ".bin", ".npy", ".py", ".so", ".zip")
"""Suffixes of files in folders that are skipped."""
_PACKED_LOG = re.compile(r"\.(?:log|out|err|txt)[-.\d]*\.gz$")


def read_all(paths: Iterable[str]) -> Evidence:
    """Read files, and all evidence in folders, into one `Evidence`. Raises BadInput."""
    collector = Collector()
    files: dict[str, bool] = {}
    """By path: was the file given by its name, rather than found in a folder?"""
    for path in map(_newest_call, paths):
        for part in parts(path, of_anyone=True):
            if part.number:
                collector.remark("job", part.said(), SourceLine(path))
        files |= dict.fromkeys(_files(path), not os.path.isdir(path))
    ranks, refused = ranks_of_names(files), list[BadInput]()
    for file, is_given in files.items():
        try:
            _read(file, ranks.get(file), collector)
            continue
        except OSError as error:
            problem = BadInput(f"{file} can't be read: {error.strerror}.")
        except BadInput as error:
            problem = error
        if is_given:
            raise problem
        refused.append(problem)
        # A folder may have unrelated and incomplete files, too.
        collector.remark("not read", problem.message, SourceLine(file))
    if len(refused) == len(files):
        nothing = BadInput("There is nothing to read.", hint="Give logs, dumps, or a folder of them.")
        raise refused[0] if refused else nothing
    return collector.evidence()


def _newest_call(path: str) -> str:
    """Return the folder of a run's newest roll call: earlier ones were about other waits."""
    calls = os.path.join(path, ROLL_CALLS)
    return os.path.join(calls, max(os.listdir(calls), default="")) if os.path.isdir(calls) else path


def _files(path: str) -> list[str]:
    if not os.path.isdir(path):
        return [path]
    if os.path.basename(os.path.dirname(os.path.abspath(path))) == ROLL_CALLS:
        names = sorted(name for name in os.listdir(path) if _IS_OF_RANK.match(name))
        return list(filter(os.path.isfile, (os.path.join(path, name) for name in names)))
    found = sorted(islice(_that_may_tell(path), FILES + 1))
    if not found:
        raise BadInput(f"{path} has no files.")
    if len(found) > FILES:
        raise BadInput(f"{path} has more than {FILES} files.", hint="Give those that tell of the hang.")
    return found


def _that_may_tell(path: str) -> Iterator[str]:
    for folder, _, names in os.walk(path):
        if folder == os.path.join(path, EVENTS):
            continue  # events show when something happened, but not why
        for name in names:
            may = _PACKED_LOG.search(name) if name.endswith(".gz") else not name.endswith(_NO_EVIDENCE)
            # Nobody may ever write to a FIFO.
            if may and os.path.isfile(file := os.path.join(folder, name)):
                yield file


def _read(path: str, rank: int | None, collector: Collector) -> None:
    name = os.path.basename(path) if number_of_name(path) or rank is not None else path
    is_later = "again" in os.path.basename(path)
    with opened(path) as file:
        head = file.peek(HEAD)[:HEAD]
        if head[:1] == PICKLE or _is_json(head):
            data = file.read(LARGEST_DUMP + 1)
            if len(data) > LARGEST_DUMP:
                raise BadInput(f"{path} has more than {LARGEST_DUMP >> 20} MiB, and is no log.")
            if rank is None and not data.lstrip().startswith(b"[") and (number := number_of_name(path)):
                rank = number[0]  # torch writes it behind the name that it is given for flight records
            read_dump(data, collector, name, rank, is_later)
            return
        text = head.replace(b"\0", b"").decode(errors="replace")
        lines = (
            line.replace(b"\0", b"").decode(errors="replace").rstrip()
            for line in iter(lambda: file.readline(1 << 16), b"")
        )
        if is_stacks(text):
            read_stacks(lines, collector, name, rank, is_later)
        elif is_ras(text):
            read_ras(lines, collector, name)
            rank = None
        else:
            if rank is not None and os.path.isfile(path):
                with opened(path) as again:
                    rank = rank if is_of_one_rank(again, rank) else None
            LogReader(collector, name, rank).read(file)
            return
    if os.path.isfile(path):
        with opened(path) as again:  # the dump may be part of a log
            LogReader(collector, name, rank).read(again)


def _is_json(head: bytes) -> bool:
    """Return whether a file is JSON, rather than a log that begins with a bracket or is a forwarder's."""
    start = head.lstrip()
    begins = start[:1] in (b"{", b"[") and start[1:].lstrip()[:1] in (b'"', b"{", b"}", b"]")
    return begins and b'"' in start[:200] and not is_json_of_forwarder(head.partition(b"\n")[0])
