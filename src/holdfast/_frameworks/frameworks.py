"""All frameworks that `install` knows, each from its own folder, and their versions here.

docs/framework.md says how to add one. This module imports neither torch nor a framework, nor do the folders'
descriptions.
"""

from __future__ import annotations

import importlib.metadata

from holdfast._frameworks import (
    accelerate,
    deepspeed,
    lightning,
    mbridge,
    mcore_bridge,
    megatron,
    megatron_bridge,
    megatron_lm,
    ms_swift,
    nemo_rl,
    torch_dcp,
    torchtitan,
    torchtune,
    transformers,
    verl,
)

FRAMEWORKS = (
    megatron.FRAMEWORK,
    torch_dcp.FRAMEWORK,
    megatron_lm.FRAMEWORK,
    megatron_bridge.FRAMEWORK,
    mbridge.FRAMEWORK,
    verl.FRAMEWORK,
    nemo_rl.FRAMEWORK,
    mcore_bridge.FRAMEWORK,
    ms_swift.FRAMEWORK,
    torchtitan.FRAMEWORK,
    torchtune.FRAMEWORK,
    deepspeed.FRAMEWORK,
    accelerate.FRAMEWORK,
    transformers.FRAMEWORK,
    lightning.FRAMEWORK,
    lightning.PYTORCH_LIGHTNING,
)
"""In the order in which `install` changes them: what others use comes first."""
NAMES = tuple(framework.name for framework in FRAMEWORKS)
TRAINING = tuple(framework.package for framework in FRAMEWORKS if framework.distribution != "torch")
"""Packages whose import shows that the process trains."""


def version_of(distribution: str) -> str:
    """Return the installed version; empty if there is none."""
    try:
        return importlib.metadata.version(distribution) if distribution else ""
    except importlib.metadata.PackageNotFoundError:
        return ""


def found_frameworks() -> list[tuple[str, str, tuple[str, ...]]]:
    """List (name on PyPI, installed version, tested versions) of the installed frameworks."""
    return [
        (framework.distribution, version, framework.tested)
        for framework in FRAMEWORKS
        if framework.tested is not None and (version := version_of(framework.distribution))
    ]
