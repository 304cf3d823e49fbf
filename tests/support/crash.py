"""Deaths at every system call that changes something, and power cuts."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounts import unmount

CALLS = ("open", "mkdir", "pwritev", "write", "fsync", "link", "rename", "replace", "unlink", "rmdir")
"""System calls that change something, as the store makes them."""


def die_before(number: int) -> None:
    """SIGKILL this process just before its `number`-th call that changes something in a file system."""
    count = 0

    def wrap(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, wrap(getattr(os, name)))


def mount_ext4(folder: Path) -> Path:
    """A real ext4 with a journal on a loop device; the machine's own file system may have none.

    Mounts below the folder are shared: namespaces that other tests make meanwhile (`tests.support.hosts`) would
    keep the file system, with its power cut, beyond its `umount` here.
    """
    image, place = folder / "disk.img", folder / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    for command in (
        ["mkfs.ext4", "-q", "-F", str(image)],
        ["mount", "--bind", "--make-shared", str(folder), str(folder)],
        ["mount", "-o", "loop", str(image), str(place)],
    ):
        if subprocess.run(command, capture_output=True).returncode:
            unmount_ext4(place)
            pytest.skip("making and mounting a loop device is not allowed here")
    return place


def unmount_ext4(place: Path) -> None:
    for mounted in (place, place.parent):
        unmount(mounted)


def cut_power(place: Path) -> None:
    """EXT4_IOC_SHUTDOWN without flushing the journal, then boot again: what was not synced is gone."""
    fd = os.open(place, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, 0x8004587D, struct.pack("I", 2))
    finally:
        os.close(fd)
    unmount(place)
    subprocess.run(["mount", "-o", "loop", str(place.parent / "disk.img"), str(place)], check=True)
