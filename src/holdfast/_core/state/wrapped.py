"""DTensors whose local tensor is a wrapper of inner tensors (8-bit optimizer states, quantized weights under
FSDP2): the box of each inner tensor in its global tensor.

Some inner tensors are cut along with the rows (codes, a scale per row or block), others are the same on all
ranks (a table of values). No class is recognised by name: slicing the first rows off the wrapper, which torch
DCP also needs for resharding, shows which inner tensors are cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, prod
from typing import NamedTuple

import torch

from holdfast._core.layout.tensor import Dims
from holdfast._core.state.subclasses import inner_tensors, is_wrapper, type_name
from holdfast.errors import BadInput


class Inner(NamedTuple):
    """An inner tensor of the local tensor."""

    path: str
    """Path of attribute names from the wrapper."""
    tensor: torch.Tensor
    shape: Dims
    """Shape of its global tensor."""
    begin: Dims
    """Its offset in the global tensor."""
    is_whole: bool
    """Whether it is not cut, but the same on all ranks."""


def inner_parts(name: str, local: torch.Tensor, shape: Dims, row: int) -> list[Inner]:
    """Return the inner tensors of `local`, which holds the rows from `row` on of a tensor of `shape`.

    Raises BadInput if the wrapper does not show how it is cut.
    """
    there = dict(_plain(local))
    if tuple(local.shape) == shape:
        return [
            Inner(path, inner, tuple(inner.shape), (0,) * inner.dim(), True) for path, inner in there.items()
        ]
    part = _some_of(local, there)
    found = []
    for path, inner in there.items():
        cut = part.get(path)
        if cut is None:
            break
        size, begin = tuple(inner.shape), (0,) * inner.dim()
        if cut.shape == inner.shape:
            found.append(Inner(path, inner, size, begin, True))
            continue
        # If it is cut in the order of its elements, its rows are consecutive in memory.
        in_order = inner.is_contiguous() and cut.data_ptr() == inner.data_ptr()
        if in_order and size[0] == local.shape[0]:
            found.append(Inner(path, inner, (shape[0], *size[1:]), (row, *begin[1:]), False))
            continue
        # Otherwise it must have an element per block of the flattened tensor, with whole blocks on each rank.
        elements, rest = divmod(local.numel(), inner.numel())
        first, inside = divmod(row * prod(shape[1:]), elements)
        if not in_order or inner.dim() != 1 or rest or inside or prod(shape) % elements:
            break
        found.append(Inner(path, inner, (prod(shape) // elements,), (first,), False))
    else:
        return found
    raise BadInput(
        f"{name!r} is a DTensor whose local tensor, of shape {tuple(local.shape)}, is a {type_name(local)}: "
        f"its slices do not show which part of its {path!r} belongs to which rows.",
        hint="Keep it as a plain tensor of each rank (holdfast.PerRank), or as a DTensor of plain tensors.",
    )


def _plain(wrapper: torch.Tensor, above: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for attribute, inner in inner_tensors(wrapper):
        if is_wrapper(inner):
            yield from _plain(inner, f"{above}{attribute}.")
        else:
            yield above + attribute, inner


def _some_of(local: torch.Tensor, there: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the inner tensors of a smaller slice from the wrapper's start; {} if it can't be sliced."""
    for as_rows in (True, False):  # flattened, because a block may be longer than this rank's rows
        try:
            whole = local if as_rows else local.view(-1)
        except Exception:  # a class need not support it
            break
        row = prod(whole.shape[1:])
        # A wrapper may support cuts at block boundaries only; an inner tensor's share gives the block length.
        blocks = {whole.numel() // inner.numel() for inner in there.values() if inner.numel()}
        for rows in sorted({block // gcd(block, row) for block in blocks if block} | {1}):
            if rows >= whole.shape[0]:
                break
            try:
                with torch.no_grad():
                    part = dict(_plain(whole[:rows]))
            except Exception:  # as above, or it refuses this cut
                continue
            if any(part[path].numel() != inner.numel() for path, inner in there.items() if path in part):
                return part
    return {}
