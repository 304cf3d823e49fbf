"""The cleanup after a failed save."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from holdfast._core.base.deadline import REAL_CLOCK
from holdfast._core.base.threads import start_thread
from holdfast._core.io.file_writer import discard
from holdfast._core.store.base import Store
from holdfast.errors import HoldfastError

OWN_FILES = 1.0
"""Maximum seconds that a failed call waits for the deletion of its files, as storage may be the cause."""
OTHERS_LEAVE = 2.0
"""Seconds to wait for other ranks to delete their files, so that the folder can be removed."""


def clean_up(store: Store, discard_files: Callable[[], None], made_folder: bool) -> None:
    """Delete this rank's files in the background, and the folder if this save created it. Never raises."""
    deleted = threading.Event()

    def work() -> None:
        with suppress(Exception):
            discard_files()
            if made_folder:
                _remove_folder(store, deleted)
        deleted.set()

    # On a thread, because the caller is about to raise and storage may be what hangs.
    with suppress(HoldfastError):  # no thread can be started: `prune` removes the files
        start_thread(work, "holdfast-sweep")
        deleted.wait(OWN_FILES)


def _remove_folder(store: Store, tried: threading.Event) -> None:
    """Remove the folder once it is empty. If it does not get empty, a rank has died or another save has begun
    there: it stays."""
    ends, pause = REAL_CLOCK.now() + OTHERS_LEAVE, 0.01
    while not store.remove() and REAL_CLOCK.now() < ends:
        # The caller waits for this rank's files only, not for those of others.
        tried.set()
        REAL_CLOCK.sleep(pause)
        pause = min(2 * pause, 0.5)
        # The folder is not empty while its `data` folder is there. The last rank removes that.
        discard(store, [])
