"""The SystemExit by which a program ends itself, where no block is around it that could see it.

A `with` block gets it as its exception. Python has no hook for it otherwise: the interpreter reads its
`code`, from C, and ends. So for a session without a block, and for `install`, that attribute notes who reads
it.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from contextlib import suppress
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import NamedTuple, NoReturn

from holdfast._core.base.stacks import calls_of_traceback
from holdfast._core.process.exits import note_code, uncaught
from holdfast._core.roster.lost import PROGRAM_ENDED


class ProgramExit(NamedTuple):
    """The SystemExit by which the program has ended itself."""

    code: object
    """A number, a message, or None; 0 and None mean success."""
    calls: str
    """The last calls before it was raised; "" if they are not known."""

    def __str__(self) -> str:
        where = f" at {self.calls}" if self.calls else ""
        if self.code is None or isinstance(self.code, int):
            return f"exited with code {int(self.code or 0)} (SystemExit){where}"
        return f"exited with {str(self.code)[:500]!r} (SystemExit){where}"


_CODE = SystemExit.__dict__["code"]
_BOOTSTRAP = BaseProcess._bootstrap.__code__  # type: ignore[attr-defined]
_program_exit: ProgramExit | None = None
_seers: set[int] = set()
"""ids of the users that need the exit code."""
_sys_exit = sys.exit
_lock = threading.Lock()


def program_exit() -> ProgramExit | None:
    """Return the SystemExit that ended the main thread, raised by `sys.exit` or bare; None without one."""
    return _program_exit


def how_it_ended() -> str:
    """Describe how the main thread has ended, as part of a sentence."""
    if _program_exit is not None:
        return f"its program {_program_exit}"
    error = uncaught()
    return PROGRAM_ENDED if error is None else f"its program was ended by {type(error).__name__}"


def see_exits(user: object) -> None:
    """Start to record the SystemExit that ends the program (`program_exit`), until `forget_exits` of the
    user."""
    with _lock, suppress(Exception):  # another interpreter: exit codes are not known there
        if not _seers:
            _put(property(_seen, _CODE.__set__))
            if sys.version_info < (3, 12):  # `sys.exit` creates no exception object there, only a code
                sys.exit = _exit
        _seers.add(id(user))


def forget_exits(user: object) -> None:
    """Put the built-in type back, after the last user."""
    with _lock, suppress(Exception):
        if _seers == {id(user)}:
            _put(_CODE)
            if sys.exit is _exit:
                sys.exit = _sys_exit
        _seers.discard(id(user))


def _put(code: object) -> None:
    """Make this the attribute `SystemExit.code`. A built-in type takes no attributes, so its dict is changed
    directly, and the interpreter's caches of it are invalidated."""
    # `__dict__` of a type is a read-only view; the dict behind it is what the view refers to.
    gc.get_referents(SystemExit.__dict__)[0]["code"] = code
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))


def _seen(error: SystemExit) -> object:
    """Return the code, and record it if the interpreter reads it to end the program."""
    global _program_exit
    code: object = _CODE.__get__(error)
    # It reads from C: there is no frame around this one, and in a child of multiprocessing that of its
    # process. Code of the program that reads `error.code` has another one.
    reader = sys._getframe().f_back
    reads_last = reader is None or reader.f_code is _BOOTSTRAP
    if reads_last and threading.current_thread() is threading.main_thread():
        with suppress(Exception):  # no code of the program is left that could handle an error
            note_code(code)
            _program_exit = ProgramExit(code, calls_of_traceback(_flying_traceback() or error.__traceback__))
    return code


def _exit(code: object = None, /) -> NoReturn:
    """Raise SystemExit, as `sys.exit` does."""
    raise SystemExit(code)


def _flying_traceback() -> TracebackType | None:
    """Find the traceback of the exception that ends the main thread: before Python 3.12 the exception itself
    has at most a part of it. Its outermost frame was added a moment ago, so it is the youngest one."""
    if sys.version_info >= (3, 12):
        return None
    for thing in reversed([*gc.get_objects(generation=1), *gc.get_objects(generation=0)]):
        if type(thing) is TracebackType and thing.tb_frame.f_back is None:
            return thing
    return None
