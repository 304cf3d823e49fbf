"""Who writes a shard that several ranks hold: a rule that each of them evaluates alone.

A replica is (index, count). A shard is cut into up to `count` pieces of at least `split_bytes`,
along its first axis that is longer than 1, and piece j belongs to replica `(h + j) mod count`, where h
hashes the name and the box. So big shards are shared evenly and small ones spread at random;
the rule needs no list of what the others hold, and a rank whose list differs disturbs nothing
but the tensor that differs. (Longest-processing-time over the group's list balances a little
better and breaks for every tensor when one is missing: docs/decisions/0003.)

Every piece has witnesses: replicas that do not write it but send a digest of what they hold.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.format.digest import digest
from holdfast.layout.box import Box
from holdfast.layout.tensor import Replica


def cut(box: Box, nbytes: int, count: int, split_bytes: int) -> tuple[int, int]:
    """(axis, parts): how replicas of a box share it, the same on all of them. One part: not at all.

    The axis is the first longer than 1, so that a piece lies in the box in one piece.
    """
    parts = min(count, max(1, nbytes // split_bytes))
    axis = next((a for a, size in enumerate(box.shape) if size > 1), 0)
    return axis, min(parts, box.shape[axis]) if box.shape else 1


def piece(box: Box, axis: int, parts: int, number: int) -> Box:
    """One of the parts that `cut` makes."""
    if parts == 1:
        return box
    size = box.shape[axis]
    low, high = size * number // parts, size * (number + 1) // parts
    return Box(
        (*box.offset[:axis], box.offset[axis] + low, *box.offset[axis + 1 :]),
        (*box.shape[:axis], high - low, *box.shape[axis + 1 :]),
    )


def first_writer(name: str, box: Box, count: int) -> int:
    """The replica that writes piece 0."""
    # Not Python's hash, which each process salts: all ranks, and other versions in a job, must choose alike.
    return digest(f"{name}@{box.offset}".encode()) % count


def shares(
    name: str, box: Box, nbytes: int, replica: Replica, split_bytes: int, witness_all: bool
) -> Iterator[tuple[Box, bool]]:
    """(piece, does this replica write it?) for the pieces it writes or witnesses.

    It writes at most one, and witnesses that of the replica before it, or all others if `witness_all`.
    """
    # `plan.save.plan_save` has this rule a second time, for all rows at once that go in one piece: a loop
    # over thousands of experts is too slow. A change here is a change there; tests/plan/test_save.py compares
    # them.
    index, count = replica
    axis, parts = cut(box, nbytes, count, split_bytes)
    first = first_writer(name, box, count)
    # Piece `own` is this replica's. With fewer pieces than replicas, some write none.
    own = (index - first) % count
    if own < parts:
        yield piece(box, axis, parts, own), True
    for number in range(parts) if witness_all else ((own - 1) % count,):
        # Each piece has one witness by default, the replica after its writer: one digest more a rank.
        if number < parts and number != own:
            yield piece(box, axis, parts, number), False
