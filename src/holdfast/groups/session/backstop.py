"""End this process from outside of Python, by a timer of the C library that needs no Python thread.

No Python thread runs in the interpreter's finalisation, in destructors of C++ libraries, in C exit handlers,
and while a call holds the GIL. The stacks that faulthandler can still see are written first.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
from contextlib import suppress

_THREAD = 2
"""SIGEV_THREAD: the C library calls a function on a thread of its own."""
_MONOTONIC = 1
STACKS_FIRST = 0.5
"""Seconds from the stacks to the end of the process."""


class _Event(ctypes.Structure):
    """struct sigevent of Linux."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        # Pads the structure to its size in C, 64 bytes.
        ("reserved", ctypes.c_char * 32),
    )


class _Spec(ctypes.Structure):
    """struct itimerspec: the interval (0: fires once), and the first expiry."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("each_s", "each_ns", "first_s", "first_ns"))


class Backstop:
    """A timer that ends the process with an exit code. Arming it again restarts it; a fork has none."""

    def __init__(self, code: int) -> None:
        self._code = code
        self._timer: ctypes.c_void_p | None = None

    def arm(self, seconds: float) -> None:
        """End the process after so many seconds."""
        exits = False
        try:
            self._set(seconds)
        # Without such timers faulthandler's is used, which reaches almost as far, and exits with 1.
        except (OSError, AttributeError):
            exits = True
        later = max(seconds - (0.0 if exits else STACKS_FIRST), 0.1)
        try:
            faulthandler.dump_traceback_later(later, exit=exits)
        except Exception:  # sys.stderr has no file descriptor
            with suppress(Exception):
                faulthandler.dump_traceback_later(later, exit=exits, file=2)

    def disarm(self) -> None:
        """Stop the timer, until it is armed again."""
        faulthandler.cancel_dump_traceback_later()
        if self._timer is not None:
            _check(_libc().timer_settime(self._timer, 0, ctypes.byref(_Spec(0, 0, 0, 0)), None))

    def insist(self) -> None:
        """Make the process end with this exit code also if it now ends by itself, by `exit` or (a fork) by
        `os._exit`."""
        end = os._exit
        os._exit = lambda status: end(self._code)
        libc = ctypes.CDLL(None)
        with suppress(AttributeError):
            # C runs exit handlers in reverse order, so this one runs before those that may not return.
            getattr(libc, "__cxa_atexit")(_address(libc), ctypes.c_void_p(self._code), None)

    def _set(self, seconds: float) -> None:
        libc = _libc()
        if self._timer is None:
            # The timer's thread calls `_exit(code)` directly: no Python runs, and no GIL is needed.
            event = _Event(self._code, 0, _THREAD, _address(libc), None)
            timer = ctypes.c_void_p()
            _check(libc.timer_create(_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)))
            self._timer = timer
        whole, part = divmod(seconds, 1.0)
        spec = _Spec(0, 0, int(whole), int(part * 1e9) + 1)  # 0 would disarm it
        _check(libc.timer_settime(self._timer, 0, ctypes.byref(spec), None))


def _address(libc: ctypes.CDLL) -> ctypes.c_void_p:
    """Return the address of `_exit(code)`."""
    return ctypes.cast(libc._exit, ctypes.c_void_p)


def _libc() -> ctypes.CDLL:
    """Return the library that has timers: the C library, or librt beside an old one."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc if hasattr(libc, "timer_create") else ctypes.CDLL("librt.so.1", use_errno=True)


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), "the timer was refused")
