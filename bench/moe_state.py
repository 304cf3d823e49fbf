"""The state that the save and load benchmark moves, cut over ranks by DP, EP and TP.

Every value is a function of the tensor's name and the element's place in the *global* tensor, so that a
rank can check what it loaded, resharded or not, without asking anyone.

Gate and up are keys of their own, as in Megatron's per-expert keys (`..._w` and `..._v` of linear_fc1):
cutting fc1 [2I, H] for TP gives a rank some rows of the gate half and the same rows of the up half.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.shapes import Model, Shape, Spec


@dataclass(frozen=True)
class Layout:
    """dp x ep x tp ranks; the tensor-parallel coordinate runs fastest."""

    dp: int
    ep: int
    tp: int = 1

    @property
    def world(self) -> int:
        return self.dp * self.ep * self.tp

    def place(self, rank: int) -> tuple[int, int, int]:
        return rank // (self.ep * self.tp), rank // self.tp % self.ep, rank % self.tp

    def __str__(self) -> str:
        return (
            (f"TP{self.tp}x" if self.tp > 1 else "")
            + f"EP{self.ep}"
            + (f"xDP{self.dp}" if self.dp > 1 else "")
        )


@dataclass(frozen=True)
class Piece:
    """What one rank holds of one global tensor."""

    name: str
    dtype: torch.dtype
    global_shape: Shape
    offset: Shape
    shape: Shape
    replica: int  # which copy this rank holds,
    owners: tuple[int, ...]  # and the ranks that hold a copy, in replica order
    expert: bool
    cut_dim: int | None  # the dimension tensor parallelism cuts, where it does

    @property
    def numel(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def dtype_of(spec: Spec) -> torch.dtype:
    return torch.bfloat16 if spec.name.startswith("weight.") else torch.float32


def pieces(model: Model, layout: Layout, rank: int) -> list[Piece]:
    """The pieces of one rank, in the model's order."""
    return [piece for spec in model.adam_specs() if (piece := cut(spec, model, layout, rank)) is not None]


def cut(spec: Spec, model: Model, layout: Layout, rank: int) -> Piece | None:
    _, ep, tp = layout.place(rank)
    home = None if spec.expert is None else spec.expert * layout.ep // model.experts
    if home is not None and home != ep:
        return None
    dim = spec.tp_dim if layout.tp > 1 else None
    shape, offset = list(spec.shape), [0] * len(spec.shape)
    if dim is not None:
        shape[dim] //= layout.tp
        offset[dim] = tp * shape[dim]
    owners = tuple(other for other in range(layout.world) if _same(layout, rank, other, home, dim))
    return Piece(
        spec.name,
        dtype_of(spec),
        spec.shape,
        tuple(offset),
        tuple(shape),
        owners.index(rank),
        owners,
        spec.expert is not None,
        dim,
    )


def _same(layout: Layout, rank: int, other: int, home: int | None, dim: int | None) -> bool:
    mine, theirs = layout.place(rank), layout.place(other)
    return (home is None or theirs[1] == home) and (dim is None or theirs[2] == mine[2])


def writers(model: Model, layout: Layout) -> list[list[Piece]]:
    """Every unique piece dealt to one of its owners, largest first, to the owner with least so far."""
    unique = {(p.name, p.offset): p for rank in range(layout.world) for p in pieces(model, layout, rank)}
    load, shares = [0] * layout.world, [list[Piece]() for _ in range(layout.world)]
    for piece in sorted(unique.values(), key=lambda p: (-p.nbytes, p.name, p.offset)):
        rank = min(piece.owners, key=lambda owner: (load[owner], owner))
        load[rank] += piece.nbytes
        shares[rank].append(piece)
    return shares


# --------------------------------------------------------------------------------------------- values

ROW, COLUMN = 40_503, 25_717  # odd: neighbours differ, and so do rows


def values(piece: Piece, out: torch.Tensor | None = None) -> torch.Tensor:
    """The right value of a piece, as integers of the element's width; into `out` where that is given."""
    integer = torch.int16 if piece.dtype.itemsize == 2 else torch.int32
    seed = zlib.crc32(piece.name.encode()) % 30_000
    axes = [
        torch.arange(start, start + extent, dtype=torch.int64) * factor
        for start, extent, factor in zip(piece.offset, piece.shape, (ROW, COLUMN), strict=False)
    ]
    axes[0] = axes[0] + seed
    narrow = [axis.to(integer) for axis in axes]
    return narrow[0] if len(narrow) == 1 else torch.add(narrow[0][:, None], narrow[1][None, :], out=out)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)


State = dict[str, torch.Tensor]


def build(own: Sequence[Piece]) -> State:
    """One allocation a tensor, as a framework makes them."""
    return {p.name: values(p).view(p.dtype) for p in own}


def poison(state: State) -> None:
    for tensor in state.values():
        as_integers(tensor).fill_(-1)


def wrong(own: Sequence[Piece], state: State) -> list[str]:
    """The names of the tensors that do not hold their value."""
    right: dict[tuple[Shape, torch.dtype], torch.Tensor] = {}  # one buffer a shape: no fresh pages
    bad = []
    for p in own:
        key = (p.shape, p.dtype)
        right[key] = values(p, right.get(key))
        if not torch.equal(as_integers(state[p.name]), right[key]):
            bad.append(p.name)
    return bad


def total(own: Sequence[Piece]) -> int:
    return sum(p.nbytes for p in own)


def unique_bytes(model: Model) -> int:
    return sum(total(share) for share in writers(model, Layout(1, 1)))
