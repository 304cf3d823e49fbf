"""What a save takes away if it fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from holdfast.deadline import REAL_CLOCK
from holdfast.errors import HoldfastError
from holdfast.io.file_writer import discard
from holdfast.store.base import Store
from holdfast.threads import start_thread

OWN_FILES = 1.0
"""Seconds that a failed call waits until its files are deleted. No longer: storage may be what failed."""
OTHERS_LEAVE = 2.0
"""Seconds that the folder then has to become empty, which other ranks' files have yet to leave."""


def clean_up(store: Store, discard_files: Callable[[], None], made_folder: bool) -> None:
    """After a failure, in the background: this rank's files go, and the folder if this save has made it.
    Never raises."""
    deleted = threading.Event()

    def work() -> None:
        with suppress(Exception):
            discard_files()
            if made_folder:
                _remove_folder(store, deleted)
        deleted.set()

    # Beside the caller, which is about to raise: storage may be the very thing that hangs.
    with suppress(HoldfastError):  # no thread is to be had: `prune` sweeps what stays
        start_thread(work, "holdfast-sweep")
        deleted.wait(OWN_FILES)


def _remove_folder(store: Store, tried: threading.Event) -> None:
    """Remove it once it is empty. If it does not get empty a rank has died, or another save has begun there:
    it stays."""
    ends, pause = REAL_CLOCK.now() + OTHERS_LEAVE, 0.01
    while not store.remove() and REAL_CLOCK.now() < ends:
        # The caller waits for this rank's own files only, not for those of others.
        tried.set()
        REAL_CLOCK.sleep(pause)
        pause = min(2 * pause, 0.5)
        # A `data` folder that still stands keeps the folder from being empty. Whoever is last takes it away.
        discard(store, [])
