"""Python runs this when it starts, because `holdfast run` puts this folder first on PYTHONPATH: once torch is
imported, `holdfast.install()` is called with what HOLDFAST_INSTALL says.

A process that never imports torch pays nothing. The environment's own `sitecustomize`, which this one hides,
runs first.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec

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


def _install(_: object) -> None:
    try:
        from holdfast.integrations.install import install, is_installed
        from holdfast.options import read_install
    except ImportError:
        # Holdfast itself has imported torch, and is half loaded. Once a framework is imported it is complete.
        import wrapt

        for package in _FRAMEWORKS:
            wrapt.register_post_import_hook(_install, package)
        return
    arguments = read_install()
    if arguments is not None and not is_installed():
        install(**arguments)


_FRAMEWORKS = ("megatron.core", "verl", "swift", "nemo_rl", "torchtitan")


def _begin() -> None:
    if find_spec("holdfast") is None or find_spec("wrapt") is None:
        if find_spec("torch") is not None:  # a process that may train, in another environment
            print(
                f"holdfast run: {sys.executable} does not have Holdfast; nothing is changed.", file=sys.stderr
            )
        return
    import wrapt

    wrapt.register_post_import_hook(_install, "torch")


_run_the_hidden_one()
_begin()
