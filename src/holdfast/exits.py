"""The end of this process: what is done before the interpreter ends, in which order, and the exit code.

An `atexit` handler can change the exit code of a process only by `os._exit`, which skips all handlers that
were registered before it: log files, experiment trackers, children of multiprocessing. So Holdfast has one
handler, which runs first, whenever it was registered. If nothing failed, it returns, and the interpreter ends
as usual. If something failed that nobody has asked about, it runs all other handlers, flushes open files,
writes the error as the last thing on the terminal, and ends the process with an exit code other than 0: the
code that was given to `sys.exit`, if that was not 0; by SIGINT if Ctrl-C has ended the program.

All of it belongs to the process that asked for it; a fork inherits none of it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from types import MemberDescriptorType, TracebackType
from typing import NamedTuple, NoReturn

from holdfast.stacks import calls_of_traceback

with suppress(RuntimeError):  # the main thread has ended already
    # Both wait for their workers once the main thread has ended. The last registered runs first: so import
    # them before this module registers, and they wait after its listeners.
    import concurrent.futures.process
    import concurrent.futures.thread  # noqa: F401

ENDED_BY_INTERRUPT = 130
"""Exit code of a process whose last wait was ended by Ctrl-C, as shells have it."""


class Failure(NamedTuple):
    """Why this process must not end with exit code 0."""

    message: str
    """Written to stderr last; "" if the terminal has it already."""
    code: int = 1


class Given(NamedTuple):
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


class Stage(IntEnum):
    """The order of steps at the end of a process."""

    SAVES = 0
    SESSIONS = 1
    FOLDERS = 2
    THREADS = 3


Step = Callable[[], Failure | None]


class _Ending:
    """The steps that one process runs at its end, and how far it is."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.steps: dict[Step, Stage] = {}
        self.listeners: list[Callable[[], None]] = []
        self.given: Given | None = None
        """The SystemExit that ends the main thread."""
        self.ended = self.goes_first = self.working = self.over = False
        self.failures: list[Failure] = []
        """What failed in the steps, and after them in other `atexit` handlers."""
        self.last: dict[Callable[[], bool], None] = {}
        """Functions that say whether the interpreter can be finalised."""
        self.hurries = False

    def run(self) -> list[Failure]:
        """Run all steps, by stage, the last registered first; return what failed."""
        self.working = True
        # sorted() is stable, so within a stage the last registered stays first.
        last_first = reversed(self.steps)
        results = [_failure_of(step) for step in sorted(last_first, key=self.steps.__getitem__)]
        self.steps.clear()
        self.working, self.over = False, True
        return [failure for failure in results if failure is not None]


_known: _Ending | None = None
_hooked = False
"""Are the handlers registered with the interpreter? A fork inherits them from its parent."""
_lock = threading.Lock()


def at_exit(stage: Stage, step: Step) -> None:
    """Run `step` once at the end of this process, in its stage. A Failure from it fails the process."""
    _this_process().steps.setdefault(step, stage)


def not_at_exit(step: Step) -> None:
    """Remove a step that `at_exit` registered."""
    _this_process().steps.pop(step, None)


def on_main_thread_end(listener: Callable[[], None]) -> None:
    """Call `listener` on the main thread of this process once it has ended, before it waits for anything."""
    _this_process().listeners.append(listener)


def is_working() -> bool:
    """Return whether the steps of `at_exit` are running; they have deadlines of their own."""
    ending = _existing()
    return ending is not None and ending.working


def is_over() -> bool:
    """Return whether the steps of `at_exit` are done. Nothing waits for what is begun after that."""
    ending = _existing()
    return ending is not None and ending.over


def fail_late(failure: Failure) -> None:
    """Fail the process after all `atexit` handlers that were registered after our first one."""
    _this_process().failures.append(failure)


def at_last(settled: Callable[[], bool]) -> None:
    """Ask `settled`, after all `atexit` handlers that were registered since our first one, whether the
    interpreter can be finalised. If not, the process ends at once, with the exit code that it would have."""
    _this_process().last.setdefault(settled)


def hurry() -> None:
    """End this process later without finalising the interpreter, which takes seconds where torch is loaded:
    other ranks wait in collectives until its sockets are closed. All `atexit` handlers run, and the exit code
    stays what it would be."""
    _this_process().hurries = True


def given() -> Given | None:
    """Return the SystemExit that ended the main thread, raised by `sys.exit` or bare; None without one."""
    return _this_process().given


def has_ended() -> str:
    """Say how the main thread has ended, as a part of a sentence; "" while it runs."""
    ending = _existing()
    if ending is None or not (ending.given or ending.ended):
        return ""
    if ending.given is not None:
        return f"its program {ending.given}"
    error = uncaught()
    return "its program has ended" if error is None else f"its program was ended by {type(error).__name__}"


def uncaught() -> BaseException | None:
    """Return the exception that ends this process, or None."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None


# -- what the interpreter calls ------------------------------------------------------------------


def _existing() -> _Ending | None:
    """Return this process's ending, if it has one: that of a fork's parent is not the fork's."""
    ending = _known
    return ending if ending is not None and ending.pid == os.getpid() else None


def _this_process() -> _Ending:
    global _known, _hooked
    with _lock:
        # A fork gets an ending of its own, without the steps and listeners of its parent.
        if _known is None or _known.pid != os.getpid():
            _known = _Ending()
        if not _hooked:
            _hooked = True
            # atexit calls the last registered first, so `_at_last` comes after `_at_exit`, and after all that
            # is registered from now on.
            atexit.register(_at_last)
            atexit.register(_at_exit)
            # A private name of CPython, by which concurrent.futures ends its workers. Functions registered by
            # it run before threads are joined. Without it the end of the main thread is seen only after that.
            before_joins = getattr(threading, "_register_atexit", None)
            if before_joins is not None:
                with suppress(RuntimeError):  # the main thread has ended already
                    before_joins(_main_thread_ended)
            with suppress(Exception):  # another interpreter: exit codes are not known there
                _see_codes()
    return _known


class _SeenCode:
    """Stands for the attribute `SystemExit.code`, and notes when the interpreter itself reads it."""

    def __init__(self, member: MemberDescriptorType) -> None:
        self._member = member

    def __get__(self, error: SystemExit | None, owner: type | None = None) -> object:
        if error is None:
            return self
        # The interpreter reads the code of the exception that ends the program, from C: there is no frame
        # around this one. Code of the program that reads `error.code` has one.
        code: object = self._member.__get__(error, owner)
        if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
            with suppress(Exception):  # no code of the program is left that could handle an error
                _note(code, error.__traceback__)
        return code

    def __set__(self, error: SystemExit, code: object) -> None:
        self._member.__set__(error, code)

    def __delete__(self, error: SystemExit) -> None:
        self._member.__delete__(error)


def _see_codes() -> None:
    """Put `_SeenCode` into SystemExit. A built-in type takes no attributes, so its dict is changed directly,
    and the interpreter's caches of it are invalidated."""
    # `__dict__` of a type is a read-only view; the dict behind it is what the view refers to.
    members = gc.get_referents(SystemExit.__dict__)[0]
    members["code"] = _SeenCode(members["code"])
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))
    if sys.version_info < (3, 12):  # `sys.exit` creates no exception object there, only a code
        sys.exit = _exit


def _exit(code: object = None, /) -> NoReturn:
    """Raise SystemExit, as `sys.exit` does."""
    raise SystemExit(code)


def _note(code: object, trace: TracebackType | None) -> None:
    ending = _existing()
    if ending is not None:
        ending.given = Given(code, calls_of_traceback(_flying_traceback() or trace))


def _flying_traceback() -> TracebackType | None:
    """Find the traceback of the exception that ends the main thread: before Python 3.12 the exception itself
    has at most a part of it. It begins at an outermost frame, and only the interpreter refers to it."""
    if sys.version_info >= (3, 12):
        return None
    tracebacks: dict[int, TracebackType] = {}
    had: set[int] = set()
    for thing in gc.get_objects():
        if type(thing) is TracebackType:
            tracebacks[id(thing)] = thing
            had.add(id(thing.tb_next))
        # By type(): isinstance also reads `__class__`, which in a proxy object may run any code.
        elif issubclass(type(thing), BaseException):
            had.add(id(thing.__traceback__))
    return next(
        (trace for key, trace in tracebacks.items() if key not in had and trace.tb_frame.f_back is None), None
    )


def _main_thread_ended() -> None:
    """Note that the main thread has ended, and waits for the other threads now."""
    ending = _existing()
    if ending is None or ending.ended:
        return
    ending.ended = ending.goes_first = True
    # Registered again it is the last one, which atexit calls first: before handlers that were registered
    # after Holdfast's.
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    _tell(ending)


def _tell(ending: _Ending) -> None:
    ending.ended = True
    for listener in ending.listeners:
        with suppress(Exception):  # threads must be joined, whatever it raises
            listener()


def _at_exit() -> None:
    ending = _existing()
    if ending is None:
        return
    if not ending.ended:
        _tell(ending)
    ending.failures += ending.run()
    if not ending.failures and not ending.hurries:
        return
    if ending.goes_first:
        # os._exit skips all handlers that are left, so run them first, except this one.
        atexit.unregister(_at_exit)
        atexit.unregister(_at_last)
        with suppress(BaseException):
            atexit._run_exitfuncs()
    _end(ending)


def _at_last() -> None:
    """Run after the handlers that were registered since Holdfast was first used."""
    ending = _existing()
    if ending is None:
        return
    settled = [is_settled() for is_settled in ending.last]
    if ending.failures or ending.hurries or not all(settled):
        _end(ending)


def _end(ending: _Ending) -> NoReturn:
    """End this process without finalising the interpreter."""
    _flush_files()
    _say(ending.failures)
    if isinstance(uncaught(), KeyboardInterrupt):  # end as the interpreter does then
        # By the signal, not by a code: a shell that runs a script sees by it that it was Ctrl-C, and stops.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(_exit_code(ending.given, ending.failures))


def _failure_of(step: Step) -> Failure | None:
    try:
        return step()
    except BaseException as error:
        return Failure("".join(traceback.format_exception(error)).rstrip())


def _exit_code(given: Given | None, failures: list[Failure]) -> int:
    """Return the code of the SystemExit; if that means success, the code of a failure."""
    code = given.code if given is not None else None
    # The system keeps eight bits of it, so 256 would be read as success. A message as code counts as 1, as
    # in Python.
    asked = code & 0xFF if isinstance(code, int) else int(code is not None)
    return asked or next((failure.code for failure in failures), int(uncaught() is not None))


def _flush_files() -> None:
    """Flush all open files, as the interpreter does at its end."""
    for candidate in gc.get_objects():
        if issubclass(type(candidate), io.IOBase):
            with suppress(Exception):
                candidate.flush()


def _say(failures: list[Failure]) -> None:
    for failure in failures:
        if failure.message:
            with suppress(Exception):
                print(failure.message, file=sys.stderr, flush=True)
