"""A DTensor whose local tensor is made of others (8-bit optimizer states, quantized weights under FSDP2):
which part of a global tensor each of those is.

Some of them are cut as the rows are (codes, a scale of each row or block), others are the same on all ranks
(a table of values). No class is recognised by name: the wrapper's own slice of its first rows, which torch
DCP needs for resharding, too, shows which tensors it cuts.
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
    """One of the tensors that the local tensor is made of."""

    path: str
    """The names of the attributes that lead to it."""
    tensor: torch.Tensor
    shape: Dims
    """Of the global tensor that it is a part of."""
    begin: Dims
    """Where it begins there."""
    is_whole: bool
    """Whether all ranks have the same."""


def inner_parts(name: str, local: torch.Tensor, shape: Dims, row: int) -> list[Inner]:
    """Return the tensors that the rows of a tensor of `shape`, from `row` on, are made of.

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
        # Cut in the order of the elements: then rows lie one after another in it.
        in_order = inner.is_contiguous() and cut.data_ptr() == inner.data_ptr()
        if in_order and size[0] == local.shape[0]:
            found.append(Inner(path, inner, (shape[0], *size[1:]), (row, *begin[1:]), False))
            continue
        # Of blocks of the flattened tensor; each rank has whole ones.
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
    """Return the tensors of a smaller part of the wrapper, which begins as it does; {} if it gives none."""
    for as_rows in (True, False):  # flattened, because a block may be longer than this rank's rows
        try:
            whole = local if as_rows else local.view(-1)
        except Exception:  # a class need not have it
            break
        row = prod(whole.shape[1:])
        # A wrapper may cut at the ends of blocks only, and their length is that of some inner tensor's share.
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
