"""Which packages of others this Python, or this version of another package, can't have: one place that says why their tests are
skipped.

`python -m tests.support.third_parties` says in one line what `make test` has left out.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
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
        if one.marker is not None and not one.marker.evaluate() and not _is_installed(one.name)
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


def _is_installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


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
