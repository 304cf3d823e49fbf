"""The save of one rank: collect the state, agree who writes what, write, commit, report.

The protocol (`protocol.core.save_steps`) drives a `SaveJob`: it calls `enter`, `row_digest`, `list_rows` and
`assign` (if rows have no declared replica), `write`, and on the committer `prepare`, `publish` and `tidy`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from holdfast._format import objects
from holdfast._format.digest import digest, hex_digest
from holdfast._format.names import WrittenFile
from holdfast._io.file_writer import About, WriteRequest, discard, names_of, write_files
from holdfast._io.unchanged import Earlier, recall, remember
from holdfast._layout.tensor import OBJECT, Replica, listed
from holdfast._plan.agreement import disagreement
from holdfast._plan.save import plan_save
from holdfast._plan.shard_table import ShardTable, describe
from holdfast._protocol.call import begin_call
from holdfast._protocol.core import save_steps
from holdfast._protocol.job import Job, job_of
from holdfast._protocol.messages import Assigned, Final, RowList, Written
from holdfast._protocol.operation import Operation, read_state
from holdfast._protocol.phases import TRANSITIONS
from holdfast._saving.begin_commit import begin_commit
from holdfast._saving.cleanup import clean_up
from holdfast._saving.commit import Commit, is_of_attempt
from holdfast._saving.one_at_a_time import publishing
from holdfast._saving.request import PREVIOUS, SaveRequest
from holdfast._state.flatten import build_shard_table, flatten, select
from holdfast._state.memory import CallerStreams
from holdfast._state.tied import find_ties
from holdfast._store.base import Folder, Kind
from holdfast._store.local import open_store
from holdfast._values import Json
from holdfast.errors import CommitUnconfirmed, HoldfastError, StorageError

log = logging.getLogger("holdfast")
_OBJECT = "the object"
"""The description of an object begins with this (`SaveJob._names`)."""
NOT_SAVED: Replica = (0, 0)
"""The replica of a row that is not saved, because another rank's object is. `plan_save` skips counts of 0."""


class SaveReport(msgspec.Struct, frozen=True):
    """What a committed save did on this rank."""

    path: str
    step: int | None
    tensors: int
    """Number of names that this rank holds, objects included."""
    bytes_written: int
    """By this rank, headers included."""
    seconds: float
    phases: dict[str, float]
    """Seconds spent in each phase of the protocol."""


class FileSink(Protocol):
    """Where the bytes of a save go. `DirectSink` writes them on this thread; `background.sinks` has those of
    asynchronous saves."""

    def write(self, job: SaveJob, replicas: list[Replica], about: About) -> list[WrittenFile]:
        """Write this rank's data files durably.

        replicas: (index, count) of each row. about: the description that the files contain.
        """
        ...


class DirectSink:
    """Writes from where the tensors lie, on the thread that runs the protocol (`protocol.runner.run`)."""

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
    """A save of this rank. It collects the state at once; `run` brings the save to its end."""

    def __init__(self, request: SaveRequest) -> None:
        self.request, self.store, self.options = request, request.store, request.options
        self.rank = request.call.rank
        # Empty until the state is read. A rank whose state can't be read takes part, to tell the others.
        self.table = ShardTable(self.rank)
        self._ties: dict[int, int] = {}
        """Rows with the memory of another row, and that row, if its other holders must have the same."""
        self.streams = CallerStreams(self.table)
        self.sink: FileSink = DirectSink()
        self.grid = request.grid.describe() if request.grid else None
        self.collect_error: HoldfastError | None = None
        """The error of collecting the state. The protocol tells it to the other ranks."""
        self.makes_folder = False
        """Whether the folder was not there when this rank began."""
        # Before the state is read: a rank that hangs in user code can then be asked where it is.
        self.begin()
        self.collect_error = read_state(self._collect, self.rank)

    def begin(self) -> None:
        """Begin an attempt: the first one or, after a failure, another one with the same rows and
        deadline."""
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
        self.commit: Commit | None = None
        self.files: list[WrittenFile] = []

    @property
    def attempt(self) -> str:
        """The name of this attempt; it has one once the ranks have met."""
        return self.request.label + self.operation.attempt

    def run(self, pause_collector: bool = True) -> SaveReport:
        """Run the protocol to its end. Raises the error that all ranks raise."""
        operation = self.operation
        try:
            operation.run(save_steps(operation.context, self), self.collect_error, pause_collector)
        except CommitUnconfirmed:
            # The index may be in place, so the data must stay.
            raise
        except HoldfastError:
            # Each live rank deletes its own files; those of dead ranks stay for `prune`.
            if (self.files or self.makes_folder) and not self.options.keep_failed:
                clean_up(self.store, self.discard, self.makes_folder)
            raise
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

    # -- collect ----------------------------------------------------------------------------------

    def _collect(self) -> None:
        request = self.request
        # On the caller's thread: state_dict() may issue collectives, and CUDA streams belong to a thread.
        leaves = select(request.collect(self.rank).leaves, request.include, request.exclude)
        self.table, _ = build_shard_table(leaves, self.rank, request.call.participants)
        ties, replicas = find_ties(self.table), self.table.replicas
        self._ties = {row: first for row, first in ties.items() if replicas[row] != (0, 1)}
        # An undeclared row is copied whole, so an asynchronous save has it under both names.
        self.table.tied = {row: first for row, first in ties.items() if replicas[row] in ((0, 1), None)}
        self.streams = CallerStreams(self.table)

    # -- agree who writes what ----------------------------------------------------------------------

    def enter(self) -> None:
        """Begin the save: raise StorageError if nothing can be saved into the folder. The committer notes
        which version it may replace."""
        entry = self.store.stat()
        if entry is None:
            # Several ranks may note this, which is harmless: only an empty folder is ever removed.
            self.makes_folder = True
        elif entry.kind is not Kind.FOLDER:
            what = "a link; nothing is saved behind it" if entry.kind is Kind.LINK else "a file, not a folder"
            raise StorageError(f"{self.store.url} is {what}.", hint="Remove it, or save to another place.")
        if self.is_committer:
            if self.request.permit is not None:
                # First of all: a job that doesn't own the run folder reads and writes nothing.
                self.request.permit(self.operation.tick)
            self.commit = begin_commit(self.request, self.operation, self.grid)

    def row_digest(self) -> str | None:
        """Return a digest of the rows without declared holders, and of the ties, or None if there are
        none."""
        keys, specs = self._to_agree_on()
        if not keys:
            return None
        # A digest in place of the list: if 10,000 ranks hold the same rows, each sends 16 characters.
        return hex_digest(digest("\0".join([*keys, *specs]).encode()))

    def list_rows(self) -> RowList:
        """Return the undeclared rows and the ties themselves, if digests differ between ranks."""
        return RowList(*self._to_agree_on())

    def assign(self, lists: dict[int, RowList]) -> dict[int, Assigned]:
        """Committer: choose which replica each rank holds of each row in its list."""
        holders: dict[str, list[int]] = {}
        first: dict[str, tuple[int, str]] = {}
        of_one: set[str] = set()
        # In rank order: the lowest holder is replica 0, and errors name it first.
        for rank, message in sorted(lists.items()):
            for key, spec in zip(message.keys, message.specs, strict=True):
                owner, known = first.setdefault(key, (rank, spec))
                if known == spec:
                    holders.setdefault(key, []).append(rank)
                elif (
                    self.request.objects_may_differ and spec.startswith(_OBJECT) and known.startswith(_OBJECT)
                ):
                    # torch DCP also saves one of several objects. Tensors that differ are an error: one of
                    # them would be lost.
                    of_one.add(key)
                else:
                    raise disagreement(key, owner, known, rank, spec)
        if of_one:
            log.warning(
                "%s: ranks have different objects under %s; those of the lowest rank are saved.",
                self.store.url,
                listed(sorted(of_one)),
            )

        def replica(key: str, rank: int) -> Replica:
            if key in of_one:
                return (0, 1) if rank == first[key][0] else NOT_SAVED
            return holders[key].index(rank), len(holders[key])

        return {
            rank: Assigned(replicas=[replica(key, rank) for key in message.keys])
            for rank, message in lists.items()
        }

    def _undeclared_rows(self) -> list[int]:
        return [row for row, replica in enumerate(self.table.replicas) if replica is None]

    def _to_agree_on(self) -> tuple[list[str], list[str]]:
        """Return the keys of undeclared rows, then of ties; and a description of each."""
        keys, specs = self._names(self._undeclared_rows())
        table = self.table
        for row, first in self._ties.items():
            keys.append(f"{table.specs[row].name}\0is\0{table.specs[first].name}@{table.boxes[row]}")
            specs.append("a tie")
        return keys, specs

    def _names(self, rows: list[int]) -> tuple[list[str], list[str]]:
        """Return the key of each of these rows, and a description that must be equal on all holders."""
        keys, specs = [], []
        for row in rows:
            spec, plain = self.table.specs[row], self.table.unsharded[row]
            box, late = self.table.boxes[row], self.table.deferred[row]
            # Without an offset (start -1), axis, lane and position tell one shard from another.
            part = f"{late[:3]}{box.shape}" if late is not None and late.start == -1 else box
            keys.append(spec.name if plain else f"{spec.name}@{part}")
            if spec.kind == OBJECT:
                # With its digest, so that objects that differ are found now, before everything is written.
                data = self.table.memory[row].data  # type: ignore[attr-defined]
                specs.append(f"{_OBJECT} {objects.preview(data)} (digest {hex_digest(digest(data))})")
            else:
                specs.append(describe(spec))
        return keys, specs

    def _agreed(self, assigned: Assigned | None) -> list[Replica]:
        """Return (index, count) of every row, including those that the committer has assigned; note which
        ties all holders of both rows have."""
        rows, tied = self._undeclared_rows(), self.table.tied
        answers: list[Replica] = []
        if assigned is not None and assigned.holders is not None:
            mine = (assigned.holders.index(self.rank), len(assigned.holders))
            answers = [mine] * (len(rows) + len(self._ties))
        elif assigned is not None and assigned.replicas is not None:
            answers = assigned.replicas
        of_row = dict(zip(rows, answers, strict=False))
        replicas = [
            of_row.get(row, (0, 1)) if one is None else one for row, one in enumerate(self.table.replicas)
        ]
        for (row, first), (_, count) in zip(self._ties.items(), answers[len(rows) :], strict=True):
            # Otherwise another rank would choose another writer of the row.
            if replicas[row][1] == replicas[first][1] == count:
                tied[row] = first
            else:
                tied.pop(row, None)
        return replicas

    # -- write ------------------------------------------------------------------------------------

    def write(self, assigned: Assigned | None) -> Written:
        """Write this rank's files; return what the committer is told of them."""
        request = self.request
        # Only now, because the attempt has no name before the ranks have met.
        about = {
            **request.about,
            "step": request.step,
            "grid": self.grid,
            "notes": request.notes,
            "attempt": self.attempt,
            "ranks": len(request.call.participants),
        }
        self.files = self.sink.write(self, self._agreed(assigned), about)
        return Written(
            request.step, self.grid, self.files, request.report() if request.report is not None else {}
        )

    def earlier(self) -> Earlier | None:
        """Return the save whose bytes need not be written again; None if all are to be written."""
        return recall(self.store, self.rank) if self.options.link_unchanged else None

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
            self.request.permit(self.operation.tick)
        # The caller may have gone on without this thread; then nothing may become visible.
        self.operation.cancel.check()
        with publishing(self.store.url):
            return self.commit.publish()

    def is_committed(self) -> bool:
        """Return whether the index of this attempt is in storage, as far as this rank can see."""
        return is_of_attempt(self.store, self.attempt) is True

    def tidy(self) -> None:
        """Committer, after the commit: delete data that only the replaced index named, and call
        `request.after`."""
        assert self.commit is not None
        # Not before the commit: until the new index is durable, a crash must leave the old checkpoint whole.
        with suppress(HoldfastError):  # `holdfast prune` removes what is left
            for name in self.commit.replaced_files - set(self.commit.file_names):
                self.store.delete(name)
        if self.request.after is not None:
            with suppress(HoldfastError):
                self.request.after()

    def discard(self) -> None:
        """Delete this rank's files after a failure, if it is known that no index names them."""
        # None: storage does not tell, so nothing is deleted.
        if self.files and is_of_attempt(self.store, self.attempt) is False:
            discard(self.store, names_of(self.files))


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
    the same error on all of them if anything went wrong anywhere; then the folder holds what it held before.

    state_dict: nested dict of tensors, DTensors, `Shard`s, `PerRank`s, objects, stateful values.
    path: the folder of this checkpoint, or a store.
    step: its number, a whole number from 0 on, or None.
    include, exclude: shell patterns of names; `model` means everything under it.
    expected: names that must be in the save, or "previous": those of the checkpoint that it replaces; None:
        no such check.
    overwrite: replace a checkpoint that is there; it stays whole until the instant of commit.
    notes: any JSON value, stored in the index for its readers.
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
