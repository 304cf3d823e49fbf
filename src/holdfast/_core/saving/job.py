"""The save of one rank: collect the state, agree who writes what, write, commit, report.

The protocol (`protocol.core.save_steps`) drives a `SaveJob`: it calls `enter`, `row_digest`, `list_rows` and
`assign` (if rows have no declared replica), `write`, and on the committer `prepare`, `publish`, `mark` and
`tidy`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from holdfast._core.base.deadline import Deadline
from holdfast._core.base.values import Json
from holdfast._core.format.names import WrittenFile, data_file
from holdfast._core.io.file_writer import (
    DISCARDED_WITHIN,
    About,
    WriteRequest,
    discard,
    names_of,
    write_files,
)
from holdfast._core.io.old_steps import remove_marks, remove_replaced
from holdfast._core.io.references import can_refer
from holdfast._core.io.unchanged import Earlier, recall, remember
from holdfast._core.layout.tensor import Replica
from holdfast._core.plan.save import plan_save
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.protocol.call import begin_call
from holdfast._core.protocol.core import save_steps
from holdfast._core.protocol.job import Job, job_of
from holdfast._core.protocol.messages import Assigned, Final, RowList, Written
from holdfast._core.protocol.operation import Operation
from holdfast._core.protocol.phases import TRANSITIONS
from holdfast._core.saving.begin_commit import begin_commit
from holdfast._core.saving.cleanup import clean_up
from holdfast._core.saving.commit import LOOK, NOT_OURS, Commit, digest_of_report, is_of_attempt
from holdfast._core.saving.holders import Holders, assign
from holdfast._core.saving.one_at_a_time import publishing
from holdfast._core.saving.request import PREVIOUS, SaveRequest
from holdfast._core.state.flatten import build_shard_table, flatten, select
from holdfast._core.state.memory import CallerStreams
from holdfast._core.store.base import Entry, Folder, Kind, Store, bounded, capabilities, look_at_files
from holdfast._core.store.local import open_store
from holdfast.errors import CommitUnconfirmed, HoldfastError, IdleRanks, SaveFailed, StorageError

log = logging.getLogger("holdfast")
_NO_FOLDERS = Entry(Kind.FOLDER, 0, 0.0)


class SaveReport(msgspec.Struct, frozen=True):
    """The result of a committed save on this rank."""

    path: str
    step: int | None
    tensors: int
    """Number of names that this rank holds, objects included."""
    bytes_written: int
    """Bytes that this rank wrote, headers included."""
    seconds: float
    phases: dict[str, float]
    """Seconds spent in each phase of the protocol."""


class FileSink(Protocol):
    """Writes the data files of a save. `DirectSink` writes on this thread; `background.sinks` has the sinks
    of asynchronous saves."""

    def write(self, job: SaveJob, replicas: list[Replica], about: About) -> list[WrittenFile]:
        """Write this rank's data files durably.

        replicas: (index, count) of each row. about: the description that the files contain.
        """
        ...


class DirectSink:
    """Writes directly from the tensors' memory, on the thread that runs the protocol
    (`protocol.runner.run`)."""

    def write(self, job: SaveJob, replicas: list[Replica], about: About) -> list[WrittenFile]:
        plan = plan_save(job.table, replicas, job.options)
        job.streams.wait()
        job.operation.bytes_total = int(plan.chunks.nbytes.sum())
        return write_files(
            WriteRequest(
                job.store,
                job.table,
                plan,
                about,
                job.options,
                job.operation.progress,
                earlier=job.earlier(),
                indexes=None if job.commit is None else job.commit.own,
            )
        )


class SaveJob:
    """A save of this rank. The constructor collects the state; `run` completes the save."""

    def __init__(self, request: SaveRequest) -> None:
        self.request, self.store, self.options = request, request.store, request.options
        self.rank = request.call.rank
        # Empty until the state is read. A rank whose state can't be read still takes part, to report the
        # error.
        self.table = ShardTable(self.rank)
        self._holders = Holders(self.table)
        self.streams = CallerStreams(self.table)
        self.sink: FileSink = DirectSink()
        self.grid = request.grid.describe() if request.grid else None
        self.collect_error: HoldfastError | None = None
        """An error while collecting the state. The protocol sends it to the other ranks."""
        self.makes_folder = False
        """Whether the folder did not exist when this rank began."""
        # Before the state is read: a rank that hangs in user code can then be asked where it is.
        self.begin()
        self.collect_error = self.operation.read_state(self._collect)

    def begin(self) -> None:
        """Begin an attempt: the first, or a retry with the same rows and deadline."""
        request = self.request
        self.operation = Operation(
            "save",
            request.title,
            self.store.url,
            request.call,
            TRANSITIONS,
            request.step,
            # In the call's signature: ranks with different patterns never meet, and their errors say why.
            {"include": request.include, "exclude": request.exclude},
        )
        self.is_committer = self.operation.context.is_committer
        self._look: Callable[[str], Entry | None] | None = None
        """Returns what is there by the name of this rank's first file."""
        self.commit: Commit | None = None
        self._publishes = False
        """Whether this rank has begun to put the index in place."""
        self.files: list[WrittenFile] = []

    @property
    def attempt(self) -> str:
        """The name of this attempt; set once the ranks have met."""
        return self.request.label + self.operation.attempt

    def run(self, pause_collector: bool = True) -> SaveReport:
        """Run the protocol to completion. Raises the same error on all ranks."""
        operation = self.operation
        try:
            operation.run(save_steps(operation.context, self), self.collect_error, pause_collector)
        except CommitUnconfirmed:
            # The index may be in place, so the data must stay.
            raise
        except HoldfastError as error:
            self._tell_end(False)
            # Each live rank deletes its own files; those of dead ranks stay for `prune`.
            if (self.files or self.makes_folder) and not self.options.keep_failed:
                # The next attempt is in the same folder.
                clean_up(self.store, self.discard, self.makes_folder and not isinstance(error, IdleRanks))
            raise
        self._tell_end(True)
        if self.options.link_unchanged:
            remember(self.store, self.rank, self.files)
        return SaveReport(
            self.store.url,
            self.request.step,
            len({spec.name for spec in self.table.specs}),
            sum(file.size for file in self.files),
            operation.seconds(),
            operation.phases(),
        )

    def _tell_end(self, committed: bool) -> None:
        """Committer: say whether this attempt was committed. If its index was sent, an error proves too
        little: the request may still arrive."""
        if self.is_committer and self.request.ended is not None and (committed or not self._publishes):
            self.request.ended(self.attempt, committed)

    # -- collect ----------------------------------------------------------------------------------

    def _collect(self) -> None:
        request = self.request
        # On the caller's thread: state_dict() may issue collectives, and CUDA streams belong to a thread.
        leaves = select(request.collect(self.rank).leaves, request.include, request.exclude)
        self.table, _ = build_shard_table(leaves, self.rank, self.everyone())
        self._holders = Holders(self.table)
        self.streams = CallerStreams(self.table)

    def everyone(self) -> tuple[int, ...]:
        """Return the ranks that hold the state together."""
        return self.request.call.participants

    # -- agree who writes what ----------------------------------------------------------------------

    def enter(self) -> None:
        """Begin the save: raise StorageError if nothing can be saved into the folder. The committer notes
        which version it may replace."""
        entry = self.store.stat() if capabilities(self.store).folders else _NO_FOLDERS
        if entry is None:
            # Several ranks may note this, which is harmless: only an empty folder is ever removed.
            self.makes_folder = True
        elif entry.kind is not Kind.FOLDER:
            what = "a link; nothing is saved behind it" if entry.kind is Kind.LINK else "a file, not a folder"
            raise StorageError(f"{self.store.url} is {what}.", hint="Remove it, or save to another place.")
        if self.is_committer and self.request.permit is not None:
            # First of all: a job that doesn't own the run folder reads and writes nothing.
            self.request.permit(self.operation.tick, self.attempt)
        # While the committer reads the index.
        self._look = look_at_files(self.store, [self._own_name()])
        if self.is_committer:
            self.commit = begin_commit(self.request, self.operation, self.grid, self.makes_folder)

    def _own_name(self) -> str:
        return data_file(self.attempt, self.rank, 0)

    def row_digest(self) -> str | None:
        return self._holders.row_digest()

    def copies(self) -> list[list[tuple[int, int, int]]]:
        return self.request.copies() if self.request.copies is not None else []

    def list_rows(self) -> RowList:
        return self._holders.list_rows()

    def assign(self, lists: dict[int, RowList]) -> dict[int, Assigned]:
        return assign(lists, self.store.url, self.request.objects_may_differ)

    # -- write ------------------------------------------------------------------------------------

    def write(self, assigned: Assigned | None) -> Written:
        """Write this rank's files; return the report for the committer."""
        request = self.request
        # The message store names the attempt. With a name of an earlier one, what is deleted after a failure
        # would be the files of that one.
        assert self._look is not None
        if self._look(self._own_name()) is not None:
            raise SaveFailed(
                f"{request.title}: rank {self.rank} is to write {self._own_name()}, which another "
                "attempt has written.",
                rank=self.rank,
                hint=NOT_OURS,
            )
        report = request.report() if request.report is not None else {}
        # Only now, because the attempt has no name before the ranks have met.
        about = {
            **request.about,
            "step": request.step,
            "grid": self.grid,
            "notes": request.notes,
            "attempt": self.attempt,
            "ranks": len(request.call.participants),
        }
        if report:
            about["report"] = digest_of_report(report)
        self.files = self.sink.write(self, self._holders.agreed(assigned), about)
        return Written(request.step, self.grid, self.files, report)

    def earlier(self) -> Earlier | None:
        """Return the previous save whose files can be linked; None if everything has to be written."""
        # Who removes the steps that this one refers to asks the owner of the run whether it may be committed.
        usable = self.request.permit is not None or not can_refer(self.store)
        return recall(self.store, self.rank) if self.options.link_unchanged and usable else None

    # -- commit -----------------------------------------------------------------------------------

    def prepare(self, written: dict[int, Written]) -> None:
        """Committer: check what all ranks have written, and make the index."""
        assert self.commit is not None
        if self.request.merge_reports is not None:
            merged = self.request.merge_reports({rank: message.report for rank, message in written.items()})
            if merged:
                self.commit.about["notes"] = {**(self.commit.about["notes"] or {}), **merged}
        self.commit.prepare(written)

    def publish(self) -> Final:
        """Committer: put the index in place."""
        assert self.commit is not None
        if self.request.permit is not None:
            # Again, because another job may have taken over the run folder while the ranks wrote.
            self.request.permit(self.operation.tick, self.attempt)
        # The caller may have gone on without this thread; then nothing may become visible.
        self.operation.cancel.check()
        with publishing(self.store.url):
            self._publishes = True
            return self.commit.publish()

    def is_committed(self) -> bool:
        """Return whether this rank sees the index of this attempt in storage."""
        return is_of_attempt(self._for_a_look(), self.attempt) is True

    def is_moved(self) -> bool:
        """Return whether the files that this rank has written are gone."""
        with suppress(HoldfastError):
            own, store = [file.name for file in self.files], self._for_a_look()
            return bool(own) and all(store.stat(name) is None for name in own)
        return False

    def _for_a_look(self) -> Store:
        """Return the folder for requests that have LOOK seconds at least: the deadline may have passed."""
        deadline = self.request.call.deadline
        return bounded(self.store, Deadline(max(LOOK, deadline.left()), deadline.clock))

    def mark(self) -> None:
        """Committer, after the commit: delete the markers of the replaced save, and call `request.mark`."""
        assert self.commit is not None
        if self.commit.replaced_version is not None:
            remove_marks(self.store, but=self.request.marks)
        if self.request.mark is not None:
            self.request.mark()

    def tidy(self) -> None:
        """Committer, after the commit: delete data that only the replaced index referred to, and call
        `request.after`."""
        assert self.commit is not None
        # Not before the commit: until the new index is durable, a crash must leave the old checkpoint whole.
        remove_replaced(self.store, self.commit.replaced, but=self.commit.file_names)
        if self.request.after is not None:
            try:
                self.request.after()
            except HoldfastError as error:
                log.warning("%s is committed; tidying its run folder failed: %s", self.store.url, error)

    def discard(self) -> None:
        """Delete this rank's files after a failure, if no index can refer to them."""
        # The deadline may have passed. None: storage does not tell, so nothing is deleted.
        store = bounded(self.store, Deadline(DISCARDED_WITHIN))
        if self.files and is_of_attempt(store, self.attempt) is False:
            discard(store, names_of(self.files), (self.attempt, self.rank))


def save(
    state_dict: Mapping[str, object],
    path: Folder,
    *,
    step: int | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    expected: str | Iterable[str] | None = PREVIOUS,
    overwrite: bool = True,
    notes: Json = None,
    job: Job | None = None,
) -> SaveReport:
    """Save a state from all participants into the folder `path`; it is durable on return.

    Issues no collective. Returns on every rank by the job's `timeout` (plus two seconds at most), and raises
    the same error on all of them if any rank fails; then the folder is unchanged.

    state_dict: nested dict of tensors, DTensors, `Shard`s, `PerRank`s, objects, stateful values.
    path: the folder of this checkpoint, or a store.
    step: its number, a whole number from 0 on, or None.
    include, exclude: shell patterns of names; `model` means everything under it.
    expected: names that the save must contain, or "previous": the names in the checkpoint that it replaces.
        None: no check.
    overwrite: replace an existing checkpoint, which stays intact until the commit.
    notes: any JSON value, stored in the index.
    job: who takes part, deadlines, options (`holdfast.Job`).

    Raises only `HoldfastError`s (see `holdfast.errors`); `BadInput` before anything was started.
    """
    store, job = open_store(path), job_of(job)
    request = SaveRequest(
        store=store,
        collect=lambda rank: flatten(state_dict, rank),
        call=begin_call(job),
        step=step,
        include=include,
        exclude=exclude,
        expected=expected,
        overwrite=overwrite,
        grid=job.grid,
        notes=notes,
        options=job.options,
    )
    return SaveJob(request).run()
