"""Loading the state of random generators, which belongs to one rank, into another layout.

A ShardedObject of such state is named by its coordinates in the grid of pipeline and tensor ranks
(`rng_state/shard_0.1_2.2`: coordinates 0.1 in a grid of 2 x 2). Another grid has other coordinates.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from holdfast._format.names import SHARD
from holdfast._integrations.megatron import mcore
from holdfast.errors import MissingTensors

log = logging.getLogger("holdfast")
PER_RANK = ("rng_state", "rerun_state_machine_state")
"""Keys of objects that differ on every rank, in megatron-core's frameworks."""
Coordinates = tuple[int, ...]


def is_per_rank(item: object) -> bool:
    """Return whether an item is an object that differs on every rank."""
    return isinstance(item, mcore.ShardedObject) and item.key.rpartition(".")[2] in PER_RANK


def nearest(
    items: Iterable[mcore.ShardedObject], names: Iterable[str], where: str, allowed: bool
) -> dict[str, str]:
    """Map each object that the checkpoint `where` does not have to the stored name of the nearest rank's.

    names: all names in the checkpoint. Raises MissingTensors if a name is needed and this is not `allowed`.
    """
    items = list(items)
    stored: dict[str, dict[str, tuple[Coordinates, Coordinates]]] = {}
    keys = {item.key for item in items}
    for name in names:
        key, separator, rest = name.partition(SHARD)
        if separator and key in keys:
            offset, _, shape = rest.partition("_")
            stored.setdefault(key, {})[name] = (_coordinates(offset), _coordinates(shape))
    chosen: dict[str, str] = {}
    for item in items:
        there = stored.get(item.key, {})
        if not there or item.unique_key in there:
            continue  # the layout is the same here, or the checkpoint has no such state at all
        if not allowed:
            raise MissingTensors(
                f"{where} was saved in another layout, and has no {item.key} of this rank's place: "
                f"{item.unique_key!r} is not among {', '.join(sorted(there)[:4])}.",
                hint="Leave the states of random generators out of the load, or give a job with "
                "holdfast.Options(nearest_rng=True): each rank takes the nearest one's.",
                details={"missing": [item.unique_key]},
            )
        goal = _relative(tuple(item.global_offset), tuple(item.global_shape))
        # By name if two are equally near, so that a repeated load takes the same one.
        chosen[item.unique_key] = min(
            there, key=lambda name: (_distance(goal, _relative(*there[name])), name)
        )
    if chosen:
        log.warning(
            "%s was saved in another layout: %s.",
            where,
            ", ".join(f"{own} takes the state of {other}" for own, other in sorted(chosen.items())),
        )
    return chosen


def _coordinates(text: str) -> Coordinates:
    return tuple(int(part) for part in text.split(".")) if text else ()


def _relative(offset: Coordinates, shape: Coordinates) -> tuple[float, ...]:
    """Return coordinates in a grid as fractions of its sides."""
    return tuple(coordinate / max(size, 1) for coordinate, size in zip(offset, shape, strict=True))


def _distance(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Return the distance of two places; if the grids differ in dimensions, the leading ones count."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=False))
