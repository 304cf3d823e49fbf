"""`save`: from a user's state to a committed checkpoint, or one error that all ranks raise."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from holdfast.errors import BadInput, CommitUnconfirmed, HoldfastError
from holdfast.format import objects
from holdfast.format.columns import Columns
from holdfast.format.digest import digest, hex_digest
from holdfast.format.names import rank_in_name
from holdfast.io.file_writer import WrittenFile, discard, write_files
from holdfast.io.open_checkpoint import open_index
from holdfast.layout.grid import Grid
from holdfast.layout.tensor import OBJECT, matches
from holdfast.options import Options
from holdfast.plan.merge import disagreement
from holdfast.plan.save import plan_save
from holdfast.plan.shard_table import Holding, Replica, describe
from holdfast.protocol.call import Call, begin_call, one_folder, whole_step
from holdfast.protocol.core import save_steps
from holdfast.protocol.operation import Operation, read_state
from holdfast.protocol.phases import TRANSITIONS
from holdfast.roster.base import Message, Roster
from holdfast.saving.cleanup import clean_up, makes_folder
from holdfast.saving.commit import Commit, is_of_attempt, present_tail
from holdfast.state.cuda_streams import CallerStreams
from holdfast.state.flatten import Flat, flatten, hold, select
from holdfast.store.base import Store
from holdfast.store.local import open_store

PREVIOUS = "previous"


class SaveReport(msgspec.Struct, frozen=True):
    """What a committed save did on this rank."""

    path: str
    step: int | None
    tensors: int
    """Names this rank holds, objects included."""
    bytes_written: int
    """By this rank, headers included."""
    seconds: float
    phases: dict[str, float]
    """Seconds spent in each phase of the protocol."""


def _write_here(work: Work, replicas: list[Replica], about: dict[str, Any]) -> list[WrittenFile]:
    plan = plan_save(work.held, replicas, work.options)
    work.streams.wait()
    work.total = int(plan.chunks.nbytes.sum())
    return write_files(work.store, work.held, plan, about, work.options, work.moved)


@dataclass
class Work:
    """The save of one rank, as the protocol wants it."""

    store: Store
    held: Holding
    options: Options
    step: int | None
    grid: Message | None
    notes: Any
    operation: Operation
    put_down: Callable[[Work, list[Replica], dict[str, Any]], list[WrittenFile]] = _write_here
    """Writes this rank's files: here and now, or in another process."""
    make_commit: Callable[[], Commit] | None = None
    """Committer: what it must know of the folder before it starts; it reads from storage."""
    permit: Callable[[Callable[[], None]], None] = lambda tick: None
    after: Callable[[], None] = lambda: None
    say: Callable[[], Message] = dict
    """What this rank tells with what it has written."""
    hear: Callable[[dict[int, Message]], Message] = lambda said: {}
    """Committer: what it makes of what all ranks told; goes into the notes."""
    commit: Commit | None = None
    trouble: HoldfastError | None = None
    streams: CallerStreams = field(default_factory=lambda: CallerStreams(Holding()))
    made: list[str] = field(default_factory=list)
    makes_folder: bool = False
    """Was the folder not there when this rank began?"""
    bytes_written: int = 0
    total: int = 0

    def _undeclared(self) -> list[int]:
        return [row for row, replica in enumerate(self.held.replicas) if replica is None]

    def _names(self, rows: list[int]) -> tuple[list[str], list[str]]:
        """What identifies each undeclared row, and what must be equal on all that hold it."""
        keys, specs = [], []
        for row in rows:
            spec, plain = self.held.specs[row], self.held.plain[row]
            box, late = self.held.boxes[row], self.held.lates[row]
            part = f"{late[:3]}{box.shape}" if late is not None and late.start == -1 else box
            keys.append(spec.name if plain else f"{spec.name}@{part}")
            if spec.kind == OBJECT:
                data = self.held.memory[row].data  # type: ignore[attr-defined]
                specs.append(f"the object {objects.preview(data)} (digest {hex_digest(digest(data))})")
            else:
                specs.append(describe(spec))
        return keys, specs

    def claims(self) -> str | None:
        if self.trouble is not None:
            raise self.trouble
        self.makes_folder = makes_folder(self.store) or self.makes_folder
        if self.make_commit is not None:
            self.permit(self.operation.tick)
            self.commit = self.make_commit()
        rows = self._undeclared()
        if not rows:
            return None
        keys, specs = self._names(rows)
        return hex_digest(digest("\0".join([*keys, *specs]).encode()))

    def tell(self) -> Message:
        keys, specs = self._names(self._undeclared())
        return {"keys": keys, "specs": specs}

    def assign(self, told: dict[int, Message]) -> dict[int, Message]:
        holders: dict[str, list[int]] = {}
        first: dict[str, tuple[int, str]] = {}
        for rank, message in sorted(told.items()):
            for key, spec in zip(message["keys"], message["specs"], strict=True):
                owner, known = first.setdefault(key, (rank, spec))
                if known != spec:
                    raise disagreement(key, owner, known, rank, spec)
                holders.setdefault(key, []).append(rank)
        return {
            rank: {"replicas": [(holders[key].index(rank), len(holders[key])) for key in message["keys"]]}
            for rank, message in told.items()
        }

    def _settled(self, assigned: Message | None) -> list[Replica]:
        replicas = list(self.held.replicas)
        rows = self._undeclared()
        if assigned is not None and "holders" in assigned:
            holders = assigned["holders"]
            mine = (holders.index(self.held.rank), len(holders))
            for row in rows:
                replicas[row] = mine
        elif assigned is not None:
            for row, (index, count) in zip(rows, assigned["replicas"], strict=True):
                replicas[row] = (int(index), int(count))
        return [replica or (0, 1) for replica in replicas]

    def write(self, assigned: Message | None) -> Message:
        about = {
            "step": self.step,
            "grid": self.grid,
            "notes": self.notes,
            "attempt": self.operation.attempt,
            "ranks": len(self.operation.at.participants),
        }
        files = self.put_down(self, self._settled(assigned), about)
        self.made = [file.name for file in files]
        self.bytes_written = sum(file.size for file in files)
        told = {"step": self.step, "grid": self.grid, "files": [list(file) for file in files]}
        return told | ({"said": said} if (said := self.say()) else {})

    def moved(self, moved: int) -> None:
        self.operation.progress(moved, self.total)

    def prepare(self, written: dict[int, Message]) -> None:
        assert self.commit is not None
        heard = self.hear({rank: message.get("said", {}) for rank, message in written.items()})
        if heard:
            self.commit.about["notes"] = {**(self.commit.about["notes"] or {}), **heard}
        self.commit.prepare(written)

    def publish(self) -> Message:
        assert self.commit is not None
        self.permit(self.operation.tick)
        self.operation.still_wanted()
        return self.commit.publish()

    def tidy(self) -> None:
        """Data that only the replaced index named, and what the caller wants done."""
        assert self.commit is not None
        with suppress(HoldfastError):  # `holdfast prune` sweeps what is left
            for name in self.commit.replaced_files - set(self.commit.file_names):
                self.store.delete(name)
        with suppress(HoldfastError):
            self.after()

    def discard(self) -> None:
        """After a failure: delete this rank's files, if it is known that no index names them."""
        if self.made and is_of_attempt(self.store, self.operation.attempt) is False:
            discard(self.store, self.made)

    def is_committed(self) -> bool:
        return is_of_attempt(self.store, self.operation.attempt) is True


def save(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str] | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    step: int | None = None,
    participants: Iterable[int] | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    timeout: float = 1800.0,
    stall_timeout: float = 120.0,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    expected: str | Iterable[str] | None = PREVIOUS,
    overwrite: bool = True,
    grid: Grid | None = None,
    notes: Any = None,
    options: Options | None = None,
    roster: Roster | None = None,
) -> SaveReport:
    """Save a state from all participants into the folder `path`; it is durable on return.

    Issues no collective. Returns on every rank by `timeout` seconds (plus two at most), and
    raises the same error on all of them if anything went wrong anywhere; then the folder holds
    what it held before.

    state_dict: nested dict of tensors, DTensors, `Shard`s, `PerRank`s, objects, stateful values.
    path, checkpoint_id: the folder (torch DCP's name for it is taken too).
    participants, process_group: the ranks that take part; default all. Other ranks must not call.
    timeout: seconds until the call fails, however well it goes.
    stall_timeout: seconds that a rank may go without any progress before it is given up.
    include, exclude: shell patterns of names; `model` means everything under it.
    expected: names that must be in the save, or "previous": those of the checkpoint that it
        replaces; None: no such check.
    overwrite: replace a checkpoint that is there; it stays whole until the instant of commit.
    grid, notes: the layout, and any JSON value, kept in the index for whoever reads it.

    Raises `HoldfastError`s only (see `holdfast.errors`), `BadInput` before anything was started.
    """
    return Save(
        open_store(one_folder(path, checkpoint_id)),
        lambda rank: flatten(state_dict, rank),
        begin_call(
            roster,
            no_dist=no_dist,
            participants=participants,
            process_group=process_group,
            timeout=timeout,
            stall_timeout=stall_timeout,
        ),
        step=step,
        include=include,
        exclude=exclude,
        expected=expected,
        overwrite=overwrite,
        grid=grid,
        notes=notes,
        options=options,
    ).run()


class Save:
    """A save of this rank, into a store, of what `take(rank)` yields: read at once; `run` brings it to its end.

    What `take` raises is told to the other ranks. The committer asks `previous` where the names to compare with are, if not
    here, has `permit(tick)` raise if it may not save, before it begins and before it commits, and calls `after` once the save is
    committed. What `say` returns on each rank when it has written is what the committer gives to `hear`, by rank, before it commits; what
    that returns is added to the notes. Neither may raise. The other arguments are those of `save`.
    """

    def __init__(
        self,
        store: Store,
        take: Callable[[int], Flat],
        call: Call,
        *,
        step: int | None = None,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        expected: str | Iterable[str] | None = None,
        previous: Callable[[], Store | None] = lambda: None,
        overwrite: bool = True,
        grid: Grid | None = None,
        notes: Any = None,
        options: Options | None = None,
        permit: Callable[[Callable[[], None]], None] = lambda tick: None,
        after: Callable[[], None] = lambda: None,
        say: Callable[[], Message] = dict,
        hear: Callable[[dict[int, Message]], Message] = lambda said: {},
    ) -> None:
        step = None if step is None else whole_step(step)
        try:
            json.dumps(notes)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadInput(
                f"notes= must be a JSON value (text, numbers, lists, dicts): {error}.",
                hint="Put tensors and other objects into the state.",
            ) from None
        title = f"save of {store.url}" + (f" (step {step})" if step is not None else "")
        about = grid.describe() if grid else None

        def begin(held: Holding) -> Work:
            operation = Operation(
                "save", title, store.url, call, TRANSITIONS, step, include=include, exclude=exclude
            )
            work = Work(store, held, options or Options(), step, about, notes, operation, say=say, hear=hear)
            if operation.at.leads:
                work.make_commit = lambda: _commit(work, expected, previous, overwrite, include, exclude)
                work.permit, work.after = permit, after
            return work

        self._begin = begin
        self.work = begin(Holding(call.rank))

        def read() -> None:
            leaves = select(take(call.rank).leaves, include, exclude)
            self.work.held, _ = hold(leaves, call.rank, call.participants)
            self.work.streams = CallerStreams(self.work.held)

        self.work.trouble = read_state(read, call.rank)

    @property
    def operation(self) -> Operation:
        return self.work.operation

    def begin_again(self) -> None:
        """After a failure: the same rows, in a new attempt under the same deadline."""
        before = self.work
        self.work = self._begin(before.held)
        self.work.makes_folder = before.makes_folder
        self.work.trouble = before.trouble  # what could not be read is not there the second time, either

    def run(self, beside_training: bool = False) -> SaveReport:
        """Raises the error that all ranks raise."""
        work, operation = self.work, self.operation
        try:
            operation.run(lambda: save_steps(operation.at, work), work.trouble, beside_training)
        except CommitUnconfirmed:
            raise
        except HoldfastError:
            if (work.made or work.makes_folder) and not work.options.keep_failed:
                clean_up(work.store, work.discard, work.makes_folder)
            raise
        names = len({spec.name for spec in work.held.specs})
        return SaveReport(
            work.store.url, work.step, names, work.bytes_written, operation.seconds(), operation.phases()
        )


def _commit(
    work: Work,
    expected: str | Iterable[str] | None,
    previous: Callable[[], Store | None],
    overwrite: bool,
    include: Sequence[str] | None,
    exclude: Sequence[str] | None,
) -> Commit:
    """What the committer knows before the others have written: the version that it may replace."""
    store, at = work.store, work.operation.at
    replacing = present_tail(store)
    if replacing is not None and not overwrite:
        raise BadInput(f"{store.url} holds a committed checkpoint already, and overwrite=False.")
    names: list[str] | None = None
    source = ""
    compared: Store | None = None
    if isinstance(expected, str):
        if expected != PREVIOUS:
            raise BadInput(f"expected={expected!r}: give a list of names, {PREVIOUS!r}, or None.")
        compared = store if replacing is not None else previous()
        names = _previous_names(compared)
        source = f"the checkpoint {compared.url}" if compared is not None else ""
    elif expected is not None:
        names, source = list(expected), "expected="

    def keep(name: str) -> bool:
        private = rank_in_name(name)
        if private is not None and private not in at.participants:
            return False  # a rank's own value, and the world is smaller now
        return (include is None or any(matches(name, p) for p in include)) and not any(
            matches(name, p) for p in exclude or ()
        )

    about = {"step": work.step, "grid": work.grid, "notes": work.notes, "attempt": work.operation.attempt}
    replaced: set[str] = set()
    if replacing is not None:
        with suppress(HoldfastError), open_index(store) as index:
            replaced = set(index.file_names())
    return Commit(
        store,
        at.title,
        at.deadline,
        about,
        replacing,
        names,
        source,
        _writers_of(compared),
        work.operation.tick,
        keep,
        replaced,
        compared,
    )


def _previous_names(store: Store | None) -> list[str] | None:
    """The names in a checkpoint, if there is one. What can't be read can't be compared with:
    loading it will say so, and it must not keep a good save from being made."""
    if store is None:
        return None
    try:
        with open_index(store) as index:
            return index.names()
    except HoldfastError:
        return None


def _writers_of(store: Store | None) -> Callable[[str], list[int]]:
    """Which ranks wrote a name in a checkpoint; for an error's sake."""

    def ranks(name: str) -> list[int]:
        if store is None:
            return []
        with open_index(store) as index:
            row = index.find_one(name)
            found = index.select(np.asarray([row])) if row >= 0 else Columns()
            return sorted(set(found.file_rank[found.file].tolist()))

    return ranks
