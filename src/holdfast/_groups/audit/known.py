"""Versions of libraries that are known to hang: a table with dates and threads, and whom it concerns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

import msgspec

from holdfast._core.ready import ready

_DISTRIBUTIONS = {"nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"), "torch": ("torch",)}


class KnownHang(msgspec.Struct, frozen=True):
    """One pair of a library and an environment."""

    library: str
    since: str
    """The first version that it was seen with; "" if that isn't known."""
    fixed: str
    """The first version without it."""
    what: str
    thread: str
    noted: str
    """The day on which this entry was written."""
    machine: str = ""
    """Only on such machines, such as `aarch64`."""
    variables: dict[str, str] = {}
    """Only with such environment variables; the value is a pattern."""

    def __str__(self) -> str:
        return f"{self.what}: fixed in {self.library} {self.fixed} ({self.thread})"

    def has(self, version: str) -> bool:
        """Return whether a version has it."""
        found = _numbers(version)
        return bool(found) and _numbers(self.since) <= found < _numbers(self.fixed)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


@cache
def table() -> tuple[KnownHang, ...]:
    """Return the table of `known.json`."""
    text = files("holdfast._groups.audit").joinpath("known.json").read_bytes()
    return msgspec.json.decode(text, type=ready(tuple[KnownHang, ...]))


def versions_here() -> dict[str, str]:
    """Return the versions that this Python has of the table's libraries, by their distributions' names."""
    found: dict[str, str] = {}
    for library, names in _DISTRIBUTIONS.items():
        for name in names:
            with suppress(PackageNotFoundError):
                found.setdefault(library, version(name))
    return found


def affects(versions: Mapping[str, str], machine: str, variables: Mapping[str, str]) -> list[KnownHang]:
    """Return the entries that an environment has. versions: of libraries, by their name in the table."""
    return [
        entry
        for entry in table()
        if entry.has(versions.get(entry.library, ""))
        and entry.machine in ("", machine)
        and all(re.fullmatch(value, variables.get(name, "")) for name, value in entry.variables.items())
    ]


_MAKERS_OF_GPUS = ("0x10de", "0x1002")
_ACS, _REDIRECTS = 0x000D, 0x001C
"""The id of PCI Access Control Services, and the bits by which they send what devices send each other up."""


def redirecting_bridges(devices: Path = Path("/sys/bus/pci/devices")) -> list[str]:
    """Return the PCI bridges that send what GPUs send each other through the IOMMU: NCCL may hang then
    (https://github.com/NVIDIA/nccl/issues/2079). Only root may read that: others get none."""
    found, gpus = [], 0
    with suppress(OSError):
        for device in sorted(devices.iterdir()):
            kind = (device / "class").read_text()
            gpus += kind.startswith("0x03") and (device / "vendor").read_text().strip() in _MAKERS_OF_GPUS
            if kind.startswith("0x0604") and _redirects((device / "config").read_bytes()):
                found.append(device.name)
    return found if gpus > 1 else []


def _redirects(config: bytes) -> bool:
    at = 0x100  # extended capabilities are a chain from here on
    for _ in range(64):
        head = int.from_bytes(config[at : at + 4], "little")
        if head & 0xFFFF == _ACS:
            return bool(int.from_bytes(config[at + 6 : at + 8], "little") & _REDIRECTS)
        at = head >> 20
        if not at:
            break
    return False
