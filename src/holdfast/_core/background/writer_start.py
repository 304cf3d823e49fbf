"""The program of the writer process: `python -I -S writer_start.py DESCRIPTOR PLACES`.

The interpreter is isolated: it imports the standard library, and nothing from the working directory,
PYTHONPATH, the folder of this file or site-packages. The few packages that the writer needs are imported from
the trainer's folders (PLACES: a folder for each name, as JSON), and no other package is. So no stray file can
be executed, and both sides run the same version.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class Places:
    """A finder for `sys.meta_path`: finds packages by name, each in its given folder."""

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        place = self._places.get(name)
        # Only these names: other packages in the same site-packages are not found. Submodules are found by
        # their package's own path.
        return None if place is None else PathFinder.find_spec(name, [place])


if __name__ == "__main__":
    # First, so that no other finder answers for these names.
    sys.meta_path.insert(0, Places(json.loads(sys.argv[2])))
    # Importing numpy starts a thread a core for linear algebra, which the writer does not do.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    from holdfast._core.background.writer_process import main

    main(int(sys.argv[1]))
