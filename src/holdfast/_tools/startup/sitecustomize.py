"""Python runs this when it starts under `holdfast run`: once torch is imported, `holdfast.install()` is
called with what HOLDFAST_INSTALL says.

It is run in two ways, and may be run twice. `holdfast run` puts this folder first on PYTHONPATH; the
environment's own `sitecustomize`, which this one then hides, runs first. And `holdfast-run.pth`, which lies
beside the installed packages, imports this module: so it also runs if Python is told to ignore PYTHONPATH
(`-I`, `-E`), or if a program sets it anew. A process that never imports torch pays nothing.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_the_hidden_one() -> None:
    """Import the `sitecustomize` that Python would have found without this folder."""
    path = list(sys.path)
    sys.path[:] = [entry for entry in path if os.path.abspath(entry or ".") != _HERE]
    mine = sys.modules.pop("sitecustomize", None)
    try:
        if find_spec("sitecustomize") is not None:
            import_module("sitecustomize")
        elif mine is not None:
            sys.modules["sitecustomize"] = mine
    finally:
        sys.path[:] = [entry for entry in path if os.path.abspath(entry or ".") != _HERE]


def _install(module: ModuleType) -> None:
    try:
        from holdfast._frameworks.startup import install_from_environment
    except ImportError:
        if module.__name__ != "torch":
            raise
        # Holdfast itself has imported torch, and is half loaded. Once a framework is imported it is complete.
        import wrapt

        from holdfast._frameworks.frameworks import TRAINING

        for package in TRAINING:
            wrapt.register_post_import_hook(_install, package)
        return
    install_from_environment()


def _begin() -> None:
    if find_spec("holdfast") is None or find_spec("wrapt") is None:
        if find_spec("torch") is not None:  # a process that may train, in another environment
            print(
                f"holdfast run: {sys.executable} does not have Holdfast; nothing is changed.", file=sys.stderr
            )
        return
    import wrapt

    wrapt.register_post_import_hook(_install, "torch")


try:
    if __name__ == "sitecustomize":
        _run_the_hidden_one()
finally:  # Python reports what it raises, and goes on
    _begin()
