"""Explain which rank wrote which part of a tensor into which file, and which bytes a reader of a box needs.
Pure.

It follows the reader's rules: a block is read whole, because its digest covers all of it, and a block without
wanted bytes is not read.
"""

from __future__ import annotations

import msgspec
import numpy as np

from holdfast._core.format.columns import Columns, pad, unpad
from holdfast._core.format.digest import hex_digest
from holdfast._core.layout.box import Box
from holdfast._core.layout.ranks import runs
from holdfast._core.plan.read import overlaps, touched_blocks


class ChunkPart(msgspec.Struct, frozen=True):
    """The part of a chunk that a reader needs."""

    offset: tuple[int, ...]
    """Offset of the wanted part, a box."""
    shape: tuple[int, ...]
    file: str
    rank: int
    start: int
    """Bytes from the start of the file."""
    stop: int
    block: int
    """Bytes that one digest covers."""
    digests: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]
    """Byte ranges of the file to read: the blocks that a box touches."""


def needed(columns: Columns, tensor: int, box: Box) -> tuple[ChunkPart, ...]:
    """Return the parts that a reader of `box` reads: one for each chunk that intersects it."""
    ndim, dims = int(columns.ndim[tensor]), columns.dims
    pairs = overlaps(
        len(columns.names),
        np.asarray([tensor]),
        pad([box.offset], dims, 0),
        pad([box.shape], dims, 1),
        columns.tensor_of_chunk(),
        columns.offset,
        columns.size,
    )
    nbytes, itemsize = columns.chunk_bytes(), int(columns.itemsizes()[tensor])
    out = []
    for pair, chunk in enumerate(pairs.chunk.tolist()):
        common = Box(unpad(pairs.offset[pair], ndim), unpad(pairs.size[pair], ndim))
        inner = common.relative_to(unpad(columns.offset[chunk], ndim))
        shape = unpad(columns.size[chunk], ndim)
        blocks = touched_blocks(shape, inner, itemsize, int(columns.block[chunk])).tolist()
        out.append(_part(columns, chunk, int(nbytes[chunk]), common, blocks))
    return tuple(out)


def _part(columns: Columns, chunk: int, nbytes: int, box: Box, blocks: list[int]) -> ChunkPart:
    file, digests = int(columns.file[chunk]), columns.digests_of(chunk)
    position, block = int(columns.position[chunk]), int(columns.block[chunk])
    return ChunkPart(
        offset=box.offset,
        shape=box.shape,
        file=columns.file_names[file],
        rank=int(columns.file_rank[file]),
        start=position,
        stop=position + nbytes,
        block=block,
        digests=tuple(hex_digest(int(digests[number])) for number in blocks),
        ranges=tuple(
            (position + first * block, position + min((last + 1) * block, nbytes))
            for first, last in runs(blocks)
        ),
    )
