"""Check that the rows of all ranks agree: shapes, dtypes, coverage, witnesses, names of the previous step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from holdfast._core.format.columns import Array, unpad
from holdfast._core.format.digest import digest_many
from holdfast._core.layout.coverage import Problem, first_problem
from holdfast._core.layout.deferred_offset import place
from holdfast._core.layout.tensor import DTYPES, KINDS, OBJECT, TensorSpec, listed, nearest
from holdfast.errors import CoverageError, ReplicaMismatch, Vanished

DECLARE = (
    "If every rank has its own value, wrap it in holdfast.PerRank or give it a name of its own (a global "
    "expert number); if it is a part of a larger tensor, declare it with holdfast.Shard or as a DTensor."
)
# 2^64 divided by the golden ratio: odd, so that multiplication is invertible, and its bits have no pattern.
_MIX = np.uint64(0x9E3779B97F4A7C15)


class RankRows(NamedTuple):
    """The rows of one rank, with global tensor rows."""

    tensor: Array
    offset: Array
    size: Array
    file: Array
    position: Array
    block: Array
    digest_count: Array
    digests: Array
    fingerprint_first: Array
    fingerprint_second: Array
    rank: Array
    witness_tensor: Array
    witness_offset: Array
    witness_size: Array
    witness_block: Array
    witness_digest: Array
    witness_rank: Array
    chunk_late: Array
    witness_late: Array
    late_tensor: Array
    late_axis: Array
    late_lane: Array
    late_position: Array
    late_length: Array
    late_start: Array
    late_rank: Array


def what(spec: TensorSpec) -> str:
    """Return `float32[4, 8]`, or `an object of 12 bytes`."""
    if spec.kind == OBJECT:
        return f"an {KINDS[spec.kind]} of {spec.shape[0]} bytes"
    return f"{DTYPES[spec.dtype].name}{list(spec.shape)}"


def disagreement(
    name: str, rank: int, description: str, other: int, other_description: str
) -> ReplicaMismatch:
    return ReplicaMismatch(
        f"Ranks disagree on {name!r}: rank {rank} holds {description}, rank {other} {other_description}.",
        rank=other,
        hint=DECLARE,
        details={"tensor": name, "ranks": [rank, other]},
    )


def place_deferred(names: list[str], shapes: Array, ndim: Array, rows: RankRows) -> None:
    """Compute deferred offsets from the lengths that all ranks hold; boxes change in place."""
    if not len(rows.late_tensor):
        return
    pad_of = shapes.shape[1] - ndim.astype(np.int64)
    placed = place(
        rows.late_tensor,
        rows.late_axis,
        rows.late_lane,
        rows.late_position,
        rows.late_length,
        rows.late_start,
        shapes[rows.late_tensor, pad_of[rows.late_tensor] + rows.late_axis],
    )
    if placed.differ is not None:
        one, other = placed.differ
        tensor, axis = int(rows.late_tensor[one]), int(rows.late_axis[one])
        ranks = [int(rows.late_rank[row]) for row in (one, other)]
        raise ReplicaMismatch(
            f"Ranks {ranks[0]} and {ranks[1]} hold the same part of {names[tensor]!r}, number "
            f"{int(rows.late_position[one])} along axis {axis}, but one has length "
            f"{int(rows.late_length[one])} there and the other {int(rows.late_length[other])}.",
            rank=ranks[1],
            hint="Replicas must be cut alike.",
            details={"tensor": names[tensor], "ranks": ranks},
        )
    for tensor, axis, total in placed.totals:
        wanted = int(shapes[tensor, shapes.shape[1] - int(ndim[tensor]) + axis])
        if total != wanted:
            raise _wrong_total(
                names[tensor], unpad(shapes[tensor], int(ndim[tensor])), axis, total, tensor, rows
            )
    for late, tensor_of, offset in (
        (rows.chunk_late, rows.tensor, rows.offset),
        (rows.witness_late, rows.witness_tensor, rows.witness_offset),
    ):
        known = np.flatnonzero(late >= 0)
        axes = rows.late_axis[late[known]] + pad_of[tensor_of[known]]
        offset[known, axes] += placed.shift[late[known]]


def _wrong_total(
    name: str, shape: tuple[int, ...], axis: int, total: int, tensor: int, rows: RankRows
) -> CoverageError:
    mine = np.flatnonzero(rows.late_tensor == tensor)
    lengths = dict(sorted(zip(rows.late_rank[mine].tolist(), rows.late_length[mine].tolist(), strict=True)))
    summary = listed([f"rank {rank} holds {length}" for rank, length in lengths.items()], str)
    return CoverageError(
        f"Tensor {name!r} of shape {list(shape)}: what ranks hold along axis {axis} adds up to {total}: "
        f"{summary}.",
        hint="Every rank of its mesh must take part in the save, and hold what its position says.",
        details={"tensor": name, "kind": "length", "ranks": list(lengths)[:64]},
    )


def check_coverage(names: list[str], shapes: Array, ndim: Array, first: Array, rows: RankRows) -> None:
    """Raise CoverageError for the first tensor that is not tiled exactly once. first: a rank that names each
    tensor."""
    problem = first_problem(shapes, rows.tensor, rows.offset, rows.size)
    if problem is None:
        return
    name, dims = names[problem.tensor], int(ndim[problem.tensor])
    mine = np.flatnonzero(rows.tensor == problem.tensor)
    ranks = sorted(set(rows.rank[mine].tolist()))
    place = unpad(np.asarray(problem.place), dims)
    shape = unpad(shapes[problem.tensor], dims)
    location = f"from index {list(place)} on" if dims else "its one element"
    below = [other for other in names if other.startswith(f"{name}.")] if problem.kind == "gap" else []
    sentence, guilty = _say(problem, rows, mine, ranks, location, int(first[problem.tensor]))
    raise CoverageError(
        f"Tensor {name!r} of shape {list(shape)} {sentence}.",
        rank=guilty,
        hint=f"Other ranks hold it in parts, {listed(below, most=3)}: it is quantized there, not here. Some "
        "optimizers leave small parts of a parameter plain; cut it over fewer ranks, or keep it plain on all."
        if below
        else "Check the offsets, global shapes and replica counts that these ranks declare, and that every "
        "rank which holds a part takes part in the save.",
        details={"tensor": name, "kind": problem.kind, "place": list(place), "ranks": ranks[:64]},
    )


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:8]))


def _say(
    problem: Problem, rows: RankRows, mine: Array, ranks: list[int], location: str, first: int
) -> tuple[str, int | None]:
    listed = _ranks(ranks) + (" and others" if len(ranks) > 8 else "")
    if problem.kind == "gap":
        seen = sorted(set(rows.witness_rank[rows.witness_tensor == problem.tensor].tolist()))
        say = "says it holds a copy" if len(seen) == 1 else "say they hold copies"
        holders = f"; {_ranks(seen)} {say}" if seen else ""
        wrote = f"{listed} wrote the rest" if ranks else f"rank {first} names it, and no rank wrote any of it"
        return f"is not covered: {location} no rank wrote it, {wrote}{holders}", None
    place = np.asarray(problem.place)
    # The boxes that contain the first doubled index; the error names their writers.
    inside = mine[((rows.offset[mine] <= place) & (place < rows.offset[mine] + rows.size[mine])).all(axis=1)]
    if problem.kind == "overlap":
        twice = sorted(set(rows.rank[inside].tolist()))
        said = (
            f": {location} {_ranks(twice)} wrote it" if len(twice) > 1 else f" {location} by {_ranks(twice)}"
        )
        return f"is covered twice{said}", (twice[0] if twice else None)
    rank = int(rows.rank[problem.chunk])
    return f"has a shard of rank {rank} that lies outside it, at {list(problem.place)}", rank


def box_keys(tensor: Array, offset: Array, size: Array) -> Array:
    """Return a 64-bit number per box, equal for equal boxes."""
    with np.errstate(over="ignore"):
        key = tensor.astype("<u8") * _MIX
        for column in (*offset.T, *size.T):
            key = (key ^ (key >> np.uint64(29))) * _MIX + column.astype("<u8")
    return key


def check_witnesses(names: list[str], rows: RankRows) -> None:
    """Raise ReplicaMismatch if a replica does not hold the bytes that were written."""
    if not len(rows.witness_tensor):
        return
    # Boxes are matched by a 64-bit key, without a loop over millions of rows.
    keys = box_keys(rows.tensor, rows.offset, rows.size)
    order = np.argsort(keys)
    wanted = box_keys(rows.witness_tensor, rows.witness_offset, rows.witness_size)
    position = np.minimum(np.searchsorted(keys[order], wanted), max(len(keys) - 1, 0))
    chunk = order[position] if len(order) else position
    # A witness without a chunk of exactly its box is skipped: coverage has checked that nothing is missing.
    known = keys[chunk] == wanted if len(keys) else np.zeros(len(wanted), bool)
    begin = np.cumsum(rows.digest_count) - rows.digest_count
    part = np.flatnonzero(known & (rows.witness_block >= 0))
    # Clipped to the chunk: a number out of range must not select a digest of another chunk.
    block = np.minimum(rows.witness_block[part], rows.digest_count[chunk[part]] - 1)
    differ = part[rows.digests[begin[chunk[part]] + block] != rows.witness_digest[part]].tolist()
    # Computed once per chunk, regardless of the number of its witnesses.
    whole: dict[int, int] = {}
    for row in np.flatnonzero(known & (rows.witness_block < 0)).tolist():
        of = int(chunk[row])
        if of not in whole:
            whole[of] = digest_many(rows.digests[begin[of] : begin[of] + rows.digest_count[of]])
        if whole[of] != int(rows.witness_digest[row]):
            differ.append(row)
    if not differ:
        return
    # The first by name and rank, so that the same fault always gives the same message.
    first = min(differ, key=lambda row: (names[int(rows.witness_tensor[row])], int(rows.witness_rank[row])))
    tensor, writer = int(rows.witness_tensor[first]), int(rows.rank[chunk[first]])
    others = sorted(
        {int(rows.witness_rank[row]) for row in differ if int(rows.witness_tensor[row]) == tensor}
    )
    tensors = sorted({names[int(rows.witness_tensor[row])] for row in differ})
    more = (
        f" ({len(tensors)} such names, also {', '.join(map(repr, tensors[1:4]))})" if len(tensors) > 1 else ""
    )
    raise ReplicaMismatch(
        f"Under the one name {names[tensor]!r} rank {writer} and rank{'s' if len(others) > 1 else ''} "
        f"{', '.join(map(str, others[:8]))} hold different bytes{more}; saving one of them would lose the "
        "others.",
        rank=others[0],
        hint=DECLARE,
        details={"tensor": names[tensor], "ranks": [writer, *others[:64]], "tensors": tensors[:10]},
    )


def check_vanished(
    names: Iterable[str], before: Iterable[str], whose: str, wrote: Callable[[str], list[int]]
) -> None:
    """Raise Vanished if a name of `before` is missing."""
    now = set(names)
    gone = sorted(name for name in before if name not in now)
    if not gone:
        return

    def say(name: str) -> str:
        # Called only for the few names that are shown, because it opens the previous index each time.
        ranks = wrote(name)
        return f"{name!r}" + (f" (last written by rank {', '.join(map(str, ranks[:4]))})" if ranks else "")

    near = nearest(gone[0], now)
    ranks = wrote(gone[0])
    raise Vanished(
        f"{len(gone)} name{'s' if len(gone) > 1 else ''} that {whose} has {'are' if len(gone) > 1 else 'is'} "
        f"not in this save: {listed(gone, say)}.",
        rank=ranks[0] if ranks else None,
        hint=(f"The nearest name that is there is {near!r}. " if near else "")
        + "If they were removed on purpose, say so: expected=None.",
        details={"names": gone[:100]},
    )
