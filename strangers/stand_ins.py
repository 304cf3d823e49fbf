"""Stand-ins of `tests/support/stand_ins.py` for modules that a project's tests import: on both sides alike.

A test that needs more of such a module than its names fails on stock, and is not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

_ROOT = str(Path(__file__).parents[1])


def stand_in(names: Iterable[str]) -> None:
    """From now on, modules of `STAND_INS[name]` are empty in this process. Transformer Engine has layers."""
    import_module("torch._dynamo")  # it has to find that there is no Triton
    before = dict(sys.modules)
    _forget_tests()  # the project has a package `tests`, too
    sys.path.insert(0, _ROOT)
    try:
        for name in names:
            if name == "transformer-engine":
                import_module("tests.support.transformer_engine").use_layers()
            else:
                import_module("tests.support.stand_ins").stand_in_for(name)
            if name == "triton":  # who imports it asks which one
                import_module(name).__version__ = "3.5.0"  # type: ignore[attr-defined]
    finally:
        sys.path.remove(_ROOT)
        _forget_tests()
        sys.modules.update(before)


def _forget_tests() -> None:
    for name in [name for name in sys.modules if f"{name}.".startswith("tests.")]:
        del sys.modules[name]
