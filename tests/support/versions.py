"""What the installed version of a third party can't do, decided here alone, with the version in the reason."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path


def version_of(distribution: str) -> tuple[str, tuple[int, ...]]:
    """The version of an installed package, as text and as two numbers; "not installed" and () without it."""
    try:
        text = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed", ()
    return text, tuple(int(part) for part in text.split(".")[:2])


def lacks_muon() -> str:
    """Why megatron-core can't chain Muon and the distributed optimizer here; "" if it can."""
    text, version = version_of("megatron-core")
    if version < (0, 18):
        return f"megatron-core {text}: Muon has no full_param_layout, so no DistributedOptimizer beside it"
    if importlib.util.find_spec("emerging_optimizers") is None:
        return f"megatron-core {text} takes Muon from emerging-optimizers, which is not installed"
    return ""


def lacks_mbridge() -> str:
    """Why mbridge can't make a model here; "" if it can."""
    if importlib.util.find_spec("mbridge") is None:
        return "mbridge is not there"
    core, _ = version_of("megatron-core")
    enums = Path(str(importlib.metadata.distribution("megatron-core").locate_file("megatron/core/enums.py")))
    if "encoder_and_decoder" in enums.read_text(encoding="utf-8"):
        return ""
    return (
        f"mbridge {version_of('mbridge')[0]} asks megatron-core for ModelType.encoder_and_decoder, which {core} "
        "does not have"
    )


def refuses_unheard_of() -> str:
    """Why Megatron-Bridge makes no bridge for a model type that transformers does not know; "" if it does."""
    text, version = version_of("megatron-bridge")
    if version < (0, 6):
        return ""
    return f"megatron-bridge {text} itself refuses a model type that transformers does not know"
