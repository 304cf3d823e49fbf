"""Forkservers that the workers of a run share: each has imported torch and a framework, which takes seconds.

The first worker that needs one starts it, and writes down where it is, in a folder of the run. The others keep it
alive, too: it ends when no worker is left that has used it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from multiprocessing import forkserver, process
from pathlib import Path
from unittest import mock

import psutil

FOLDER = "HOLDFAST_TESTS_FORKSERVERS"
"""The environment variable with the folder of this run."""


class SharedForkServer(forkserver.ForkServer):
    def __init__(self, name: str, modules: list[str]) -> None:
        super().__init__()
        self._name = name
        self.set_forkserver_preload(modules)

    def ensure_running(self) -> None:
        folder = os.environ.get(FOLDER)
        if folder is None:
            super().ensure_running()
            return
        if _runs(self._forkserver_pid):
            return
        self._forkserver_pid = None
        place = Path(folder, f"{self._name}.json")
        with open(Path(folder, f"{self._name}.lock"), "w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = json.loads(place.read_text(encoding="utf-8")) if place.exists() else {"users": []}
            pipe = next(filter(None, (_opened(*user) for user in known["users"])), None)
            if pipe is not None and _runs(known["pid"]):
                self._forkserver_alive_fd, self._forkserver_pid = pipe, known["pid"]
                self._forkserver_address = known["address"]
            else:
                # Its socket is not to go with this worker's own temporary folder.
                with mock.patch.dict(process.current_process()._config, {"tempdir": folder}):
                    super().ensure_running()
                known = {"pid": self._forkserver_pid, "address": self._forkserver_address, "users": []}
            known["users"].append([os.getpid(), self._forkserver_alive_fd])
            place.write_text(json.dumps(known), encoding="utf-8")


def _opened(worker: int, fd: int) -> int | None:
    """Return another descriptor of a worker's pipe, whose last one keeps the server alive."""
    with contextlib.suppress(OSError):
        return os.open(f"/proc/{worker}/fd/{fd}", os.O_WRONLY)
    return None


def _runs(pid: int | None) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return pid is not None and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def make_folder() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of a run, whose workers inherit its name."""
    folder = tempfile.TemporaryDirectory(prefix="forkservers-", ignore_cleanup_errors=True)
    os.environ[FOLDER] = folder.name
    return folder
