"""A call that no other thread of its process survives the wait for."""

from __future__ import annotations

import ctypes
import os

_MONOTONIC = 1


def hold_the_gil(seconds: float) -> None:
    """Wait in C, and keep the GIL: as a library does that computes without giving it back.

    The kernel goes on with this wait after a signal, where a sleep would be over.
    """
    libc = ctypes.PyDLL(None)
    timer = libc.timerfd_create(_MONOTONIC, 0)
    ends = (ctypes.c_long * 4)(0, 0, int(seconds), int(seconds % 1 * 1e9))
    assert libc.timerfd_settime(timer, 0, ends, None) == 0
    libc.read(timer, ctypes.create_string_buffer(8), 8)
    os.close(timer)
