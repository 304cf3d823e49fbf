"""Plan which boxes one rank writes, and which it witnesses (it only sends a digest of them). Pure.

Planning looks only at this rank's shards, so it costs O(own shards) in any world.
"""

from __future__ import annotations

from itertools import chain

import numpy as np

from holdfast._core.base.options import Options
from holdfast._core.format.columns import Array, pad
from holdfast._core.format.digest import MIN_BLOCK, block_sizes
from holdfast._core.layout.box import Box
from holdfast._core.layout.patterns import Names
from holdfast._core.plan.replicas import first_writer, shares
from holdfast._core.plan.shard_table import PlannedRows, RowArrays, SavePlan, ShardTable

PANELS = (8, 4, 2)
PANEL_ROW = 256
"""Minimum bytes per row of a column panel; shorter rows are not worth a scattered copy."""
PANEL_CHUNK = 256 << 10
"""Smaller chunks are not cut, because they are read whole anyway."""


def first_axis_bytes(size: Array, nbytes: Array) -> Array:
    """Return the bytes per row of each chunk, along its first axis longer than 1."""
    first = np.argmax(size > 1, axis=1)
    length = np.take_along_axis(size, first[:, None], axis=1)[:, 0]
    return np.where(length > 0, nbytes // np.maximum(length, 1), 0)


def plan_save(table: ShardTable, replicas: list[tuple[int, int]], options: Options) -> SavePlan:
    """Plan a save from the rows and their agreed replicas, (index, count) each."""
    arrays = table.arrays()
    index, count = np.fromiter(chain.from_iterable(replicas), np.int64, 2 * len(replicas)).reshape(-1, 2).T
    count[[*table.tied]] = 0
    unsharded = np.asarray(table.unsharded, bool)
    check = options.check_replicas
    # Empty boxes have no chunk. NOT_SAVED (`saving/job.py`) and tied rows have a count of 0, so no condition
    # below selects them.
    full = arrays.nbytes > 0
    witness_all = np.full(len(table), check == "full") | ((check == "auto") & unsharded)
    # Below twice `split_bytes`, `cut` returns one part.
    in_one_piece = full & (count > 1) & (arrays.nbytes < 2 * options.split_bytes) & ~witness_all
    # The rule of `plan.replicas.shares` again, as array code for rows of one piece: they are most rows of a
    # mixture of experts, and a loop over them is too slow. Change both together.
    whole = in_one_piece.nonzero()[0]
    first = [first_writer(table.specs[row].name, table.boxes[row], int(count[row])) for row in whole.tolist()]
    distance = (index[whole] - np.asarray(first, np.int64)) % count[whole]
    written: list[tuple[int, Box]] = []
    seen: list[tuple[int, Box]] = []
    for row in (full & (count > 1) & ~in_one_piece).nonzero()[0].tolist():
        name, box, nbytes = table.specs[row].name, table.boxes[row], int(arrays.nbytes[row])
        for part, writes in shares(
            name, box, nbytes, replicas[row], options.split_bytes, bool(witness_all[row])
        ):
            if writes or check != "off":
                (written if writes else seen).append((row, part))
    patterns = Names(options.columns)
    wide = np.asarray([spec.name in patterns for spec in table.specs] if options.columns else [], bool)
    alone = np.concatenate([(full & (count == 1)).nonzero()[0], whole[distance == 0]])
    chunks = _panels(*_boxes(arrays, alone, written), arrays.itemsize, wide)
    # Distance 1: the replica after the writer, which `shares` would choose as witness.
    beside = whole[distance == 1] if check != "off" else whole[:0]
    # Cut like chunks, because a digest is compared with that of exactly the same box.
    witnesses = _panels(*_boxes(arrays, beside, seen), arrays.itemsize, wide)
    # File order: widest elements first, so that every chunk is aligned without gaps.
    order = np.argsort(-arrays.itemsize[chunks.row], kind="stable")
    in_order = PlannedRows(*(column[order] for column in chunks))
    return SavePlan(arrays.dims, in_order, witnesses, witness_all[witnesses.row])


def _boxes(arrays: RowArrays, whole: Array, parts: list[tuple[int, Box]]) -> tuple[Array, Array, Array]:
    """Return the row, offset and size of whole rows and of parts of rows."""
    if not parts:
        return whole, arrays.offset[whole], arrays.size[whole]
    return (
        np.concatenate([whole, np.asarray([row for row, _ in parts], np.int64)]),
        np.concatenate([arrays.offset[whole], pad([part.offset for _, part in parts], arrays.dims, 0)]),
        np.concatenate([arrays.size[whole], pad([part.shape for _, part in parts], arrays.dims, 1)]),
    )


def _panels(row: Array, offset: Array, size: Array, itemsize: Array, to_cut: Array) -> PlannedRows:
    """Cut the wide matrices among the rows in `to_cut` into column panels; everything else stays one
    chunk."""
    nbytes = np.prod(size, axis=1) * itemsize[row]
    if len(to_cut) and len(row) and size.shape[1] >= 2:
        parts = np.ones(len(row), np.int64)
        width = size[:, -1]
        # Cutting a vector gains nothing, because its pieces are contiguous anyway.
        wide = to_cut[row] & (nbytes >= PANEL_CHUNK) & ((size[:, :-1] > 1).any(axis=1))
        # In ascending order, so that the largest count that fits is assigned last.
        for count in reversed(PANELS):
            parts[wide & (width % count == 0) & (width // count * itemsize[row] >= PANEL_ROW)] = count
        source = np.arange(len(row)).repeat(parts)
        panel = np.arange(len(source)) - (parts.cumsum() - parts).repeat(parts)
        row, offset, size, nbytes = row[source], offset[source], size[source], nbytes[source] // parts[source]
        size[:, -1] //= parts[source]
        offset[:, -1] += panel * size[:, -1]
    if (nbytes < 2 * MIN_BLOCK).all():  # each is one block, by the rule of `block_sizes`
        return PlannedRows(row, offset, size, nbytes, np.maximum(nbytes, 1))
    return PlannedRows(row, offset, size, nbytes, block_sizes(nbytes, first_axis_bytes(size, nbytes)))
