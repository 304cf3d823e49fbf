"""Who writes a shard that several ranks hold: a rule that each of them evaluates alone.

A replica is (index, count). A shard is cut into up to `count` pieces of at least `split_bytes`,
along its first axis that is long enough, and piece j belongs to replica `(h + j) mod count`, where h
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
from holdfast.plan.holding import Replica


def pieces(box: Box, nbytes: int, count: int, split_bytes: int) -> Iterator[Box]:
    """The pieces that replicas of a box share, the same on all of them."""
    parts = min(count, max(1, nbytes // split_bytes))
    axis = next((a for a, size in enumerate(box.shape) if size >= parts), None)
    if parts == 1 or axis is None or any(size > 1 for size in box.shape[:axis]):
        long = next((a for a, size in enumerate(box.shape) if size > 1), None)
        if parts == 1 or long is None:
            yield box
            return
        axis, parts = long, min(parts, box.shape[long])
    yield from box.split(axis, parts)


def first_writer(name: str, box: Box, count: int) -> int:
    """The replica that writes piece 0."""
    return digest(f"{name}@{box.offset}".encode()) % count


def shares(name: str, box: Box, nbytes: int, replica: Replica, split_bytes: int) -> Iterator[tuple[Box, int]]:
    """(piece, its writer's index) for every piece of a replicated box."""
    count = replica[1]
    first = first_writer(name, box, count)
    for at, piece in enumerate(pieces(box, nbytes, count, split_bytes)):
        yield piece, (first + at) % count
