"""Choose the writer of a shard that several ranks hold, by a rule that each rank evaluates alone.

A replica is (index, count). At most WRITERS replicas write, spread evenly over all of them. A shard is cut
into up to as many pieces, of at least `split_bytes`, along its first axis that is longer than 1. Piece j
belongs to writer `(h + j) mod writers`, where h is a hash of the name and the offset. So large shards are
divided evenly, and small ones are spread at random. A rank needs no list of what other ranks hold, and a rank
with a differing tensor affects that tensor only.
(Longest-processing-time scheduling over the group's list balances a little better, but one missing tensor
breaks the assignment of all others: docs/decisions/0003.)

Every piece has witnesses: replicas that do not write it, but send a digest of their copy.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast._core.format.digest import digest
from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import Replica

WRITERS = 64
"""Maximum number of replicas that write a shard. A load opens a file of each; every file costs metadata
operations."""


def spread(count: int) -> tuple[int, int]:
    """Return how many of `count` replicas write, and the distance between two of them."""
    writers = min(count, WRITERS)
    return writers, count // max(writers, 1)


def cut(box: Box, nbytes: int, count: int, split_bytes: int) -> tuple[int, int]:
    """Return (axis, parts): how all replicas of a box divide it among them. One part: it is not divided.

    The axis is the first longer than 1, so that every piece is contiguous in the box.
    """
    parts = min(spread(count)[0], max(1, nbytes // split_bytes))
    axis = next((a for a, size in enumerate(box.shape) if size > 1), 0)
    return axis, min(parts, box.shape[axis]) if box.shape else 1


def piece(box: Box, axis: int, parts: int, number: int) -> Box:
    """Return one of the parts that `cut` defines."""
    if parts == 1:
        return box
    size = box.shape[axis]
    low, high = size * number // parts, size * (number + 1) // parts
    return Box(
        (*box.offset[:axis], box.offset[axis] + low, *box.offset[axis + 1 :]),
        (*box.shape[:axis], high - low, *box.shape[axis + 1 :]),
    )


def first_writer(name: str, box: Box, count: int) -> int:
    """Return the replica that writes piece 0."""
    # Not Python's hash, which each process salts: all ranks must choose the same, even with other versions.
    writers, distance = spread(count)
    return digest(f"{name}@{box.offset}".encode()) % writers * distance


def shares(
    name: str, box: Box, nbytes: int, replica: Replica, split_bytes: int, witness_all: bool
) -> Iterator[tuple[Box, bool]]:
    """Yield (piece, whether this replica writes it) for the pieces that it writes or witnesses.

    It writes at most one. It witnesses the piece of the replica before it, or all others if `witness_all`.
    """
    # `plan.save.plan_save` has this rule again, as array code for rows of one piece: a loop over thousands of
    # experts is too slow. Change both together; tests/plan/test_save.py compares them.
    index, count = replica
    axis, parts = cut(box, nbytes, count, split_bytes)
    writers, distance = spread(count)
    first = first_writer(name, box, count) // distance

    def of_writer(index: int) -> int:
        """Return the number of the piece that a replica writes; -1 if it is not a writer."""
        writer, between = divmod(index % count, distance)
        return -1 if between or writer >= writers else (writer - first) % writers

    # With fewer pieces than writers, some writers write none.
    own = of_writer(index)
    if 0 <= own < parts:
        yield piece(box, axis, parts, own), True
    for number in range(parts) if witness_all else (of_writer(index - 1),):
        # By default each piece has one witness, the replica after its writer: one more digest per rank.
        if 0 <= number < parts and number != own:
            yield piece(box, axis, parts, number), False
