"""The end of this process: what is done before the interpreter ends, in which order, and the exit code.

An `atexit` handler can change the exit code of a process only by `os._exit`, which skips all handlers that
were registered before it:
log files, experiment trackers, children of multiprocessing. So Holdfast has one handler. It goes first,
whenever it was registered. If nothing failed it returns, and the interpreter ends as ever. If something
failed that nobody has asked about, it runs all other handlers, flushes open files, writes the error as the
last thing on the terminal, and ends the process with an exit code other than 0: the one that was given to
`sys.exit`, if it was such a one; by SIGINT if Ctrl-C has ended the program.

All of it belongs to the process that asked for it; a fork of that process has none of it.
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
    # Both wait for workers once the main thread has ended, the last imported first: after us.
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
    """How the program has ended itself: by a SystemExit."""

    code: object
    """A number, a message, or None; 0 and None are a good end."""
    calls: str
    """The last calls before it was raised; "" if they are not known."""

    def __str__(self) -> str:
        where = f" at {self.calls}" if self.calls else ""
        if self.code is None or isinstance(self.code, int):
            return f"exited with code {int(self.code or 0)} (SystemExit){where}"
        return f"exited with {str(self.code)[:500]!r} (SystemExit){where}"


class Stage(IntEnum):
    """What comes first at the end of a process."""

    SAVES = 0
    SESSIONS = 1
    FOLDERS = 2
    THREADS = 3


Step = Callable[[], Failure | None]


class _Ending:
    """What one process does at its end."""

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
        """What says whether the interpreter can be finalised."""
        self.hurries = False

    def run(self) -> list[Failure]:
        """All steps, by stage, the last registered first."""
        self.working = True
        # sorted() is stable, so within a stage the last registered stays first.
        last_first = reversed(self.steps)
        results = [_failure_of(step) for step in sorted(last_first, key=self.steps.__getitem__)]
        self.steps.clear()
        self.working, self.over = False, True
        return [failure for failure in results if failure is not None]


_known: _Ending | None = None
_hooked = False
"""Has the interpreter been told? A fork's has, as its parent's has."""
_lock = threading.Lock()


def at_exit(stage: Stage, step: Step) -> None:
    """Have `step` run at the end of this process, once, in its stage; what it returns fails the process."""
    _this_process().steps.setdefault(step, stage)


def not_at_exit(step: Step) -> None:
    """Take `step` back."""
    _this_process().steps.pop(step, None)


def on_main_thread_end(listener: Callable[[], None]) -> None:
    """Call `listener` once the main thread of this process has ended, on that thread, before anything is
    waited for."""
    _this_process().listeners.append(listener)


def is_working() -> bool:
    """Are the steps of `at_exit` being done, which have deadlines of their own?"""
    return _known is not None and _known.pid == os.getpid() and _known.working


def is_over() -> bool:
    """Are the steps of `at_exit` done? What is begun now, by an `atexit` handler, nothing waits for."""
    return _known is not None and _known.pid == os.getpid() and _known.over


def fail_late(failure: Failure) -> None:
    """Fail the process once all `atexit` handlers are through that were registered after our first one."""
    _this_process().failures.append(failure)


def at_last(settled: Callable[[], bool]) -> None:
    """Have `settled` asked after all `atexit` handlers that were registered since our first one: can the
    interpreter be finalised? If not, the process ends at once, with the exit code that it would have."""
    _this_process().last.setdefault(settled)


def hurry() -> None:
    """Have this process end without the interpreter's own end, which takes seconds where torch is loaded:
    other ranks wait in collectives until its sockets are closed. All `atexit` handlers run, and it has the
    exit code that it would have."""
    _this_process().hurries = True


def given() -> Given | None:
    """The SystemExit that ended the main thread, raised by `sys.exit` or bare; None if there was none."""
    return _this_process().given


def has_ended() -> str:
    """How the main thread has ended, as a part of a sentence; "" while it goes on."""
    if _known is None or _known.pid != os.getpid() or not (_known.given or _known.ended):
        return ""
    if _known.given is not None:
        return f"its program {_known.given}"
    error = uncaught()
    return "its program has ended" if error is None else f"its program was ended by {type(error).__name__}"


def uncaught() -> BaseException | None:
    """The exception that ends this process, if one does."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None


# -- what the interpreter calls ------------------------------------------------------------------


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
            # A private name of CPython, by which concurrent.futures ends its workers. What is registered
            # there is called before threads are joined. Without it the end of the main thread is seen
            # only once they are.
            before_joins = getattr(threading, "_register_atexit", None)
            if before_joins is not None:
                with suppress(RuntimeError):  # the main thread has ended already
                    before_joins(_main_thread_ended)
            with suppress(Exception):  # another interpreter: exit codes are not known there
                _see_codes()
    return _known


class _SeenCode:
    """`SystemExit.code`, with an eye on who reads it."""

    def __init__(self, member: MemberDescriptorType) -> None:
        self._member = member

    def __get__(self, error: SystemExit | None, owner: type | None = None) -> object:
        if error is None:
            return self
        # The interpreter reads the code of the exception that ends the program, from C: there is no frame
        # around this one. Code of the program that reads `error.code` has one.
        code: object = self._member.__get__(error, owner)
        if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
            with suppress(Exception):  # the interpreter reads it, after all code of the program
                _note(code, error.__traceback__)
        return code

    def __set__(self, error: SystemExit, code: object) -> None:
        self._member.__set__(error, code)

    def __delete__(self, error: SystemExit) -> None:
        self._member.__delete__(error)


def _see_codes() -> None:
    """Put `_SeenCode` into SystemExit. A type of the interpreter takes no attributes, so its table of them is
    changed itself, and the caches over it are told."""
    # `__dict__` of a type is a view that can't be written to; the dict behind it is what the view refers to.
    members = gc.get_referents(SystemExit.__dict__)[0]
    members["code"] = _SeenCode(members["code"])
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))
    if sys.version_info < (3, 12):  # there the interpreter makes no exception of what `sys.exit` was given
        sys.exit = _exit


def _exit(code: object = None, /) -> NoReturn:
    """`sys.exit`."""
    raise SystemExit(code)


def _note(code: object, trace: TracebackType | None) -> None:
    if _known is not None and _known.pid == os.getpid():
        _known.given = Given(code, calls_of_traceback(_flying_traceback() or trace))


def _flying_traceback() -> TracebackType | None:
    """That of the exception which ends the main thread: before Python 3.12 the exception itself has at most a
    part of it. It is the one that begins at an outermost frame, and that nothing has but the interpreter."""
    if sys.version_info >= (3, 12):
        return None
    tracebacks: dict[int, TracebackType] = {}
    had: set[int] = set()
    for thing in gc.get_objects():
        if type(thing) is TracebackType:
            tracebacks[id(thing)] = thing
            had.add(id(thing.tb_next))
        # By type(): isinstance also asks an object's `__class__`, which in a proxy runs somebody's code.
        elif issubclass(type(thing), BaseException):
            had.add(id(thing.__traceback__))
    return next(
        (trace for key, trace in tracebacks.items() if key not in had and trace.tb_frame.f_back is None), None
    )


def _main_thread_ended() -> None:
    """The main thread is through, and waits for the others now."""
    ending = _known
    if ending is None or ending.pid != os.getpid() or ending.ended:
        return
    ending.ended = ending.goes_first = True
    # Registered anew it is the last one, which atexit calls first: before handlers that were
    # registered after Holdfast's.
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    _tell(ending)


def _tell(ending: _Ending) -> None:
    ending.ended = True
    for listener in ending.listeners:
        with suppress(Exception):  # threads are to be joined whatever it met
            listener()


def _at_exit() -> None:
    ending = _known
    if ending is None or ending.pid != os.getpid():
        return
    if not ending.ended:
        _tell(ending)
    ending.failures += ending.run()
    if not ending.failures and not ending.hurries:
        return
    if ending.goes_first:
        # os._exit skips all handlers that are left, so they are run first, but for this one.
        atexit.unregister(_at_exit)
        atexit.unregister(_at_last)
        with suppress(BaseException):
            atexit._run_exitfuncs()
    _end(ending)


def _at_last() -> None:
    """After the handlers that were registered since Holdfast was first used."""
    ending = _known
    if ending is None or ending.pid != os.getpid():
        return
    settled = [is_settled() for is_settled in ending.last]
    if ending.failures or ending.hurries or not all(settled):
        _end(ending)


def _end(ending: _Ending) -> NoReturn:
    """End this process without the interpreter's own end."""
    _flush_files()
    _say(ending.failures)
    if isinstance(uncaught(), KeyboardInterrupt):  # it is to end as the interpreter ends then
        # By the signal, not by a code: so a shell that runs a script sees that it was Ctrl-C, and stops, too.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(_exit_code(ending.given, ending.failures))


def _failure_of(step: Step) -> Failure | None:
    try:
        return step()
    except BaseException as error:
        return Failure("".join(traceback.format_exception(error)).rstrip())


def _exit_code(given: Given | None, failures: list[Failure]) -> int:
    """The code of a SystemExit stays, unless it says that all is well."""
    code = given.code if given is not None else None
    # The system keeps eight bits of it, so 256 would be read as success. A message as code is
    # 1, as Python has it.
    asked = code & 0xFF if isinstance(code, int) else int(code is not None)
    return asked or next((failure.code for failure in failures), int(uncaught() is not None))


def _flush_files() -> None:
    """Write what open files hold back, as the interpreter does at its end."""
    for candidate in gc.get_objects():
        if issubclass(type(candidate), io.IOBase):
            with suppress(Exception):
                candidate.flush()


def _say(failures: list[Failure]) -> None:
    for failure in failures:
        if failure.message:
            with suppress(Exception):
                print(failure.message, file=sys.stderr, flush=True)
