"""Explains where a tensor is stored, and which bytes a reader of a box of it needs. Reads only the index."""

from __future__ import annotations

import msgspec
import numpy as np

from holdfast._core.existing.target import checkpoint_at
from holdfast._core.io.index_file import open_index
from holdfast._core.layout.box import Box, whole
from holdfast._core.layout.tensor import DTYPES, KINDS, OBJECT, nearest
from holdfast._core.store.base import Folder
from holdfast._tools.checkpoints.needed import ChunkPart, needed
from holdfast.errors import BadInput, MissingTensors


class Explained(msgspec.Struct, frozen=True):
    """The location of a tensor, and the bytes that a reader of a box of it needs."""

    path: str
    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[ChunkPart, ...]
    offset: tuple[int, ...]
    """Bytes of the box."""
    size: tuple[int, ...]
    bytes_wanted: int
    bytes_read: int
    """Bytes to read: more than `bytes_wanted` if digest blocks also contain other bytes."""


def explain(path: Folder, name: str, box: str | None = None) -> Explained:
    """Return the location of a tensor's parts, and the bytes that a reader of a box needs.

    A run folder stands for its newest committed step. box: a part of the tensor such as `0:4,10:20`; by
    default all of it.
    """
    store = checkpoint_at(path)
    with open_index(store) as index:
        row = index.find_one(name)
        if row < 0:
            near = nearest(name, index.names())
            raise MissingTensors(
                f"{store.url} does not hold {name!r}.",
                hint=f"The nearest name that is there is {near!r}." if near else "",
            )
        columns = index.select(np.asarray([row]))
    shape, is_object = columns.shape_of(0), int(columns.kind[0]) == OBJECT
    dtype = DTYPES[int(columns.dtype[0])]
    wanted = whole(shape) if box is None else parse_box(box, shape)
    parts = needed(columns, 0, wanted)
    return Explained(
        store.url,
        name,
        KINDS[int(columns.kind[0])],
        "" if is_object else dtype.name,
        shape,
        parts,
        wanted.offset,
        wanted.shape,
        bytes_wanted=wanted.volume * dtype.size,
        bytes_read=sum(stop - start for part in parts for start, stop in part.ranges),
    )


def parse_box(text: str, shape: tuple[int, ...]) -> Box:
    """Parse a box such as `0:4,10:20`, one item per axis; `:` is a whole axis, `3` is one index of it."""
    items = text.split(",") if text.strip() else []
    if len(items) != len(shape):
        raise BadInput(f"The box {text!r} has {len(items)} axes, the tensor has {len(shape)}: {list(shape)}.")
    offset, size = [], []
    for item, length in zip(items, shape, strict=True):
        low, colon, high = item.strip().partition(":")
        try:
            start = int(low) if low else 0
            stop = (int(high) if high else length) if colon else int(low) + 1
        except ValueError:
            raise BadInput(f"{item!r} in the box {text!r} is not a range such as 0:4.") from None
        offset.append(start)
        size.append(stop - start)
    wanted = Box(tuple(offset), tuple(size))
    if not wanted.within(shape):
        raise BadInput(f"The box {text!r} does not lie inside the tensor's shape {list(shape)}.")
    return wanted
