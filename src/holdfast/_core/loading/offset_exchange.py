"""Compute the offsets of shards that depend on the local length of every rank.

A save computes them at its commit. A load needs them before it reads, so the ranks exchange messages once
more: each sends its lengths along the uneven axis, and the committer adds them up. This happens only in loads
in which a rank has such a shard: its `Unplaced` error reaches all ranks, and they start the exchange.
"""

from __future__ import annotations

import msgspec
import numpy as np

from holdfast._core.base.values import Message
from holdfast._core.layout.box import Box
from holdfast._core.layout.deferred_offset import place
from holdfast._core.layout.tensor import listed
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.protocol.call import Call
from holdfast._core.protocol.messages import from_roster, to_message
from holdfast._core.protocol.task import CollectiveTask
from holdfast._core.store.base import Store
from holdfast.errors import BadInput, HoldfastError, Unplaced


def unplaced(table: ShardTable, title: str) -> HoldfastError | None:
    """Return `Unplaced` if this rank has a shard without an offset, or knows of an uneven shard line (which
    other ranks may not see); else None."""
    for spec, deferred in zip(table.specs, table.deferred, strict=True):
        if deferred is not None and deferred.start < 0:
            return Unplaced(
                f"{title}: rank {table.rank} holds a part of {spec.name!r} without an offset along axis "
                f"{deferred.axis}.",
                rank=table.rank,
            )
    return None


class Lengths(msgspec.Struct, frozen=True):
    """From each rank to the committer: its deferred rows."""

    rows: list[tuple[str, int, int, int, int, int, int]]
    """Name and length of the tensor along the axis, then the fields of `DeferredOffset`."""


class Shifts(msgspec.Struct, frozen=True):
    """From the committer to one rank: what to add to the offset of each of its deferred rows, in order."""

    shifts: list[int]


class OffsetExchange(CollectiveTask):
    """`shifts`: for each deferred row of this rank, in order, what to add to its box's offset."""

    kind = "load"

    def of(self, table: ShardTable, collect_error: HoldfastError | None) -> OffsetExchange:
        # `Unplaced` has led to this exchange; any other error was hidden by another rank's `Unplaced`.
        if not isinstance(collect_error, Unplaced):
            self.collect_error = collect_error
        self.rows = [
            (spec.name, spec.shape[deferred.axis], *deferred)
            for spec, deferred in zip(table.specs, table.deferred, strict=True)
            if deferred is not None
        ]
        return self

    def contribute(self) -> Message:
        return to_message(Lengths(self.rows))

    def decide(self, contributions: dict[int, Message]) -> dict[int, Message]:
        lengths = {
            rank: from_roster(message, Lengths, rank) for rank, message in sorted(contributions.items())
        }
        rows = [(rank, *row) for rank, message in lengths.items() for row in message.rows]
        # Names as numbers: `place` sorts arrays, and all ranks together may send millions of rows.
        number: dict[str, int] = {}
        tensor = [number.setdefault(row[1], len(number)) for row in rows]
        lines = np.asarray([row[2:] for row in rows], np.int64).reshape(-1, 6)
        size, axis, shard_line, position, length, start = lines.T
        placement = place(np.asarray(tensor, np.int64), axis, shard_line, position, length, start, size)
        names = list(number)
        sizes = dict(zip(zip(tensor, axis.tolist(), strict=True), size.tolist(), strict=True))
        if placement.differ is not None:
            one, other = (rows[row] for row in placement.differ)
            raise BadInput(
                f"Ranks {one[0]} and {other[0]} hold the same part of {one[1]!r}, number {one[5]} along axis "
                f"{one[3]}, but one has length {one[6]} there and the other {other[6]}.",
                rank=other[0],
            )
        for index, along, total in placement.totals:
            if total != sizes[index, along]:
                mine = [row for row, other in zip(rows, tensor, strict=True) if other == index]
                have = listed([f"rank {row[0]} holds {row[6]}" for row in mine], str)
                raise BadInput(
                    f"What ranks hold of {names[index]!r} along axis {along} adds up to {total}, but it has "
                    f"{sizes[index, along]} there: {have}.",
                    hint="Every rank of its mesh must take part in the load.",
                )
        shifts: dict[int, list[int]] = {rank: [] for rank in contributions}
        for row, shift in zip(rows, placement.shift.tolist(), strict=True):
            shifts[row[0]].append(shift)
        return {rank: to_message(Shifts(mine)) for rank, mine in shifts.items()}

    def execute(self, answer: Message) -> Message:
        self.shifts = from_roster(answer, Shifts).shifts
        return {}


def exchange_offsets(
    store: Store, call: Call, table: ShardTable, collect_error: HoldfastError | None
) -> OffsetExchange:
    """Send this rank's lengths along uneven axes, and receive the offsets of its shards."""
    place = call.place or store.url
    title = f"lengths for the load of {store.url}"
    lengths = OffsetExchange(title, f"{place}|lengths", call).of(table, collect_error)
    lengths.run()
    return lengths


def put_in_place(table: ShardTable, lengths: OffsetExchange) -> None:
    """Move the boxes of deferred rows to their offsets."""
    rows = [row for row, deferred in enumerate(table.deferred) if deferred is not None]
    # The state was collected again for this pass, but the shifts belong to the rows that were sent.
    if [(table.specs[row].name, *(table.deferred[row] or ())) for row in rows] != [
        (name, *rest) for name, _, *rest in lengths.rows
    ]:
        raise BadInput("The state has changed since its ranks told how much of each tensor they hold.")
    for row, shift in zip(rows, lengths.shifts, strict=True):
        deferred, box = table.deferred[row], table.boxes[row]
        if shift and deferred is not None and box.volume:
            offset = list(box.offset)
            offset[deferred.axis] += shift
            table.boxes[row] = Box(tuple(offset), box.shape)
