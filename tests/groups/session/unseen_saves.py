"""A process whose last save in the background fails, and what it does about it: not much, mostly."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time

import torch

import holdfast
from holdfast import events
from holdfast._core.process.exits import is_working
from holdfast.errors import HoldfastError, StorageError


def save_in_vain(how: str, folder: str) -> None:
    atexit.register(print, "a handler from before", flush=True)
    os.makedirs(f"{folder}/step-00000001")
    open(f"{folder}/step-00000001/data", "w").close()  # where the folder of the files is to be
    if how == "is interrupted":
        _interrupt_at_the_end()
    on_failure = "warn" if how == "warns" else "raise"
    run = holdfast.Checkpoints(
        folder, job=holdfast.Job(timeout=20, stall_timeout=10, no_dist=True), on_failure=on_failure
    )
    pending = run.save(1, {"w": torch.ones(8)})
    assert pending is not None
    atexit.register(print, "a handler from after", flush=True)
    if how == "raises":
        raise ValueError("the loss is not a number")
    if how == "exits":
        sys.exit(3)
    if how == "asks":
        assert isinstance(pending.exception(20), StorageError)
    if how == "asks a future":
        assert pending.upload_completion.exception(20) is not None
    try:
        if how == "catches":
            run.close()
        if how == "is impatient":
            pending.committed(1e-9)
    except HoldfastError:
        pass


def _interrupt_at_the_end() -> None:
    """Ctrl-C while the process waits for its save, which takes long."""
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        while not is_working():
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    events.subscribe(lambda event: time.sleep(30) if event.name == "save.writing" else None)
