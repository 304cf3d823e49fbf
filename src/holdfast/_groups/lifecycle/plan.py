"""Plans the groups of a layout, and the rounds of their warm-up. Pure: no torch, no process group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast._core.layout.grid import Grid
from holdfast.errors import BadInput

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
"""Megatron's names, in the order in which it makes them, and the axes that each spans. `embedding` has the
first and the last stage of each pipeline."""
WORLD = "world"


class PlannedGroups(NamedTuple):
    """The groups of one kind. Kinds whose groups have the same ranks share them, and their communicators."""

    names: tuple[str, ...]
    table: Ranks
    """Shape (groups, ranks of a group)."""


def plan_groups(grid: Grid, names: Iterable[str] | None = None) -> list[PlannedGroups]:
    """Return the groups of a layout (default: all kinds) in the order in which all ranks make them.

    The first is `world`, which exists already. Groups of one rank are left out.
    """
    wanted = list(KINDS) if names is None else list(names)
    unknown = [name for name in wanted if name not in KINDS]
    if unknown:
        raise BadInput(f"There is no group {unknown[0]!r}; groups are {', '.join(KINDS)}.")
    everyone = np.arange(grid.first_rank, grid.first_rank + grid.world, dtype=np.int64)[None]
    planned: dict[bytes, PlannedGroups] = {_key(everyone): PlannedGroups((WORLD,), everyone)}
    # In the order of KINDS, not of `names`: all ranks must make groups in one order.
    for name in KINDS:
        if name not in wanted:
            continue
        table = grid.table("pp")[:, [0, -1]] if name == "embedding" else grid.table(*KINDS[name])
        # With one stage the first and the last are the same rank.
        if table.shape[1] == 1 or (name == "embedding" and grid.pp == 1):
            continue
        key = _key(table)
        known = planned.get(key)
        planned[key] = PlannedGroups((*known.names, name), table) if known else PlannedGroups((name,), table)
    return list(planned.values())


def members(grid: Grid, rank: int) -> dict[str, tuple[int, ...]]:
    """Return the ranks of a rank's group of each kind, by name; kinds without a group are left out."""
    if not grid.first_rank <= rank < grid.first_rank + grid.world:
        return {}
    groups = {name: grid.group(rank, *axes) for name, axes in KINDS.items() if axes}
    # The first and the last stage.
    ends = groups["pp"][:: max(len(groups["pp"]) - 1, 1)]
    if rank in ends:
        groups["embedding"] = ends
    groups[WORLD] = tuple(range(grid.first_rank, grid.first_rank + grid.world))
    return groups


def _key(table: Ranks) -> bytes:
    # With the width, because tables of 2 x 4 and of 4 x 2 can have the same bytes.
    return bytes(table.shape[1].to_bytes(8, "little") + table.tobytes())


_union: Any = np.bitwise_or
"""Any, because NumPy 2.5 declares its `reduce` with arguments that it does not need."""


def rounds(groups: Sequence[Ranks]) -> list[int]:
    """Assign to each group the round in which it is warmed up.

    Groups of one round have no rank in common, so they run in parallel. Every rank goes through its groups by
    ascending round, so ranks never wait in a circle.

    Greedy, the largest group first: each takes the first round that is free on all its ranks.
    """
    chosen = [0] * len(groups)
    world = max((int(np.max(ranks)) for ranks in groups if len(ranks)), default=-1) + 1
    taken: list[npt.NDArray[np.uint64]] = []  # one bit per rank and round; each array holds 64 rounds
    for index in sorted(range(len(groups)), key=lambda index: -len(groups[index])):
        for block in range(len(taken) + 1):
            if block == len(taken):
                taken.append(np.zeros(world, np.uint64))
            # Bits make the reduction over a group's ranks fast: 16,384 ranks are planned in 0.1 s.
            used = int(_union.reduce(taken[block][groups[index]]))
            # The index of the lowest 0 bit of `used`: adding 1 carries into it.
            free = (~used & (used + 1)).bit_length() - 1
            if free < 64:
                taken[block][groups[index]] |= np.uint64(1 << free)
                chosen[index] = 64 * block + free
                break
    return chosen


def shown(ranks: Sequence[int], most: int = 8) -> str:
    """Format ranks for messages."""
    listed = ", ".join(map(str, ranks[:most]))
    return f"ranks {listed}" + (f" and {len(ranks) - most} more" if len(ranks) > most else "")
