"""Merge the columns of all ranks into one index, after checking that they agree. Pure.

Ranks are added one at a time, so that only arrays of numbers stay in memory. Then all are checked at once:
each name has one shape and dtype, every tensor is covered exactly once, every witness's digest equals the
writer's, and no name of the previous step is missing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from holdfast._core.format.columns import FINGERPRINTS, Array, Columns, counts_of, expand_ranges, pad
from holdfast._core.layout.tensor import OBJECT, TensorSpec
from holdfast._core.plan.agreement import (
    RankRows,
    check_coverage,
    check_witnesses,
    disagreement,
    place_deferred,
    what,
)

_UNCHANGED = (
    *("offset", "size", "position", "block", "digests", *FINGERPRINTS),
    *("witness_offset", "witness_size", "witness_block", "witness_digest"),
    *("late_axis", "late_lane", "late_position", "late_length", "late_start"),
)
"""Columns of a data file that are copied unchanged."""


class Merger:
    """Collects the columns of all ranks; `finish` checks them and returns those of the whole checkpoint."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._specs: list[TensorSpec] = []
        self._rank: list[int] = []
        self._parts: list[RankRows] = []
        self._file_names: list[str] = []
        self._file_size: list[int] = []
        self._file_rank: list[int] = []
        self._deferred_before = 0
        self._dims = 1
        self._shared = False

    def add(self, rank: int, columns: Columns) -> None:
        place = self._place(rank, columns)
        base = len(self._file_names)
        late = place[columns.late_tensor]
        self._file_names += columns.file_names
        self._file_size += columns.file_size.tolist()
        self._file_rank += columns.file_rank.tolist()
        self._dims = max(self._dims, columns.dims)
        self._shared |= columns.shared
        unchanged = {name: getattr(columns, name) for name in _UNCHANGED}
        self._parts.append(
            RankRows(
                **unchanged,
                tensor=place[columns.tensor_of_chunk()],
                file=columns.file + base,
                # Counts, not ends: `finish` puts chunks into another order.
                digest_count=counts_of(columns.digest_end),
                rank=np.full(len(columns.file), rank, "<i4"),
                witness_tensor=place[columns.witness_tensor],
                witness_rank=np.full(len(columns.witness_tensor), rank, "<i4"),
                chunk_late=self._numbered(columns.chunk_late, len(columns.file)),
                witness_late=self._numbered(columns.witness_late, len(columns.witness_tensor)),
                late_tensor=late,
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
        """Return the global row of each tensor of a rank. ReplicaMismatch if a name has another shape or
        dtype here."""
        # Only names are iterated. Chunks, digests and witnesses are far more, and are handled as arrays.
        rows, specs = self._rows, columns.specs()
        new = {name: spec for name, spec in zip(columns.names, specs, strict=True) if name not in rows}
        rows.update(zip(new, range(len(rows), len(rows) + len(new)), strict=True))
        self._specs += new.values()
        self._rank += [rank] * len(new)
        place = [rows[name] for name in columns.names]
        for row, spec in zip(place, specs, strict=True):
            if self._specs[row] != spec:
                raise disagreement(spec.name, self._rank[row], what(self._specs[row]), rank, what(spec))
        return np.asarray(place, np.int64)

    def finish(self, tick: Callable[[], None] = lambda: None, is_slice: bool = False) -> Columns:
        """Check everything, and return the columns, sorted by name and box. A slice may have gaps."""
        # Python compares text by code points, which gives the order of UTF-8 bytes that the format requires.
        sorted_names = sorted(self._rows)
        by_name = np.asarray([self._rows[name] for name in sorted_names], np.int64)
        rank_of_row = np.empty(len(by_name), np.int64)
        rank_of_row[by_name] = np.arange(len(by_name))
        tick()  # each step takes seconds for a large world, and other ranks watch for a stall

        joined = self._join(rank_of_row)
        tick()
        shapes = pad([spec.shape for spec in self._specs], self._dims, 1)[by_name]
        ndim = np.fromiter(map(len, [spec.shape for spec in self._specs]), "u1", len(by_name))[by_name]
        # Before coverage, which needs the final offsets.
        place_deferred(sorted_names, shapes, ndim, joined)
        tick()
        if not is_slice:
            first = np.asarray(self._rank, np.int64)[by_name]
            check_coverage(sorted_names, shapes, ndim, first, joined)
        tick()

        # Sort rows by tensor, then by offset.
        order = np.lexsort((*joined.offset.T[::-1], joined.tensor))
        counts = joined.digest_count[order]
        digests = reordered(joined.digests, joined.digest_count, order)
        tick()
        # After coverage, which has checked that no two chunks have the same box.
        check_witnesses(sorted_names, joined)
        tick()

        # Fingerprints of all chunks or none: a rank with deferred offsets can't compute them when it writes.
        summed = order if len(joined.fingerprint_first) == len(order) else order[:0]
        return Columns(
            names=sorted_names,
            dtype=np.asarray([spec.dtype for spec in self._specs], "u1")[by_name],
            kind=np.asarray([spec.kind for spec in self._specs], "u1")[by_name],
            ndim=ndim,
            shape=shapes,
            chunk_end=np.cumsum(np.bincount(joined.tensor, minlength=len(by_name)), dtype="<i8"),
            offset=joined.offset[order],
            size=joined.size[order],
            file=joined.file[order].astype("<i4"),
            position=joined.position[order],
            block=joined.block[order],
            digest_end=np.cumsum(counts, dtype="<i8"),
            digests=digests,
            fingerprint_first=joined.fingerprint_first[summed],
            fingerprint_second=joined.fingerprint_second[summed],
            file_names=self._file_names,
            file_size=np.asarray(self._file_size, "<i8"),
            file_rank=np.asarray(self._file_rank, "<i4"),
            # Witnesses are checked by now: the main index has none.
            witness_offset=np.zeros((0, self._dims), "<i8"),
            witness_size=np.zeros((0, self._dims), "<i8"),
            shared=self._shared,
        )

    def _join(self, renumber: Array) -> RankRows:
        """Join and free all parts, with tensor rows in sorted order and boxes padded to equal dimensions."""
        parts, self._parts = self._parts, []
        if len(parts) == 1 and parts[0].offset.shape[1] == self._dims and not len(parts[0].late_tensor):
            return parts[0]._replace(
                tensor=renumber[parts[0].tensor], witness_tensor=renumber[parts[0].witness_tensor]
            )

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
        for name in RankRows._fields:
            box = name.endswith(("offset", "size"))
            columns[name] = wide(name, 0 if name.endswith("offset") else 1) if box else flat(name)
        columns["tensor"] = renumber[columns["tensor"]]
        columns["witness_tensor"] = renumber[columns["witness_tensor"]]
        columns["late_tensor"] = renumber[columns["late_tensor"]]
        return RankRows(**columns)


def reordered(values: Array, counts: Array, order: Array) -> Array:
    """Return groups of `values`, whose lengths are `counts`, in another order."""
    begin = np.cumsum(counts) - counts
    return values[expand_ranges(begin[order], counts[order])]


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
    of_block = np.repeat(is_tensor, counts_of(a.digest_end))
    return int((a.kind != OBJECT).sum()) if np.array_equal(a.digests[of_block], b.digests[of_block]) else 0
