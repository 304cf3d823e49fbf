"""The frameworks that `install` knows, by their distributions, and the versions that were tried. No torch
here: `holdfast doctor` asks."""

from __future__ import annotations

import importlib.metadata

DISTRIBUTIONS: dict[str, tuple[str, ...]] = {
    "megatron-core": ("0.16.1", "0.19.2"),
    "megatron-bridge": ("0.3.1", "0.6.2"),
    "verl": ("0.9.1",),
    "ms-swift": ("4.6.0",),
    "nemo-rl": (),
    "torchtitan": ("0.3.0",),
}
"""Name on PyPI, and the versions whose own functions the tests call (docs/megatron.md says how)."""


def version_of(distribution: str) -> str:
    """The version that is installed; empty if there is none, or no such distribution."""
    try:
        return importlib.metadata.version(distribution) if distribution else ""
    except importlib.metadata.PackageNotFoundError:
        return ""


def found_frameworks() -> list[tuple[str, str, tuple[str, ...]]]:
    """(name, version that is installed, versions that were tried) of each that is there."""
    found = [(name, version_of(name), tested) for name, tested in DISTRIBUTIONS.items()]
    return [(name, version, tested) for name, version, tested in found if version]
