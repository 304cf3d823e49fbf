"""The committer's work: read back what every rank wrote, check it, make the index, publish it."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from holdfast import events
from holdfast._core.base.deadline import Deadline
from holdfast._core.base.values import Message
from holdfast._core.format.columns import Columns
from holdfast._core.format.index_layout import encode
from holdfast._core.format.names import INDEX, WrittenFile, data_file
from holdfast._core.io.file_writer import About, Indexes
from holdfast._core.io.index_file import embedded_index, open_index
from holdfast._core.io.on_threads import on_threads
from holdfast._core.io.removal import Named
from holdfast._core.plan.agreement import check_vanished
from holdfast._core.plan.merge import Merger, same_tensors
from holdfast._core.protocol.messages import Final, Written
from holdfast._core.store.base import (
    VERSION_BYTES,
    VISIBLE_WITHIN,
    NotFound,
    Store,
    Unsettled,
    bounded,
    capabilities,
    open_at,
    version_of,
)
from holdfast._version import __version__
from holdfast.errors import (
    CommitUnconfirmed,
    CorruptCheckpoint,
    HoldfastError,
    NotCommitted,
    SaveFailed,
    StorageError,
)

log = logging.getLogger("holdfast")
READERS = 32
"""Number of threads that read back files; they mostly wait for storage."""
FILES_AT_ONCE = 8 * READERS
AT_ONCE = 0.002
"""If reading back the first file takes less than this many seconds, storage is fast and one thread is used,
because several would only contend."""
LOOK_AGAIN = 10.0
"""Seconds for which a commit checks for its index after an unexplained failure of the store."""
LOOK = 1.0
"""Seconds for a look at the index at least, also when the deadline has passed: what it finds decides what the
call says."""


NOT_OURS = (
    "Something else writes into the message store of this job; see docs/security.md. Nothing was committed."
)


def digest_of_report(report: Message) -> str:
    """Return a digest of an integration's report of a rank. The rank's files contain it, so that the report
    can't be forged."""
    return blake2b(msgspec.json.encode(report), digest_size=16).hexdigest()


class _Reported(NamedTuple):
    """A data file as a rank reports it."""

    rank: int
    part: int
    parts: int
    """Number of data files of this rank."""
    file: WrittenFile
    report: Message


@cache
def versions() -> dict[str, str]:
    """Return the versions of the software that writes a checkpoint; for people who read the index."""
    from importlib.metadata import version  # slow to import, and only a save needs it

    packages = {"python": platform.python_version(), "holdfast": __version__}
    for name in ("torch", "numpy"):
        try:
            packages[name] = version(name)
        except Exception:
            # A package without metadata must not fail a save: only people read this.
            packages[name] = "unknown"
    return packages


@dataclass
class Commit:
    """One commit. The protocol calls its phases in order."""

    store: Store
    title: str
    deadline: Deadline
    about: About
    replaced_version: bytes | None
    expected: Sequence[str] | None
    """Names that the save must contain, or None."""
    expected_from: str
    last_writer: Callable[[str], list[int]]
    tick: Callable[[], None]
    may_be_empty: bool = False
    is_part: bool = False
    replaced: Named = field(default_factory=Named)
    """What the index names that this one replaces."""
    before: Store | None = None
    """The checkpoint of the previous step, to check whether any tensor has changed."""
    own: Indexes = field(default_factory=dict)
    """The indexes of the committer's own files, if it has written them itself."""
    data: bytes = b""
    file_names: list[str] = field(default_factory=list)

    def prepare(self, written: dict[int, Written]) -> None:
        """Read back and check what all ranks wrote, and make the index. Every error is found here, before
        anything is visible."""
        self._check_agreement(written)
        merger = Merger()
        files = self._listed(written)
        # From storage, not from messages: only what this host can read back is committed. A part of the files
        # at a time, so that the names of all ranks are not in memory at once.
        clock, threads, start = self.deadline.clock, 1, 0
        while start < len(files):
            some = files[start : start + (FILES_AT_ONCE if start else 1)]
            begun = clock.now()
            read = on_threads(min(threads, len(some)), "holdfast-read-back", self._read_back, some)
            if not start and clock.now() - begun > AT_ONCE:
                threads = READERS
            for file, columns in zip(some, read, strict=True):
                merger.add(file.rank, columns)
                self.tick()
            start += len(some)
        columns = merger.finish(self.tick, is_slice=self.is_part)
        if self.expected is not None:
            check_vanished(columns.names, self.expected, self.expected_from, self.last_writer)
        self.tick()
        if not columns.names and not self.may_be_empty:
            # An empty checkpoint would be the newest one, from which a restart loads.
            raise SaveFailed(f"{self.title}: no rank holds anything to save.")
        self._warn_if_stale(columns)
        # Last, so that the time is that of the commit; the index is encoded once and published as it is.
        self.about |= {"created": time.time(), "versions": versions(), "ranks": len(written)}
        self.data = encode(columns, self.about, narrow=True)
        self.file_names = columns.file_names
        self.tick()

    def _warn_if_stale(self, columns: Columns) -> None:
        """Warn if no tensor has changed since the previous step, which would otherwise go unnoticed."""
        if self.before is None:
            return
        with suppress(HoldfastError), open_index(self.before) as index:
            # If the number of chunks differs, no digests need to be read. A step that is saved again is
            # expected to have the same bytes.
            if index.chunks != len(columns.file) or index.about.get("step") == self.about["step"]:
                return
            count = same_tensors(columns, index.select())
            if count:
                log.warning(
                    "%s: not one of its %d tensors has changed since step %s (%s). Is the optimizer "
                    "stepping, and is what is saved the state that it changes?",
                    self.title,
                    count,
                    index.about.get("step"),
                    self.before.url,
                )
                events.emit("save.stale", step=self.about["step"], path=self.store.url, tensors=count)
        self.tick()

    def _check_agreement(self, written: dict[int, Written]) -> None:
        lead = min(written)
        first = written[lead]
        for rank, other in sorted(written.items()):
            # Ranks with different steps never meet: the step is in the call's signature. The grid is not.
            for what, mine, theirs in (("step", first.step, other.step), ("grid", first.grid, other.grid)):
                if mine != theirs:
                    raise SaveFailed(
                        f"{self.title}: rank {lead} saves {what} {mine!r}, rank {rank} {theirs!r}.",
                        rank=rank,
                        hint="All ranks must save the same step of the same run.",
                    )

    def _listed(self, written: dict[int, Written]) -> list[_Reported]:
        """Return the files that ranks report, each as what it must prove to be. A message may be late, or
        forged: of a rank only the files count that this attempt gives it, and all of them."""
        files: list[_Reported] = []
        for rank in sorted(written):
            parts = written[rank].files
            for part, file in enumerate(parts):
                # Nothing outside of `data` is opened, nor a file of the checkpoint that is replaced.
                own = data_file(str(self.about["attempt"]), rank, part)
                if file.name != own or own in self.replaced.files:
                    raise SaveFailed(
                        f"{self.title}: rank {rank} reports a file named {file.name!r}; this attempt "
                        f"gives it the name {own!r}, and no older checkpoint has it.",
                        rank=rank,
                        hint=NOT_OURS,
                    )
                files.append(_Reported(rank, part, len(parts), file, written[rank].report))
            if not parts:  # a rank without chunks has one, too
                raise SaveFailed(f"{self.title}: rank {rank} reports no file.", rank=rank, hint=NOT_OURS)
        return files

    def _check_origin(self, reported: _Reported, about: Mapping[str, object], where: str) -> None:
        """Raise unless a file says itself that this rank has written it in this attempt, as this part."""
        rank, part, parts, _, report = reported
        wanted = {"attempt": self.about["attempt"], "step": self.about["step"]}
        wanted |= {"rank": rank, "part": part, "parts": parts}
        wanted |= {"report": digest_of_report(report) if report else None}
        stated = {name: about.get(name) for name in wanted}
        if stated != wanted:
            raise SaveFailed(
                f"{self.title}: rank {rank} reports {where}, which says that it is of {stated}, not of "
                f"{wanted}.",
                rank=rank,
                hint=NOT_OURS,
            )

    def _read_back(self, reported: _Reported) -> Columns:
        """Return the index embedded in a data file of a rank, read from storage and verified."""
        rank, file = reported.rank, reported.file
        where = f"{self.store.url}/{file.name}"
        clock = self.deadline.clock
        ends, ticked = clock.now() + min(VISIBLE_WITHIN, self.deadline.left()), clock.now()
        while True:
            try:
                columns = self._stored(reported, where)
                self._check_links(columns)
            except NotFound:
                if clock.now() >= ends:
                    raise SaveFailed(
                        f"{self.title}: rank {rank} wrote {file.name}, but it is not to be seen in "
                        f"{self.store.url} from here.",
                        rank=rank,
                        hint="All ranks must write to one shared file system.",
                    ) from None
                # A committer that waits in silence would look stalled to the others.
                if clock.now() >= ticked + 1.0:
                    self.tick()
                    ticked = clock.now()
                    log.info("%s: waiting to see %s, which rank %d wrote.", self.title, file.name, rank)
                clock.sleep(0.05)
            except (CorruptCheckpoint, StorageError) as error:
                # The error names the rank that wrote the file, not the committer, which only reads it.
                error.rank = rank
                raise
            else:
                self.tick()
                return columns

    def _stored(self, reported: _Reported, where: str) -> Columns:
        file = reported.file
        sealed, columns = self.own.pop(file.name, (b"", None))
        is_own = columns is not None and int(columns.file_size[0]) == file.size
        is_own = is_own and len(sealed) == file.index_size == file.size - file.index_start
        if columns is not None and is_own and capabilities(self.store).confirms:
            return columns
        with closing(open_at(self.store, file.name, file.index_start)) as reader:
            # The embedded index verifies itself. The data is not read again, so check its size.
            if not reader.size == file.size == file.index_start + file.index_size:
                raise CorruptCheckpoint(f"{where} has {reader.size} bytes, but its rank wrote {file.size}.")
            # Bytes that this process has made need no check but that they are in storage.
            if columns is None or reader.read(file.index_start, file.index_size) != sealed:
                stop = file.index_start + file.index_size
                index = embedded_index(reader, file.index_start, stop, where)
                self._check_origin(reported, index.about, where)
                columns = index.embedded()
            return columns

    def _check_links(self, columns: Columns) -> None:
        """Raise if a linked earlier file is missing, or has another size than its rank reported."""
        for name, size in zip(columns.file_names[1:], columns.file_size[1:].tolist(), strict=True):
            entry = self.store.stat(name)
            if entry is None:
                raise NotFound(f"{self.store.url}/{name} is not there.")
            if entry.size != size:
                raise CorruptCheckpoint(f"{self.store.url}/{name} has {entry.size} bytes, not {size}.")

    def publish(self) -> Final:
        """Publish the index atomically and durably; from here on the checkpoint exists.

        Raises CommitUnconfirmed unless it is known that the index is not in place: after any other error the
        ranks delete the data that the index names.
        """
        try:
            self.store.publish(INDEX, self.data, self.replaced_version)
        except BaseException as error:
            # Also Ctrl-C and MemoryError, which can come right after the index was put in place.
            unconfirmed = self._unconfirmed(error)
            if unconfirmed is None:
                raise
            raise unconfirmed from error
        return Final()

    def _unconfirmed(self, error: BaseException) -> CommitUnconfirmed | None:
        """Return the error to raise after a failure to publish, or None if the index is known not to be in
        place."""
        # By contract any error of the store except `Unsettled` means: not in place, and never will be. Look
        # all the same: without stable inodes a store can take its own index for another's.
        known = isinstance(error, HoldfastError) and not isinstance(error, Unsettled)
        in_place = error.in_place if isinstance(error, Unsettled) else False
        looked = in_place or self._is_there(0.0 if known else LOOK_AGAIN)
        reason = error.message if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
        rank = error.rank if isinstance(error, HoldfastError) else None
        if looked:
            return CommitUnconfirmed(
                f"{self.title}: the index is in place, but storage could not confirm that it is durable "
                f"({reason})",
                rank=rank,
                hint="Nothing was deleted. It may be gone after a power cut; look with `holdfast latest`.",
            )
        # After `Unsettled` a look that finds nothing proves nothing: a server may act on the request later.
        if known or (looked is False and not isinstance(error, Unsettled)):
            return None
        return CommitUnconfirmed(
            f"{self.title}: storage did not tell whether the index was put in place ({reason})",
            rank=rank,
            hint="Nothing was deleted. Once storage answers, `holdfast latest` tells, and `holdfast prune` "
            "sweeps what no index names.",
        )

    def _is_there(self, seconds: float) -> bool | None:
        """Return whether the published index is this commit's; None if storage did not answer within
        `seconds`."""
        clock = self.deadline.clock
        ends = clock.now() + seconds
        store = bounded(self.store, Deadline(max(seconds, LOOK), clock))
        while True:
            try:
                return version_of(store, INDEX) == self.data[-VERSION_BYTES:]
            except Exception as error:
                log.debug("%s: the index can't be looked at: %s", self.title, error)
            if clock.now() >= ends:
                return None
            clock.sleep(0.1)


def is_of_attempt(store: Store, attempt: str) -> bool | None:
    """Return whether the index in storage was written by this attempt; None if unknown."""
    # Three answers: only False allows deletion, only True proves success.
    try:
        with open_index(store) as index:
            return index.about.get("attempt") == attempt
    except NotCommitted:
        return False
    except HoldfastError:
        return None
