"""Read one object of a checkpoint of any format. Not in `raw_read`, so that code that only reads indexes does
not import the other formats."""

from __future__ import annotations

import numpy as np

from holdfast._core.format import objects
from holdfast._core.format.limits import bounded_memory
from holdfast._core.io.open_checkpoint import open_source
from holdfast._core.io.raw_read import read_all
from holdfast._core.store.base import Store


def read_object(store: Store, name: str) -> object:
    """Return an object of a committed checkpoint by its name, or None if there is none of that name."""
    with open_source(store) as index:
        row = index.find_one(name)
        if row < 0:
            return None
        columns, where = index.select(np.asarray([row])), index.where
        prefix = index.object_prefix
    with bounded_memory(f"The object {name!r} of {where}"):
        return objects.decode(prefix + read_all(store, columns, where), name)
