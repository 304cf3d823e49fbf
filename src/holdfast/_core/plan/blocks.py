"""Plan the runs in which blocks with wanted bytes are read, and the copies into the targets. Pure.

All pairs of a load are planned together, in arrays: a loop over 100,000 tensors would take too long.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from holdfast._core.format.columns import Array, Columns, expand_ranges
from holdfast._core.layout.box import Box
from holdfast._core.layout.ranks import runs
from holdfast._core.plan.read import Overlaps, touched_blocks
from holdfast._core.plan.shard_table import RowArrays


class Copies(NamedTuple):
    """For each pair, the layout of its bytes in the chunk and in the target: `rows` rows of `row` bytes, at
    equal distances in both. All in bytes."""

    start: Array
    """First byte, from the start of the chunk."""
    stop: Array
    """The byte after the last, from the start of the chunk."""
    row: Array
    rows: Array
    """Number of rows; 0 if they are not at equal distances."""
    step: Array
    """Distance from one row to the next in the chunk."""
    target: Array
    """Address of the first byte; 0 if the target has none."""
    target_step: Array


class Runs(NamedTuple):
    """Runs of consecutive digest blocks of a chunk, each read at once; sorted by file and position."""

    chunk: Array
    start: Array
    """Bytes from the start of the chunk; a multiple of its block."""
    length: Array
    digest: Array
    """The number of the first block among the blocks of all chunks."""
    target: Array
    """The address that the bytes are read to; 0: they go through a scratch buffer."""


def widen(values: Array, dims: int, fill: int) -> Array:
    """Return rows of boxes with more dimensions, padded in front."""
    missing = dims - values.shape[1]
    return np.pad(values, ((0, 0), (missing, 0)), constant_values=fill) if missing else values


def plan_copies(columns: Columns, pairs: Overlaps, table: RowArrays, address: Array) -> Copies:
    """Compute the copies of all pairs. address: of each pair's target, or 0."""
    size, itemsize = pairs.size, table.itemsize[pairs.wanted]
    dims = size.shape[1]
    axis = np.arange(dims)
    stored = widen(columns.size, dims, 1)[pairs.chunk]
    outer = widen(table.size, dims, 1)[pairs.wanted]
    strides, target_strides = (_strides(shape) * itemsize[:, None] for shape in (stored, outer))
    first = ((pairs.offset - widen(columns.offset, dims, 0)[pairs.chunk]) * strides).sum(axis=1)
    into = ((pairs.offset - widen(table.offset, dims, 0)[pairs.wanted]) * target_strides).sum(axis=1)
    # From the last axis that is cut on, elements are contiguous. The axes before it, up to the next one that
    # is cut, count rows at equal distances. Any axis before that must have a single index.
    cut = _last((size != stored) | (size != outer))
    inner = axis >= cut[:, None]
    lead = _last(((size != stored) | (size != outer)) & ~inner)
    among = axis >= lead[:, None]
    regular = (among | (size == 1)).all(axis=1)
    before = np.maximum(cut - 1, 0)[:, None]
    return Copies(
        start=first,
        stop=first + ((size - 1) * strides).sum(axis=1) + itemsize,
        row=np.where(inner, size, 1).prod(axis=1) * itemsize,
        rows=np.where(regular, np.where(among & ~inner, size, 1).prod(axis=1), 0),
        step=np.take_along_axis(strides, before, 1)[:, 0],
        target=np.where(address == 0, 0, address + into),
        target_step=np.take_along_axis(target_strides, before, 1)[:, 0],
    )


def plan_runs(columns: Columns, pairs: Overlaps, copies: Copies, limit: int) -> Runs:
    """Plan the runs, each of one block or of at most `limit` bytes. No block is read twice."""
    nbytes = columns.chunk_bytes()
    counts = -(-nbytes // columns.block)
    first = counts.cumsum() - counts
    chunk, block = pairs.chunk, columns.block[pairs.chunk]
    low, high = copies.start // block, -(-copies.stop // block)
    # With several targets, more than one may want parts of a block, so only a single one is read into.
    # A block is read directly only if all of it lies in the target: its digest covers all of it, and memory
    # beside the target is not ours.
    after = np.append(chunk[1:] != chunk[:-1], True)
    alone = after & np.append(True, after[:-1])
    direct = alone & (copies.rows == 1) & (copies.target != 0)
    begin = np.minimum(-(-copies.start // block), high)
    end = np.maximum(begin, np.where(copies.stop == nbytes[chunk], high, copies.stop // block))
    begin, end = np.where(direct, begin, high), np.where(direct, end, high)
    sparse = (copies.rows == 0) | ((copies.rows > 1) & (copies.step - copies.row >= block))
    dense = (~sparse).nonzero()[0]
    pieces = [
        (dense, low[dense], begin[dense]),
        (dense, begin[dense], end[dense]),
        (dense, end[dense], high[dense]),
    ]
    pieces += [_touched(columns, pairs, pair) for pair in sparse.nonzero()[0].tolist()]
    pair, low, high = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    # With blocks numbered over all chunks, merge runs that share a block.
    low, high = low + first[chunk[pair]], high + first[chunk[pair]]
    order = (low < high).nonzero()[0]
    order = order[np.argsort(low[order], kind="stable")]
    pair, low, reach = pair[order], low[order], np.maximum.accumulate(high[order])
    heads = np.append(True, low[1:] >= reach[:-1])[: len(low)].nonzero()[0]
    pair, low, high = pair[heads], low[heads], reach[np.append(heads[1:], len(reach)) - 1]
    # Cut to the size of a batch.
    step = np.maximum(limit // block[pair], 1)
    parts = -(-(high - low) // step)
    pair, cut = pair.repeat(parts), low.repeat(parts)
    cut += expand_ranges(np.zeros_like(parts), parts) * step.repeat(parts)
    stop = np.minimum(cut + step.repeat(parts), high.repeat(parts))
    chunk, block = chunk[pair], block[pair]
    start = (cut - first[chunk]) * block
    length = np.minimum((stop - first[chunk]) * block, nbytes[chunk]) - start
    inside = direct[pair] & (copies.start[pair] <= start) & (start + length <= copies.stop[pair])
    target = np.where(inside, copies.target[pair] + start - copies.start[pair], 0)
    order = np.lexsort((columns.position[chunk] + start, columns.file[chunk]))  # the last key is the first
    return Runs(*(column[order] for column in (chunk, start, length, cut, target)))


def _touched(columns: Columns, pairs: Overlaps, pair: int) -> tuple[Array, Array, Array]:
    """Return (pair, first block, block after the last) for each run of wanted blocks of a pair with unwanted
    blocks between its rows."""
    chunk, dims = int(pairs.chunk[pair]), pairs.size.shape[1]
    shape = widen(columns.size[chunk : chunk + 1], dims, 1)[0]
    offset = pairs.offset[pair] - widen(columns.offset[chunk : chunk + 1], dims, 0)[0]
    box = Box(tuple(offset.tolist()), tuple(pairs.size[pair].tolist()))
    itemsize = int(columns.itemsizes()[np.searchsorted(columns.chunk_end, chunk, side="right")])
    numbers = touched_blocks(tuple(shape.tolist()), box, itemsize, int(columns.block[chunk]))
    found = np.asarray(list(runs(numbers.tolist())), np.int64)
    return np.full(len(found), pair), found[:, 0], found[:, 1] + 1


def _last(flags: Array) -> Array:
    """Return the last axis with a flag in each row; -1 if there is none."""
    return np.where(flags.any(axis=1), flags.shape[1] - 1 - np.argmax(flags[:, ::-1], axis=1), -1)


def _strides(shape: Array) -> Array:
    """Return the strides of row-major tensors, in elements."""
    strides = np.ones_like(shape)
    strides[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    return strides
