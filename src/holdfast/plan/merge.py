"""Merge the columns of all ranks into one index, after checking that they agree. Pure.

Ranks are added one at a time, so that only numbers stay in memory. Then all ranks are checked at once: each
name has one shape and dtype, every tensor is covered exactly once, every witness's digest equals the
writer's, and no name of the previous step is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from holdfast.errors import CoverageError, ReplicaMismatch, Vanished
from holdfast.format.columns import Array, Columns, expand_ranges, pad, unpad
from holdfast.format.digest import digest_many
from holdfast.layout.coverage import Problem, first_problem
from holdfast.layout.deferred_offset import place
from holdfast.layout.tensor import DTYPES, KINDS, OBJECT, listed, nearest

DECLARE = (
    "If every rank has its own value, wrap it in holdfast.PerRank or give it a name of its own (a global "
    "expert number); if it is a part of a larger tensor, declare it with holdfast.Shard or as a DTensor."
)
# 2^64 divided by the golden ratio: odd, so that multiplication is invertible, and its bits have no pattern.
_MIX = np.uint64(0x9E3779B97F4A7C15)


class _Part(NamedTuple):
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


class Merger:
    """Collects the columns of all ranks; `finish` checks them and returns those of the whole checkpoint."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._dtype: list[int] = []
        self._kind: list[int] = []
        self._shape: list[tuple[int, ...]] = []
        self._rank: list[int] = []
        self._parts: list[_Part] = []
        self._file_names: list[str] = []
        self._file_size: list[int] = []
        self._file_rank: list[int] = []
        self._deferred_before = 0
        self._dims = 1

    def add(self, rank: int, columns: Columns) -> None:
        """Add the embedded index of one data file."""
        place = self._place(rank, columns)
        base = len(self._file_names)
        late = place[columns.late_tensor]
        self._file_names += columns.file_names
        self._file_size += columns.file_size.tolist()
        self._file_rank += columns.file_rank.tolist()
        self._dims = max(self._dims, columns.dims)
        self._parts.append(
            _Part(
                tensor=place[columns.tensor_of_chunk()],
                offset=columns.offset,
                size=columns.size,
                file=columns.file + base,
                position=columns.position,
                block=columns.block,
                # Counts, not ends: `finish` puts chunks into another order.
                digest_count=np.diff(columns.digest_end, prepend=0),
                digests=columns.digests,
                fingerprint_first=columns.fingerprint_first,
                fingerprint_second=columns.fingerprint_second,
                rank=np.full(len(columns.file), rank, "<i4"),
                witness_tensor=place[columns.witness_tensor],
                witness_offset=columns.witness_offset,
                witness_size=columns.witness_size,
                witness_block=columns.witness_block,
                witness_digest=columns.witness_digest,
                witness_rank=np.full(len(columns.witness_tensor), rank, "<i4"),
                chunk_late=self._numbered(columns.chunk_late, len(columns.file)),
                witness_late=self._numbered(columns.witness_late, len(columns.witness_tensor)),
                late_tensor=late,
                late_axis=columns.late_axis,
                late_lane=columns.late_lane,
                late_position=columns.late_position,
                late_length=columns.late_length,
                late_start=columns.late_start,
                late_rank=np.full(len(late), rank, "<i4"),
            )
        )
        self._deferred_before += len(late)

    def _numbered(self, late: Array, rows: int) -> Array:
        """Return deferred rows, numbered over all files; -1 (not deferred) stays."""
        numbers = late if len(late) == rows else np.full(rows, -1, "<i8")
        # The rows of each file are numbered from 0, so the rows of earlier files are added.
        return np.where(numbers < 0, -1, numbers + self._deferred_before)

    def _place(self, rank: int, columns: Columns) -> Array:
        """Return the global row of each tensor of a rank. ReplicaMismatch if a name has another meaning
        here."""
        rows, place = self._rows, np.zeros(len(columns.names), np.int64)
        dtypes, kinds, ndims = columns.dtype.tolist(), columns.kind.tolist(), columns.ndim.tolist()
        shapes = columns.shape.tolist()
        for index, name in enumerate(columns.names):
            shape = tuple(shapes[index][len(shapes[index]) - ndims[index] :])
            # This is the only loop over names. Chunks, digests and witnesses are many more, and stay in
            # arrays.
            row = rows.setdefault(name, len(self._dtype))
            if row == len(self._dtype):
                self._dtype.append(dtypes[index])
                self._kind.append(kinds[index])
                self._shape.append(shape)
                self._rank.append(rank)
            elif (self._dtype[row], self._kind[row], self._shape[row]) != (
                dtypes[index],
                kinds[index],
                shape,
            ):
                raise disagreement(
                    name,
                    self._rank[row],
                    what(self._kind[row], self._dtype[row], self._shape[row]),
                    rank,
                    what(kinds[index], dtypes[index], shape),
                )
            place[index] = row
        return place

    def finish(self, tick: Callable[[], None] = lambda: None, is_slice: bool = False) -> Columns:
        """Check everything, and return the columns, sorted by name and box. A slice may have gaps."""
        names = np.asarray(list(self._rows), dtype=object)
        # Python compares text by code points, which gives the order of UTF-8 bytes that the format requires.
        by_name = np.argsort(names, kind="stable") if len(names) else np.zeros(0, np.int64)
        rank_of_row = np.empty(len(names), np.int64)
        rank_of_row[by_name] = np.arange(len(names))
        sorted_names = [str(name) for name in names[by_name]]
        tick()  # each step takes seconds for a large world, and other ranks watch for a stall

        joined = self._join(rank_of_row)
        tick()
        shapes = pad(self._shape, self._dims, 1)[by_name]
        ndim = np.asarray([len(shape) for shape in self._shape], "u1")[by_name]
        # Before coverage, which needs the final offsets.
        place_deferred(sorted_names, shapes, ndim, joined)
        tick()
        first = np.asarray(self._rank, np.int64)[by_name] if len(names) else np.zeros(0, np.int64)
        if not is_slice:
            check_coverage(sorted_names, shapes, ndim, first, joined)
        tick()

        # Sort rows by tensor, then by offset.
        order = np.lexsort((*joined.offset.T[::-1], joined.tensor))
        counts = joined.digest_count[order]
        # The digests of each chunk, in the new order.
        begin = (np.cumsum(joined.digest_count) - joined.digest_count)[order]
        gather = expand_ranges(begin, counts)
        tick()
        # After coverage, which has checked that no two chunks have the same box.
        check_witnesses(sorted_names, joined)
        tick()

        # All chunks or none: a rank that does not know its offsets when it writes can't compute the sums.
        summed = order if len(joined.fingerprint_first) == len(order) else order[:0]
        return Columns(
            names=sorted_names,
            dtype=np.asarray(self._dtype, "u1")[by_name],
            kind=np.asarray(self._kind, "u1")[by_name],
            ndim=ndim,
            shape=shapes,
            chunk_end=np.cumsum(np.bincount(joined.tensor, minlength=len(names)), dtype="<i8"),
            offset=joined.offset[order],
            size=joined.size[order],
            file=joined.file[order].astype("<i4"),
            position=joined.position[order],
            block=joined.block[order],
            digest_end=np.cumsum(counts, dtype="<i8"),
            digests=joined.digests[gather],
            fingerprint_first=joined.fingerprint_first[summed],
            fingerprint_second=joined.fingerprint_second[summed],
            file_names=self._file_names,
            file_size=np.asarray(self._file_size, "<i8"),
            file_rank=np.asarray(self._file_rank, "<i4"),
            # Witnesses are checked by now: the main index has none.
            witness_offset=np.zeros((0, self._dims), "<i8"),
            witness_size=np.zeros((0, self._dims), "<i8"),
        )

    def _join(self, renumber: Array) -> _Part:
        """Join and free all parts, with tensor rows in sorted order and boxes padded to equal dimensions."""
        parts, self._parts = self._parts, []

        def wide(name: str, fill: int) -> Array:
            total = sum(len(getattr(part, name)) for part in parts)
            out = np.full((total, self._dims), fill, "<i8")
            row = 0
            for part in parts:
                value = getattr(part, name)
                # Files differ in their number of dimensions. Leading axes are padding, with length 1.
                out[row : row + len(value), self._dims - value.shape[1] :] = value
                row += len(value)
            return out

        def flat(name: str) -> Array:
            is_sum = name.startswith("fingerprint") or ("digest" in name and "count" not in name)
            empty = np.zeros(0, "<u8" if is_sum else "<i8")
            return np.concatenate([getattr(part, name) for part in parts]) if parts else empty

        columns = {}
        for name in _Part._fields:
            box = name.endswith(("offset", "size"))
            columns[name] = wide(name, 0 if name.endswith("offset") else 1) if box else flat(name)
        columns["tensor"] = renumber[columns["tensor"]]
        columns["witness_tensor"] = renumber[columns["witness_tensor"]]
        columns["late_tensor"] = renumber[columns["late_tensor"]]
        return _Part(**columns)


def what(kind: int, dtype: int, shape: tuple[int, ...]) -> str:
    """Return `float32[4, 8]`, or `an object of 12 bytes`."""
    if kind == OBJECT:
        return f"an {KINDS[kind]} of {shape[0]} bytes"
    return f"{DTYPES[dtype].name}{list(shape)}"


def disagreement(
    name: str, rank: int, description: str, other: int, other_description: str
) -> ReplicaMismatch:
    return ReplicaMismatch(
        f"Ranks disagree on {name!r}: rank {rank} holds {description}, rank {other} {other_description}.",
        rank=other,
        hint=DECLARE,
        details={"tensor": name, "ranks": [rank, other]},
    )


def place_deferred(names: list[str], shapes: Array, ndim: Array, rows: _Part) -> None:
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
    name: str, shape: tuple[int, ...], axis: int, total: int, tensor: int, rows: _Part
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


def check_coverage(names: list[str], shapes: Array, ndim: Array, first: Array, rows: _Part) -> None:
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
    sentence, guilty = _say(problem, rows, mine, ranks, location, int(first[problem.tensor]))
    raise CoverageError(
        f"Tensor {name!r} of shape {list(shape)} {sentence}.",
        rank=guilty,
        hint="Check the offsets, global shapes and replica counts that these ranks declare, and that every "
        "rank which holds a part takes part in the save.",
        details={"tensor": name, "kind": problem.kind, "place": list(place), "ranks": ranks[:64]},
    )


def _say(
    problem: Problem, rows: _Part, mine: Array, ranks: list[int], location: str, first: int
) -> tuple[str, int | None]:
    listed = ", ".join(map(str, ranks[:8])) + (" and others" if len(ranks) > 8 else "")
    if problem.kind == "gap":
        seen = sorted(set(rows.witness_rank[rows.witness_tensor == problem.tensor].tolist()))
        holders = f"; ranks {', '.join(map(str, seen[:8]))} say they hold copies" if seen else ""
        wrote = (
            f"ranks {listed} wrote the rest"
            if ranks
            else f"rank {first} names it, and no rank wrote any of it"
        )
        return f"is not covered: {location} no rank wrote it, {wrote}{holders}", None
    place = np.asarray(problem.place)
    # The boxes that contain the first doubled index; the error names their writers.
    inside = mine[((rows.offset[mine] <= place) & (place < rows.offset[mine] + rows.size[mine])).all(axis=1)]
    if problem.kind == "overlap":
        twice = sorted(set(rows.rank[inside].tolist()))
        who = ", ".join(map(str, twice[:8]))
        return f"is covered twice: {location} ranks {who} wrote it" if len(
            twice
        ) > 1 else f"is covered twice {location} by rank {who}", (twice[0] if twice else None)
    rank = int(rows.rank[problem.chunk])
    return f"has a shard of rank {rank} that lies outside it, at {list(problem.place)}", rank


def _keys(tensor: Array, offset: Array, size: Array) -> Array:
    """Return a 64-bit number per box, equal for equal boxes."""
    with np.errstate(over="ignore"):
        key = tensor.astype("<u8") * _MIX
        for column in (*offset.T, *size.T):
            key = (key ^ (key >> np.uint64(29))) * _MIX + column.astype("<u8")
    return key


def check_witnesses(names: list[str], rows: _Part) -> None:
    """Raise ReplicaMismatch if a replica does not hold the bytes that were written."""
    if not len(rows.witness_tensor):
        return
    # Boxes are matched by a 64-bit key, without a loop over millions of rows.
    keys = _keys(rows.tensor, rows.offset, rows.size)
    order = np.argsort(keys)
    wanted = _keys(rows.witness_tensor, rows.witness_offset, rows.witness_size)
    position = np.minimum(np.searchsorted(keys[order], wanted), max(len(keys) - 1, 0))
    chunk = order[position] if len(order) else position
    # A witness without a chunk of exactly its box is skipped: coverage has checked that nothing is missing.
    known = keys[chunk] == wanted if len(keys) else np.zeros(len(wanted), bool)
    begin = np.cumsum(rows.digest_count) - rows.digest_count
    part = np.flatnonzero(known & (rows.witness_block >= 0))
    # Clipped to the chunk: a number out of range must not select a digest of another chunk.
    block = np.minimum(rows.witness_block[part], rows.digest_count[chunk[part]] - 1)
    differ = part[rows.digests[begin[chunk[part]] + block] != rows.witness_digest[part]].tolist()
    # Once per chunk, however many witnesses it has.
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


def same_tensors(a: Columns, b: Columns) -> int:
    """Return the number of tensors of two indexes with the same tensors, chunk counts and digests; otherwise
    0."""
    alike = (
        a.names == b.names
        and np.array_equal(a.kind, b.kind)
        and np.array_equal(a.chunk_end, b.chunk_end)
        and np.array_equal(a.digest_end, b.digest_end)
    )
    if not alike:
        return 0
    # Objects hold the step and other counters, which change although training stands still.
    is_tensor = (a.kind != OBJECT)[a.tensor_of_chunk()]
    of_block = np.repeat(is_tensor, np.diff(a.digest_end, prepend=0))
    return int((a.kind != OBJECT).sum()) if np.array_equal(a.digests[of_block], b.digests[of_block]) else 0
