"""What this Python can't have of third parties, and what their installed versions can't do: decided here alone, with the
version in the reason for which a test is skipped.

`python -m tests.support.third_parties` says in one line what `make test` has left out.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

GROUPS = ("frameworks", "functions", "bridge-oldest", "bridge-newest")
"""Of pyproject.toml, in which a marker may leave a package out."""
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def left_out() -> dict[str, str]:
    """Return the packages that this Python can't have, and has in no other version: by name, with the version."""
    return {
        canonicalize_name(one.name): f"{one.name} {one.specifier}".replace("==", "")
        for one in _requirements()
        if one.marker is not None and not one.marker.evaluate() and not version_of(one.name)[1]
    }


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip tests where a package is not there, and say why."""
    missing = [name for name in packages if find_spec(name) is None]
    known = left_out()
    reasons = [
        f"{known[canonicalize_name(name)]} is not for Python {PYTHON}"
        if canonicalize_name(name) in known
        else f"{name} is not installed"
        for name in missing
    ]
    return pytest.mark.skipif(bool(missing), reason="; ".join(reasons) or "all is there")


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
    if find_spec("emerging_optimizers") is None:
        return f"megatron-core {text} takes Muon from emerging-optimizers, which is not installed"
    return ""


def lacks_mbridge() -> str:
    """Why mbridge can't make a model here; "" if it can."""
    if find_spec("mbridge") is None:
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


def _requirements() -> Iterator[Requirement]:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    for group in GROUPS:
        yield from map(Requirement, project["dependency-groups"][group])


if __name__ == "__main__":
    names = left_out()
    if names:
        print(
            f"Python {PYTHON} can't have {', '.join(names.values())}: the tests that need them are skipped."
        )
