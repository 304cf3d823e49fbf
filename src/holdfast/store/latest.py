"""The newest committed step of a run, by its path."""

from __future__ import annotations

import os

from holdfast.store.local import open_store
from holdfast.store.run_folder import newest_steps, refuse_other_checkpoints


def latest(run: str | os.PathLike[str]) -> str | None:
    """Return the folder of the newest committed step of a run, or None. Reads no data and needs no torch.

    Raises BadInput if there are checkpoints, but none that is a step's.
    """
    store = open_store(run)
    for folder in newest_steps(store, 1).values():
        return store.child(folder).url
    refuse_other_checkpoints(store)
    return None
