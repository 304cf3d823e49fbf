"""The frameworks that `install` knows, by their distributions, and the versions that were tested. It must not
import torch, because `holdfast doctor` uses it."""

from __future__ import annotations

import importlib.metadata

DISTRIBUTIONS: dict[str, tuple[str, ...]] = {
    "megatron-core": ("0.16.1", "0.19.2"),
    "megatron-bridge": ("0.3.1", "0.6.2"),
    "verl": ("0.9.1",),
    "ms-swift": ("4.6.0",),
    "nemo-rl": (),
    "torchtitan": ("0.3.0",),
    "deepspeed": ("0.19.8",),
    "accelerate": ("1.15.0",),
    "transformers": ("5.10.4",),
    "lightning": ("2.6.6",),
    "pytorch-lightning": (),
}
"""Name on PyPI, and the versions whose functions the tests call (docs/megatron.md says how)."""


def version_of(distribution: str) -> str:
    """Return the installed version; empty if there is none."""
    try:
        return importlib.metadata.version(distribution) if distribution else ""
    except importlib.metadata.PackageNotFoundError:
        return ""


def found_frameworks() -> list[tuple[str, str, tuple[str, ...]]]:
    """List (name, installed version, tested versions) of the installed frameworks."""
    frameworks = [(name, version_of(name), tested) for name, tested in DISTRIBUTIONS.items()]
    return [(name, version, tested) for name, version, tested in frameworks if version]
