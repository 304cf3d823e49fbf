"""Which groups a layout has, and in which rounds they are warmed up. Pure: no torch, no process group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.errors import BadInput
from holdfast.layout.grid import Grid

Ranks = npt.NDArray[np.int64]
KINDS: dict[str, tuple[str, ...]] = {
    "dp_cp": ("dp", "cp"),
    "dp": ("dp",),
    "cp": ("cp",),
    "mp": ("tp", "pp"),
    "tp": ("tp",),
    "pp": ("pp",),
    "embedding": (),
    "tp_dp_cp": ("tp", "dp", "cp"),
    "tp_dp": ("tp", "dp"),
    "tp_cp": ("tp", "cp"),
    "ep": ("ep",),
    "etp": ("etp",),
    "tp_ep": ("etp", "ep"),
    "tp_ep_pp": ("etp", "ep", "pp"),
    "edp": ("edp",),
}
"""Megatron's names, in the order in which it makes them, and the axes that each spans. `embedding` are the
first and the last stage of each pipeline."""
WORLD = "world"


class Planned(NamedTuple):
    """Groups of one kind, and of other kinds whose ranks are the same: they share a communicator."""

    names: tuple[str, ...]
    table: Ranks
    """Shape (groups, ranks of a group)."""


def plan_groups(grid: Grid, names: Iterable[str] | None = None) -> list[Planned]:
    """The groups of a layout (default: all kinds) in the order in which all ranks make them; those of one
    rank are left out.

    The first is `world`, which is there already.
    """
    wanted = list(KINDS) if names is None else list(names)
    unknown = [name for name in wanted if name not in KINDS]
    if unknown:
        raise BadInput(f"There is no group {unknown[0]!r}; groups are {', '.join(KINDS)}.")
    everyone = np.arange(grid.first_rank, grid.first_rank + grid.world, dtype=np.int64)[None]
    found: dict[bytes, Planned] = {_key(everyone): Planned((WORLD,), everyone)}
    # In the order of KINDS, not of `names`: all ranks must make groups in one order.
    for name in KINDS:
        if name not in wanted:
            continue
        table = grid.table("pp")[:, [0, -1]] if name == "embedding" else grid.table(*KINDS[name])
        # With one stage the first and the last are the same rank.
        if table.shape[1] == 1 or (name == "embedding" and grid.pp == 1):
            continue
        key = _key(table)
        known = found.get(key)
        found[key] = Planned((*known.names, name), table) if known else Planned((name,), table)
    return list(found.values())


def members(grid: Grid, rank: int) -> dict[str, tuple[int, ...]]:
    """For each name the ranks of a rank's group, as far as it is in one."""
    if not grid.first_rank <= rank < grid.first_rank + grid.world:
        return {}
    found = {name: grid.group(rank, *axes) for name, axes in KINDS.items() if axes}
    # The first and the last stage.
    ends = found["pp"][:: max(len(found["pp"]) - 1, 1)]
    if rank in ends:
        found["embedding"] = ends
    found[WORLD] = tuple(range(grid.first_rank, grid.first_rank + grid.world))
    return found


def _key(table: Ranks) -> bytes:
    # The width too: tables of 2 x 4 and of 4 x 2 can have the same bytes.
    return bytes(table.shape[1].to_bytes(8, "little") + table.tobytes())


def rounds(groups: Sequence[Ranks]) -> list[int]:
    """For each group the round in which it is warmed up. Groups of one round have no rank in common, so they
    go in parallel, and every rank meets its groups by ascending round, so none waits for another in a circle.

    Greedy, the largest first: each takes the first round that is free on all its ranks.
    """
    chosen = [0] * len(groups)
    world = max((int(ranks.max()) for ranks in groups if len(ranks)), default=-1) + 1
    taken: list[npt.NDArray[np.uint64]] = []  # for each rank a bit a round, 64 rounds an array
    for index in sorted(range(len(groups)), key=lambda index: -len(groups[index])):
        for block in range(len(taken) + 1):
            if block == len(taken):
                taken.append(np.zeros(world, np.uint64))
            # Bits, because a reduction over the ranks of a group is fast: 16,384 ranks are planned in 0.1 s.
            used = int(np.bitwise_or.reduce(taken[block][groups[index]]))
            # The lowest bit that is 0 in `used`: adding 1 carries into it.
            free = (~used & (used + 1)).bit_length() - 1
            if free < 64:
                taken[block][groups[index]] |= np.uint64(1 << free)
                chosen[index] = 64 * block + free
                break
    return chosen


def runs(ranks: Sequence[int]) -> list[list[int]]:
    """Ranks as (first, step, count): a group of a layout is one or a few of them, however many ranks it
    has."""
    found: list[list[int]] = []
    at = 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 1
        count = 1
        while at + count < len(ranks) and ranks[at + count] - ranks[at + count - 1] == step:
            count += 1
        found.append([ranks[at], step, count])
        at += count
    return found


def from_runs(found: Sequence[Sequence[int]]) -> list[int]:
    """The inverse of `runs`."""
    return [first + step * index for first, step, count in found for index in range(count)]


def shown(ranks: Sequence[int], most: int = 8) -> str:
    """Ranks as a message lists them."""
    listed = ", ".join(map(str, ranks[:most]))
    return f"ranks {listed}" + (f" and {len(ranks) - most} more" if len(ranks) > most else "")
