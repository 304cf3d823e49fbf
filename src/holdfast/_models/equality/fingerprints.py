"""Fingerprints of a live state, from sums that each rank computes over its own shards, without a gather.

Every holder of a shard sums it, also a declared replica or an undeclared one (plain tensors on data-parallel
ranks), so that differing replicas are found.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec
import numpy as np

from holdfast._core.base.collector import collector_paused
from holdfast._core.base.values import Buffer, Message
from holdfast._core.format.digest import digest, hex_digest
from holdfast._core.format.fingerprint import box_sums
from holdfast._core.format.names import is_weight
from holdfast._core.io.raw_read import slabs
from holdfast._core.layout.box import Box, whole
from holdfast._core.layout.coverage import first_problem
from holdfast._core.layout.tensor import DTYPES, OBJECT, Dims, TensorSpec
from holdfast._core.plan.agreement import what
from holdfast._core.plan.shard_table import Memory, ShardTable, contiguous_at
from holdfast._core.protocol.call import Call, begin_call
from holdfast._core.protocol.job import Job
from holdfast._core.protocol.messages import from_roster
from holdfast._core.protocol.operation import read_state
from holdfast._core.protocol.task import CollectiveTask
from holdfast._core.state.flatten import build_shard_table, flatten, select
from holdfast._core.state.leaf import Flat
from holdfast._core.state.memory import CallerStreams
from holdfast._models.equality.published_names import Published, under_published_names, view_by
from holdfast._models.equality.rounding import (
    Rounded,
    Sums,
    add_rounded,
    add_up,
    less_exact_than,
    no_sums,
    records_of,
    rounded_of,
    split,
    value_of,
)
from holdfast._models.equality.shortcuts import many_at_once, sums_together, turned_sums
from holdfast._models.views.family import View
from holdfast.errors import BadInput, CoverageError, ReplicaMismatch

_SLAB = 16 << 20
"""Bytes that are copied from a device, or made contiguous, at a time."""


class Fingerprint(msgspec.Struct, frozen=True):
    """A 128-bit hash of a tensor's elements, independent of its layout over ranks."""

    dtype: str
    shape: Dims
    """The shape of the whole tensor."""
    value: str
    """32 hex digits."""
    rounded: dict[str, Rounded] = {}
    """dtype name -> the fingerprint of the elements rounded to this dtype, for each floating-point dtype with
    fewer bits. For comparison with a checkpoint in that dtype."""


def fingerprint(
    state_dict: Mapping[str, object],
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    published: Published | None = None,
    job: Job | None = None,
) -> dict[str, Fingerprint]:
    """Compute the fingerprints of all weights of a state, in any layout over ranks.

    All participants call it and get the same result: a dict from names to fingerprints. It issues no
    collective and gathers no weights.
    Equal weights have equal fingerprints on any number of ranks. A save with `Options(fingerprint=True)`
    stores the same fingerprints in the index.

    state_dict: nested dict, as `holdfast.save` takes it. Optimizer state and objects are left out.
    include, exclude: shell patterns of names; `model` means everything under it.
    published: a published model, as its folder or the content of its `config.json`: the fingerprints are
        those of its tensors, under its names, to compare with an engine's (`holdfast.engine`). A prefix that
        the model's names have in the state is left out; names that are not the model's stay.
    job: who takes part, and deadlines (`holdfast.Job`).

    Raises BadInput for invalid arguments or states; ReplicaMismatch if ranks hold different data under one
    name; CoverageError if no rank holds some part of a tensor; RankFailed and DeadlineExceeded for failures
    of other ranks.
    """
    return fingerprint_leaves(
        lambda rank: flatten(state_dict, rank), begin_call(job), include, exclude, published
    )


def fingerprint_leaves(
    collect: Callable[[int], Flat],
    call: Call,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    published: Published | None = None,
) -> dict[str, Fingerprint]:
    """Take the fingerprints of the leaves that `collect` returns for a rank."""
    task = SumsTask("fingerprint of the state", "memory:fingerprint", call)

    def read() -> None:
        leaves = select(collect(call.rank).leaves, include, exclude)
        table = build_shard_table(leaves, call.rank, call.participants)[0]
        task.take(table, None if published is None else view_by(published))

    task.collect_error = read_state(read, call.rank)
    answer = task.run()
    with collector_paused():
        return _fingerprints(from_roster(answer, RankSums))


def _fingerprints(sums: RankSums) -> dict[str, Fingerprint]:
    found = {}
    for alike in sums.alike:
        code, shape, dtype = alike.dtype, alike.shape, DTYPES[alike.dtype].name
        is_rounded = bool(less_exact_than(code))
        for name, record in alike.records():
            more = [rounded_of(code, record)] if is_rounded else []
            found[name] = Fingerprint(dtype, shape, value_of(record), *more)
    return {name: found[name] for name in sorted(found)}


class Alike(msgspec.Struct):
    """The sums of boxes that are alike, each of another tensor."""

    dtype: int
    shape: Dims
    """Of the whole tensors."""
    box: Box
    is_copy: bool
    """Whether they are declared as copies of another rank's."""
    names: list[str]
    sums: str
    """The record of each (`rounding.records_of`). Numbers would take several times as long."""

    def is_whole(self) -> bool:
        return not self.is_copy and self.box == whole(self.shape)

    def records(self) -> Iterable[tuple[str, str]]:
        """Return the names, and the record of each."""
        return zip(self.names, split(self.sums, len(self.names)), strict=True)


class RankSums(msgspec.Struct):
    alike: list[Alike]


class SumsTask(CollectiveTask):
    """Sums the shards of each rank, and puts the sums together on one rank."""

    kind = "fingerprint"

    def __init__(self, title: str, place: str, call: Call) -> None:
        super().__init__(title, place, call)
        self._report = RankSums([])
        self._first: dict[int, int] = {}
        """By rank: the first rank with the same rows; on the rank that decides."""

    def take(self, table: ShardTable, view: View | None = None) -> None:
        """Set the shards to sum; with a view, under the names of the published tensors that they are of."""
        # Offsets that assume an even split on other ranks are accepted: ranks with an uneven split raise this
        # error, and boxes that leave a gap are an error in the end.
        if any(late is not None and late.start == -1 for late in table.deferred):
            raise BadInput(
                "The offsets of some shards are known to all ranks together only; such a state has no "
                "fingerprint."
            )
        self._view, self._is_named = view, True
        if view is not None:
            table, self._is_named = under_published_names(table, view)
        self._table = table
        self._streams = CallerStreams(table)  # on the caller's thread, whose streams these are

    # -- calls of the protocol ----------------------------------------------------------------------

    def contribute(self) -> Message:
        self._streams.wait()
        table, kinds = self._table, dict[tuple[int, Dims, Box, bool], list[int]]()
        keys = [
            (spec.dtype, spec.shape, box, replica is not None and replica[0] > 0)
            for spec, box, replica in zip(table.specs, table.boxes, table.replicas, strict=True)
        ]
        rows = [row for row, spec in enumerate(table.specs) if spec.kind != OBJECT and is_weight(spec.name)]
        # Rows that are alike mostly follow each other, and comparing keys is quicker than hashing them.
        for key, alike in groupby(rows, keys.__getitem__):
            kinds.setdefault(key, []).extend(alike)
        for (code, shape, box, is_copy), rows in kinds.items():
            sums = self._sums(code, box, [table.memory[row] for row in rows])
            names = [table.specs[row].name for row in rows]
            self._report.alike.append(Alike(code, shape, box, is_copy, names, records_of(sums)))
        # A digest instead of the rows, because data-parallel ranks usually have the same rows.
        rows_digest = hex_digest(digest(msgspec.json.encode(self._report)))
        return {"rows": rows_digest, "named": self._is_named}

    def decide(self, contributions: dict[int, Message]) -> dict[int, Message]:
        # A rank may hold nothing of the model.
        if self._view is not None and not any(message["named"] for message in contributions.values()):
            some = min((name for alike in self._report.alike for name in alike.names), default=None)
            raise BadInput(
                f"No weight of the state has a name of the family {self._view.family.name!r}"
                + (f", such as {some!r}." if some else "."),
                hint="published= is the model that the state is of, under its names or megatron-core's.",
            )
        first: dict[str, int] = {}
        for rank, message in contributions.items():
            first.setdefault(message["rows"], rank)
        self._first = {rank: first[message["rows"]] for rank, message in contributions.items()}
        wanted = set(first.values())
        return {rank: {"wanted": rank in wanted} for rank in contributions}

    def execute(self, answer: Message) -> Message:
        if not answer["wanted"]:
            self._report.alike.clear()
        message: Message = msgspec.to_builtins(self._report)
        return message

    def finish(self, reports: dict[int, Message]) -> Message:
        sent = {rank: from_roster(message, RankSums, rank) for rank, message in sorted(reports.items())}
        count = Counter(name for one in sent.values() for alike in one.alike for name in alike.names)
        known, more = list[Alike](), Whole()
        for rank, one in sent.items():
            for alike in one.alike:
                if alike.is_whole() and all(count[name] == 1 for name in alike.names):
                    known.append(alike)  # as most of 100,000 tensors
                else:
                    more.add(rank, alike)
        answer: Message = msgspec.to_builtins(RankSums([*known, *more.result()]))
        return answer

    def rows_of(self, reports: dict[int, Message]) -> Iterator[tuple[int, RankSums]]:
        """Yield the sums of each rank, also of those that sent none, because another rank has the same."""
        sent = {rank: from_roster(message, RankSums, rank) for rank, message in reports.items()}
        for rank in sorted(sent):
            yield rank, sent[self._first[rank]]

    def _sums(self, code: int, box: Box, memories: Sequence[Memory]) -> Sums:
        """Return the sums of shards of one dtype, shape and place."""
        found, step = [], many_at_once(code, box)
        for first in range(0, len(memories), step):
            some = memories[first : first + step]
            together = sums_together(some, code, box) if step > 1 else None
            found += [self._sums_of(code, box, one) for one in some] if together is None else [together]
            self.operation.tick()
        return np.concatenate(found)

    def _sums_of(self, code: int, box: Box, memory: Memory) -> Sums:
        itemsize, sums = DTYPES[code].size, no_sums(code)
        if (turned := turned_sums(memory, code, box, self.operation.tick)) is not None:
            sums[0, 0, :2] = turned
            return sums
        for part in slabs(box, itemsize, _SLAB):
            inside = part.relative_to(box.offset)
            start = contiguous_at(box.shape, inside) if memory.address else None
            if start is not None:  # without a copy
                size = part.volume * itemsize
                data: Buffer = (ctypes.c_ubyte * size).from_address(memory.address + start * itemsize)
            else:
                data = memoryview(bytearray(part.volume * itemsize))
                memory.gather(inside, data)
            sums[0, 0, :2] += box_sums(data, itemsize, part)
            add_rounded(sums, code, data, part)
            self.operation.tick()
        return sums


Specs = dict[str, tuple[int, tuple[int, Dims]]]
"""By name: the first rank with the tensor, and its dtype and shape there."""


def add_spec(known: Specs, rank: int, name: str, alike: Alike) -> None:
    """Add the dtype and shape of a rank's tensor. ReplicaMismatch if another rank has others."""
    spec = alike.dtype, alike.shape
    first, before = known.setdefault(name, (rank, spec))
    if before != spec:
        texts = [what(TensorSpec(name, *one)) for one in (before, spec)]
        raise ReplicaMismatch(
            f"Ranks disagree on {name!r}: rank {first} holds {texts[0]}, rank {rank} {texts[1]}.",
            rank=rank,
            details={"tensor": name, "ranks": [first, rank]},
        )


@dataclass(slots=True)
class _BoxSums:
    """A box of a tensor."""

    rank: int
    """The first that has it."""
    record: str
    owner: int | None = None
    """The first rank that has it other than as a declared copy."""
    copier: int | None = None
    """The first rank that has it as a declared copy."""


class Whole:
    """Tensors of which several ranks have sums, or one has several."""

    def __init__(self) -> None:
        self._specs: Specs = {}
        self._parts: dict[str, dict[Box, _BoxSums]] = {}

    def add(self, rank: int, alike: Alike) -> None:
        box, is_copy = alike.box, alike.is_copy
        for name, mine in alike.records():
            add_spec(self._specs, rank, name, alike)
            parts = self._parts.setdefault(name, {})
            part = parts.get(box)
            if part is None:
                part = parts[box] = _BoxSums(rank, mine)
            if is_copy:
                part.copier = rank if part.copier is None else part.copier
            elif part.owner is None:
                part.owner = rank
            if value_of(part.record) != value_of(mine):
                if part.rank == rank:
                    raise ReplicaMismatch(
                        f"Rank {rank} holds {name!r} twice, with different elements.",
                        rank=rank,
                        hint="Two values of its state go under this name, such as an embedding and an output "
                        "that is tied to it. If they are not tied any more, give published= the content of "
                        "config.json, with tie_word_embeddings set to false.",
                        details={"tensor": name, "ranks": [rank]},
                    )
                raise ReplicaMismatch(
                    f"Ranks {part.rank} and {rank} hold different elements of {name!r}.",
                    rank=rank,
                    hint="If every rank has its own value, give it a name of its own.",
                    details={"tensor": name, "ranks": [part.rank, rank]},
                )

    def result(self) -> list[Alike]:
        kinds: dict[tuple[int, Dims], list[str]] = {}
        for name, (_, spec) in sorted(self._specs.items()):
            kinds.setdefault(spec, []).append(name)
        return [
            Alike(*spec, whole(spec[1]), False, names, "".join([self._record(name) for name in names]))
            for spec, names in kinds.items()
        ]

    def _record(self, name: str) -> str:
        rank, (code, shape) = self._specs[name]
        parts = self._parts[name]
        boxes = [box for box, part in parts.items() if part.owner is not None]
        check_covered(name, shape, [box for box in boxes if box.volume], rank)
        for box, part in parts.items():
            if part.owner is None and box.volume:
                raise ReplicaMismatch(
                    f"Rank {part.copier} declares a copy of {name!r} at {list(box.offset)}, of shape "
                    f"{list(box.shape)}, that is cut otherwise than on the ranks that hold it first: the "
                    "two can't be compared.",
                    rank=part.copier,
                    hint="Replicas must be cut alike.",
                    details={"tensor": name, "ranks": [rank, part.copier]},
                )
        return add_up(code, [parts[box].record for box in boxes])


def check_covered(name: str, shape: Dims, boxes: list[Box], rank: int) -> None:
    """Raise CoverageError if the boxes of ranks do not cover a tensor just once. rank: one that has it."""
    if len(boxes) == 1 and boxes[0].shape == shape and not any(boxes[0].offset):
        return
    dims = max(len(shape), 1)
    problem = first_problem(
        np.asarray([shape or (1,)], np.int64),
        np.zeros(len(boxes), np.int64),
        np.asarray([box.offset or (0,) for box in boxes], np.int64).reshape(-1, dims),
        np.asarray([box.shape or (1,) for box in boxes], np.int64).reshape(-1, dims),
    )
    if problem is not None:
        raise CoverageError(
            f"The ranks together do not hold {name!r} of shape {list(shape)} just once: {problem.kind} "
            f"from index {list(problem.place)} on.",
            rank=rank,
            hint="Every rank that holds a part must take part, and declare what it holds.",
            details={"tensor": name},
        )
