"""File systems that tests mount: read-only, small, or with a journal."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.waiting import wait_until


@contextmanager
def tmpfs(place: Path, options: str = "rw") -> Iterator[None]:
    """A tmpfs that is mounted on a folder, until the end. Skips the test where mounting is not allowed."""
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", place], capture_output=True, timeout=30
    ).returncode:
        pytest.skip("mounting a file system is not allowed here")
    try:
        yield
    finally:
        unmount(place)


def remount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", place], check=True, timeout=30)


def unmount(place: Path) -> None:
    """Unmount as soon as nobody is at work there: a rank that has reported its error may still look at its run.

    Does nothing where nothing is mounted.
    """

    def is_gone() -> bool:
        mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        if str(place) not in mounted:
            return True
        done = subprocess.run(["umount", place], capture_output=True, text=True, timeout=30)
        assert not done.returncode or "busy" in done.stderr, done.stderr
        return False

    wait_until(is_gone)
