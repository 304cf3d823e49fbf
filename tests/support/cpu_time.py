"""The time that code needs of a core, for tests of how it grows."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def cpu_seconds(call: Callable[[], object]) -> float:
    """Return the CPU time of this thread in `call`, in seconds: the least of three runs.

    The least, and without the garbage collector, which looks at all objects of the process: other work on
    the machine, and what earlier tests have left, would be measured instead.
    """
    gc.collect()
    gc.disable()
    try:
        taken = []
        for _ in range(3):
            begun = time.thread_time()
            call()
            taken.append(time.thread_time() - begun)
        return min(taken)
    finally:
        gc.enable()
