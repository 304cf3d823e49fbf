"""What forkservers import once, so that no rank has to: a module for each framework.

`ProcessWorld(8, preload="verl")` starts its ranks from a forkserver that has imported `preloads.verl`.
"""

from __future__ import annotations

import sys


def forget(*packages: str) -> None:
    """Have ranks import these packages anew, beside whatever they import: then `install()` can come first."""
    for name in list(sys.modules):
        if f"{name}.".startswith(tuple(f"{package}." for package in packages)):
            del sys.modules[name]
