"""An object of a checkpoint as one line of text."""

from __future__ import annotations

import numpy as np

from holdfast._core.format import plain_objects
from holdfast._core.format.index import Index
from holdfast._core.io.raw_read import read_all
from holdfast._core.store.base import Store
from holdfast.errors import HoldfastError

SHOWN_OBJECT = 1 << 20
"""Maximum bytes of an object that is read for display."""


def object_text(store: Store, index: Index, row: int, nbytes: int) -> str:
    """Return an object as one line of text. Damage is also described as text, so that the rest is shown."""
    if nbytes > SHOWN_OBJECT:
        return f"<{nbytes} bytes>"
    try:
        return plain_objects.preview(read_all(store, index.select(np.asarray([row])), index.where))
    except HoldfastError as error:
        return f"<unreadable: {error.message}>"
