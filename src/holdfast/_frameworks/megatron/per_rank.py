"""Loading the state of random generators, which belongs to one rank, into another layout.

A ShardedObject of such state is named by its coordinates in the grid of pipeline and tensor ranks
(`rng_state/shard_0.1_2.2`: coordinates 0.1 in a grid of 2 x 2). Another grid has other coordinates.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from holdfast._core.format.names import SHARD
from holdfast._frameworks.megatron import mcore
from holdfast.errors import MissingTensors

log = logging.getLogger("holdfast")
PER_RANK = ("rng_state", "rerun_state_machine_state")
"""Keys of objects that differ on every rank, in megatron-core's frameworks."""


def nearest(asked: Iterable[object], names: Iterable[str], where: str, allowed: bool) -> dict[str, str]:
    """Map each per-rank object that the checkpoint `where` lacks to the stored name of the nearest rank's
    object.

    asked: all items that this rank requests. names: all names in the checkpoint. Raises MissingTensors if a
        mapping is needed and not `allowed`.
    """
    items = [
        item
        for item in asked
        if isinstance(item, mcore.ShardedObject) and item.key.rpartition(".")[2] in PER_RANK
    ]
    stored: dict[str, dict[str, mcore.ShardedObject]] = {item.key: {} for item in items}
    for name in names:
        key, separator, _ = name.partition(SHARD)
        if separator and key in stored:
            stored[key][name] = mcore.ShardedObject.empty_from_unique_key(name)
    chosen: dict[str, str] = {}
    for item in items:
        there = stored[item.key]
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
        # By name if two are equally near, so that a repeated load takes the same one.
        chosen[item.unique_key] = min(there, key=lambda name: (_distance(item, there[name]), name))
    if chosen:
        log.warning(
            "%s was saved in another layout: %s.",
            where,
            ", ".join(f"{own} takes the state of {other}" for own, other in sorted(chosen.items())),
        )
    return chosen


def _distance(one: mcore.ShardedObject, other: mcore.ShardedObject) -> float:
    """Return the distance of two coordinates, in fractions of their grids' sides; if the grids have different
    numbers of dimensions, use the leading ones."""
    grids = zip(one.global_offset, one.global_shape, other.global_offset, other.global_shape, strict=False)
    return float(sum(abs(mine / size - theirs / length) for mine, size, theirs, length in grids))
