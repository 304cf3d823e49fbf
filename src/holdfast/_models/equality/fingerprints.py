"""Fingerprints of a live state, from sums that each rank computes over its own shards, without a gather.

Every holder of a shard sums it, also a declared replica or an undeclared one (plain tensors on data-parallel
ranks), so that differing replicas are found.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from holdfast._core.base.values import Buffer, Message
from holdfast._core.format.digest import digest, hex_digest
from holdfast._core.format.fingerprint import box_sums, nothing
from holdfast._core.format.names import is_weight
from holdfast._core.io.raw_read import slabs
from holdfast._core.layout.box import Box
from holdfast._core.layout.coverage import first_problem
from holdfast._core.layout.tensor import DTYPES, OBJECT, Dims, TensorSpec
from holdfast._core.plan.agreement import what
from holdfast._core.plan.shard_table import ShardTable, contiguous_at
from holdfast._core.protocol.call import Call, begin_call
from holdfast._core.protocol.job import Job
from holdfast._core.protocol.messages import from_roster
from holdfast._core.protocol.operation import read_state
from holdfast._core.protocol.task import CollectiveTask
from holdfast._core.ready import ready
from holdfast._core.state.flatten import build_shard_table, flatten, select
from holdfast._core.state.leaf import Flat
from holdfast._core.state.memory import CallerStreams
from holdfast._models.equality.published_names import Published, under_published_names, view_by
from holdfast._models.equality.rounding import Numbers, Rounded, RoundedSums, rounded_of
from holdfast._models.equality.shortcuts import small_sums, turned_sums
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
    return msgspec.convert(task.run(), ready(dict[str, Fingerprint]))


_Row = tuple[str, Dims, Dims, bool, tuple[int, int], list[Numbers]]
"""Name, offset and shape of the box, whether it is declared as a copy of another rank's, both sums, and the
sums of its elements in less exact dtypes."""


class RankSums(msgspec.Struct):
    specs: dict[str, tuple[int, Dims]]
    """Dtype and shape of the rank's tensors, by name."""
    rows: list[_Row]


class SumsTask(CollectiveTask):
    """Sums the shards of each rank, and puts the sums together on one rank."""

    kind = "fingerprint"

    def __init__(self, title: str, place: str, call: Call) -> None:
        super().__init__(title, place, call)
        self._report = RankSums({}, [])
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
        specs, boxes = self._table.specs, self._table.boxes
        rows = [row for row, spec in enumerate(specs) if spec.kind != OBJECT and is_weight(spec.name)]
        known = small_sums(self._table, rows, self.operation.tick)
        for row in rows:
            spec, box = specs[row], boxes[row]
            self._report.specs[spec.name] = (spec.dtype, spec.shape)
            replica = self._table.replicas[row]
            is_copy = replica is not None and replica[0] > 0
            sums = known[row] if row in known else self._sums(row)
            self._report.rows.append((spec.name, box.offset, box.shape, is_copy, *sums))
        # A digest instead of the rows, because data-parallel ranks usually have the same rows.
        rows_digest = hex_digest(digest(msgspec.json.encode(self._report.rows)))
        return {"rows": rows_digest, "named": self._is_named}

    def decide(self, contributions: dict[int, Message]) -> dict[int, Message]:
        # A rank may hold nothing of the model.
        if self._view is not None and not any(message["named"] for message in contributions.values()):
            some = min(self._report.specs, default=None)
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
            self._report.rows.clear()
        message: Message = msgspec.to_builtins(self._report)
        return message

    def finish(self, reports: dict[int, Message]) -> Message:
        whole = Whole()
        for rank, message in sorted(reports.items()):
            whole.add(rank, from_roster(message, RankSums, rank))
        answer: Message = msgspec.to_builtins(whole.result())
        return answer

    def rows_of(self, reports: dict[int, Message]) -> Iterator[tuple[int, RankSums]]:
        """Yield the sums of each rank, also of those that sent none, because another rank has the same."""
        sent = {rank: from_roster(message, RankSums, rank) for rank, message in reports.items()}
        for rank, one in sorted(sent.items()):
            yield rank, RankSums(one.specs, sent[self._first[rank]].rows)

    def _sums(self, row: int) -> tuple[tuple[int, int], list[Numbers]]:
        spec, box, memory = self._table.specs[row], self._table.boxes[row], self._table.memory[row]
        itemsize = DTYPES[spec.dtype].size
        if (turned := turned_sums(memory, spec.dtype, box, self.operation.tick)) is not None:
            return turned, []
        sums, rounded = nothing(), RoundedSums(spec.dtype)
        for part in slabs(box, itemsize, _SLAB):
            inside = part.relative_to(box.offset)
            start = contiguous_at(box.shape, inside) if memory.address else None
            if start is not None:  # without a copy
                size = part.volume * itemsize
                data: Buffer = (ctypes.c_ubyte * size).from_address(memory.address + start * itemsize)
            else:
                data = memoryview(bytearray(part.volume * itemsize))
                memory.gather(inside, data)
            sums += box_sums(data, itemsize, part)
            rounded.add(data, part)
            self.operation.tick()
        return (int(sums[0]), int(sums[1])), rounded.numbers()


Specs = dict[str, tuple[int, tuple[int, Dims]]]
"""By name: the first rank with the tensor, and its dtype and shape there."""


def add_specs(known: Specs, rank: int, specs: Mapping[str, tuple[int, Dims]]) -> None:
    """Add the dtypes and shapes of a rank. ReplicaMismatch if another rank has others."""
    for name, spec in specs.items():
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
    sums: tuple[int, int]
    rounded: list[Numbers]
    """The sums in less exact dtypes."""
    owner: int | None = None
    """The first rank that has it other than as a declared copy."""
    copier: int | None = None
    """The first rank that has it as a declared copy."""


class Whole:
    """The sums of all ranks."""

    def __init__(self) -> None:
        self._specs: Specs = {}
        self._parts: dict[str, dict[tuple[Dims, Dims], _BoxSums]] = {}
        """By name, and offset and shape of the box."""

    def add(self, rank: int, rows: RankSums) -> None:
        add_specs(self._specs, rank, rows.specs)
        for name, offset, shape, is_copy, mine, rounded in rows.rows:
            parts = self._parts.get(name)
            if parts is None:
                parts = self._parts[name] = {}
            part = parts.get((offset, shape))
            if part is None:
                part = parts[offset, shape] = _BoxSums(rank, mine, rounded)
            if is_copy:
                part.copier = rank if part.copier is None else part.copier
            elif part.owner is None:
                part.owner = rank
            if part.sums != mine:
                raise ReplicaMismatch(
                    f"Ranks {part.rank} and {rank} hold different elements of {name!r}.",
                    rank=rank,
                    hint="If every rank has its own value, give it a name of its own.",
                    details={"tensor": name, "ranks": [part.rank, rank]},
                )

    def result(self) -> dict[str, Fingerprint]:
        return {name: self._of(name, *self._specs[name]) for name in sorted(self._specs)}

    def _of(self, name: str, rank: int, spec: tuple[int, Dims]) -> Fingerprint:
        dtype, shape = spec
        parts = self._parts.get(name, {})
        if len(parts) == 1:
            (((_, side), part),) = parts.items()
            if side == shape and part.owner is not None:  # whole, as most of 100,000 tensors
                rounded = rounded_of(dtype, [part.rounded]) if part.rounded else {}
                return Fingerprint(DTYPES[dtype].name, shape, total([part.sums]), rounded)
        mine = [part for part in parts.values() if part.owner is not None]
        boxes = [Box(*box) for box, part in parts.items() if part.owner is not None]
        check_covered(name, shape, [box for box in boxes if box.volume], rank)
        for box, part in parts.items():
            if part.owner is None and Box(*box).volume:
                raise ReplicaMismatch(
                    f"Rank {part.copier} declares a copy of {name!r} at {list(box[0])}, of shape "
                    f"{list(box[1])}, that is cut otherwise than on the ranks that hold it first: the "
                    "two can't be compared.",
                    rank=part.copier,
                    hint="Replicas must be cut alike.",
                    details={"tensor": name, "ranks": [rank, part.copier]},
                )
        rounded = rounded_of(dtype, [part.rounded for part in mine])
        return Fingerprint(DTYPES[dtype].name, shape, total([part.sums for part in mine]), rounded)


def total(parts: Sequence[tuple[int, int]]) -> str:
    """Return the fingerprint of a tensor from the sums of its parts."""
    first = second = 0
    for one, other in parts:
        first += one
        second += other
    return f"{first % (1 << 64):016x}{second % (1 << 64):016x}"


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
