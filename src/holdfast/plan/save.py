"""What one rank writes, and of what it only says that it holds the same. Pure.

Only this rank's own shards are looked at, so planning costs O(own shards) in any world.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from holdfast.format.columns import Array, pad
from holdfast.format.digest import block_sizes
from holdfast.layout.box import Box
from holdfast.layout.tensor import matches
from holdfast.options import Options
from holdfast.plan.holding import Holding
from holdfast.plan.replicas import shares

PANELS = (8, 4, 2)
PANEL_ROW = 256
"""Bytes of a row that a column panel has at least; shorter rows are not worth a scattered copy."""
PANEL_CHUNK = 256 << 10
"""Chunks below this size are read whole anyway."""


class Planned(NamedTuple):
    """Rows of a plan: which row of the holding, and the box of it (global indices)."""

    row: Array
    offset: Array
    size: Array
    nbytes: Array
    block: Array


class SavePlan(NamedTuple):
    """What this rank writes, and what it witnesses. Both are rectangles padded to `dims`."""

    dims: int
    chunks: Planned
    witnesses: Planned
    witness_full: Array
    """Per witness: all blocks are compared, not one."""


def first_axis_bytes(size: Array, nbytes: Array) -> Array:
    """Bytes of one row of each chunk: along its first axis longer than 1."""
    if not len(size):
        return np.zeros(0, np.int64)
    first = np.argmax(size > 1, axis=1)
    length = np.take_along_axis(size, first[:, None], axis=1)[:, 0]
    return np.where(length > 0, nbytes // np.maximum(length, 1), 0)


def plan_save(held: Holding, replicas: list[tuple[int, int]], options: Options) -> SavePlan:
    """Decide from the rows and their settled replicas."""
    tables = held.tables()
    count = np.fromiter((replica[1] for replica in replicas), np.int64, len(held))
    full = tables.nbytes > 0
    sole = np.flatnonzero(full & (count == 1))
    rows: list[int] = []
    boxes: list[Box] = []
    seen_rows: list[int] = []
    seen_boxes: list[Box] = []
    for shared in np.flatnonzero(full & (count > 1)).tolist():
        name, box, replica = held.specs[shared].name, held.boxes[shared], replicas[shared]
        check = options.check_replicas
        everyone = check == "full" or (check == "auto" and held.plain[shared])
        for part, writes in shares(
            name, box, int(tables.nbytes[shared]), replica, options.split_bytes, everyone
        ):
            if writes:
                rows.append(shared)
                boxes.append(part)
            elif check != "off":
                seen_rows.append(shared)
                seen_boxes.append(part)
    row = np.concatenate([sole, np.asarray(rows, np.int64)])
    offset = np.concatenate([tables.offset[sole], pad([box.offset for box in boxes], tables.dims, 0)])
    size = np.concatenate([tables.size[sole], pad([box.shape for box in boxes], tables.dims, 1)])
    seen = np.asarray(seen_rows, np.int64)
    wide = _to_cut(held, options.columns)
    chunks = _panels(row, offset, size, tables.itemsize, wide)
    witnesses = _panels(
        seen,
        pad([box.offset for box in seen_boxes], tables.dims, 0),
        pad([box.shape for box in seen_boxes], tables.dims, 1),
        tables.itemsize,
        wide,
    )
    plain = np.asarray(held.plain, bool)
    complete = (
        plain[witnesses.row]
        if options.check_replicas == "auto"
        else np.full(len(witnesses.row), options.check_replicas == "full")
    )
    return SavePlan(tables.dims, _in_order(chunks, tables.itemsize), witnesses, complete)


def _to_cut(held: Holding, patterns: tuple[str, ...]) -> Array:
    """Rows of the holding whose matrices the options want in column panels."""
    found = (
        [any(matches(spec.name, pattern) for pattern in patterns) for spec in held.specs] if patterns else ()
    )
    return np.asarray(found, bool)


def _panels(row: Array, offset: Array, size: Array, itemsize: Array, to_cut: Array) -> Planned:
    """Cut wide matrices that are to be cut into column panels; everything else stays one chunk."""
    nbytes = np.prod(size, axis=1) * itemsize[row] if len(row) else np.zeros(0, np.int64)
    parts = np.ones(len(row), np.int64)
    if len(to_cut) and len(row) and size.shape[1] >= 2:
        width = size[:, -1]
        wide = to_cut[row] & (nbytes >= PANEL_CHUNK) & ((size[:, :-1] > 1).any(axis=1))
        for count in reversed(PANELS):
            parts[wide & (width % count == 0) & (width // count * itemsize[row] >= PANEL_ROW)] = count
    if (parts > 1).any():
        at = np.repeat(np.arange(len(row)), parts)
        panel = np.arange(len(at)) - np.repeat(np.cumsum(parts) - parts, parts)
        row, offset, size, nbytes = row[at], offset[at].copy(), size[at].copy(), nbytes[at] // parts[at]
        size[:, -1] //= parts[at]
        offset[:, -1] += panel * size[:, -1]
    return Planned(row, offset, size, nbytes, block_sizes(nbytes, first_axis_bytes(size, nbytes)))


def _in_order(chunks: Planned, itemsize: Array) -> Planned:
    """File order: widest elements first, so that every chunk is aligned without holes."""
    order = np.argsort(-itemsize[chunks.row], kind="stable")
    return Planned(*(column[order] for column in chunks))
