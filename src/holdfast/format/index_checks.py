"""Are the numbers of an index possible ones? They are used as positions and sizes, so nothing is believed
unchecked."""

from __future__ import annotations

import numpy as np

from holdfast.errors import CorruptCheckpoint
from holdfast.format.columns import Array, Columns
from holdfast.format.limits import OBJECT_BYTES, check_size
from holdfast.layout.tensor import DTYPES, KINDS, OBJECT


def _check_boxes(found: Columns, where: str) -> None:
    """Shapes and boxes must be countable, padded with ones, and one row of bytes for objects."""
    if not _possible(found.size):
        raise CorruptCheckpoint(f"{where} holds a chunk of impossible size.")
    padding = np.arange(found.dims) < found.dims - found.ndim[:, None].astype(np.int64)
    bytes_only = (found.ndim == 1) & (found.dtype == 0)
    if (
        not _possible(found.shape)
        or (padding & (found.shape != 1)).any()
        or ((found.kind == OBJECT) & ~bytes_only).any()
    ):
        raise CorruptCheckpoint(f"{where} gives a tensor or an object an impossible shape.")
    # An object is read whole into memory, unlike a tensor, which is read in blocks to where it belongs.
    objects = np.where(found.kind == OBJECT, found.shape[:, -1], 0)
    if (objects > OBJECT_BYTES).any():
        row = int(np.argmax(objects))
        check_size(f"The object {found.names[row][:200]!r} of {where}", int(objects[row]), OBJECT_BYTES)


def check_rows(found: Columns, where: str) -> None:
    """Numbers that are used as positions must be possible ones."""
    files = len(found.file_names)
    if len(found.file_size) != files or len(found.file_rank) != files:
        raise CorruptCheckpoint(f"{where} does not agree with itself on how many files there are.")
    if len(found.names) and (
        found.dtype.max() >= len(DTYPES) or found.kind.max() >= len(KINDS) or found.ndim.max() > found.dims
    ):
        raise CorruptCheckpoint(
            f"{where} uses a dtype, kind or number of dimensions that this format does not have."
        )
    _check_boxes(found, where)
    if not len(found.file):
        return
    if found.file.min() < 0 or found.file.max() >= files:
        raise CorruptCheckpoint(f"{where} refers to a file that it does not name.")
    nbytes = found.chunk_bytes()
    room = found.file_size[found.file] - nbytes  # compared so that no sum can overflow
    bad = (found.position < 0) | (found.block < 1) | (room < 0) | (found.position > room)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise CorruptCheckpoint(
            f"{where} places a chunk of {found.names[int(found.tensor_of_chunk()[row])]!r} outside its file."
        )
    # Readers count blocks by this rule, and look a digest up by the number of its block.
    if (np.diff(found.digest_end, prepend=0) != -(-nbytes // found.block)).any():
        raise CorruptCheckpoint(f"{where} has too few or too many digests for a chunk.")
    stop = found.position + nbytes
    # In order of file and position, if any two overlap then two neighbours do. An empty chunk overlaps
    # nothing, and would hide the two beside it from each other.
    order = np.lexsort((stop, found.position, found.file))
    order = order[nbytes[order] > 0]
    same = found.file[order][1:] == found.file[order][:-1]
    if (same & (found.position[order][1:] < stop[order][:-1])).any():
        raise CorruptCheckpoint(f"{where} places two chunks on the same bytes of a file.")


def ascending(before: Array, ends: Array, rows: int) -> bool:
    """Are these different stretches of so many rows? Compared so that no difference can overflow."""
    inside = (before >= 0) & (before <= ends) & (ends <= rows)
    return bool(inside.all()) and int((ends - before).sum()) <= rows


def _possible(sides: Array) -> bool:
    """Are these sides of boxes whose bytes an int64 can count?"""
    # In floats, which become infinite where integers would wrap; 16 is more than any element has bytes.
    with np.errstate(over="ignore"):
        volumes = np.prod(np.maximum(sides, 1).astype(float), axis=1)
    return bool((sides >= 0).all() and (volumes * 16 <= float(1 << 62)).all())


def possible_late(found: Columns) -> bool:
    """Do the late columns point at rows that are there, and at axes that tensors have?"""
    rows, tensor = len(found.late_tensor), found.late_tensor
    if not ((tensor >= 0) & (tensor < len(found.names))).all():
        return False
    inside = (found.late_axis >= 0) & (found.late_axis < found.ndim[tensor])
    counted = (found.late_length >= 0) & (found.late_position >= 0)
    small = np.maximum(found.late_length, np.maximum(found.late_start, -2 - found.late_start)) < 1 << 48
    links = np.concatenate([found.chunk_late, found.witness_late])
    if not (inside & counted & small).all() or not ((links >= -1) & (links < rows)).all():
        return False
    of = np.concatenate([found.tensor_of_chunk(), found.witness_tensor])
    # A chunk that names another tensor's shard would be moved by that one's offset.
    return bool((tensor[links[links >= 0]] == of[links >= 0]).all())
