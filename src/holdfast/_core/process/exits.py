"""Holdfast's exit handlers: ordered steps at the end of this process, and the exit code if one fails.

An `atexit` handler can change the exit code of a process only by `os._exit`, which skips all handlers that
were registered before it: log files, experiment trackers, children of multiprocessing. So Holdfast has one
handler, which runs first, whenever it was registered. If nothing failed, it returns, and the interpreter ends
as usual. If a step reports a failure (such as a failed save that the program never checked), it runs all
other handlers, flushes open files, writes the error as the last thing on the terminal, and ends the process
with an exit code other than 0.

The steps are registered by other modules, such as saves and sessions. They belong to the process that
registered them; a fork inherits none.
"""

from __future__ import annotations

import atexit
import gc
import io
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple, NoReturn

with suppress(RuntimeError):  # the main thread has ended already
    # Both wait for their workers once the main thread has ended. The last registered runs first: so import
    # them before this module registers, and they wait after its listeners.
    import concurrent.futures.process
    import concurrent.futures.thread  # noqa: F401

_RUN_HANDLERS = ("multiprocessing.popen_fork", "multiprocessing.forkserver")
ENDED_BY_INTERRUPT = 130
"""Exit code of a process whose last wait was interrupted by Ctrl-C, as in shells."""


class Failure(NamedTuple):
    """Why this process must not end with exit code 0."""

    message: str
    """Written to stderr last; "" if it has already been printed."""
    code: int = 1


class ProgramFailed(Exception):
    """Stands for an already handled error of a multiprocessing child, of which only the exit code is
    known."""

    def __init__(self, code: int) -> None:
        super().__init__(f"ended with exit code {code}")
        self.code = code


class Stage(IntEnum):
    """The order of steps at the end of a process."""

    SAVES = 0
    SESSIONS = 1
    THREADS = 2


Step = Callable[[], Failure | None]
_UNKNOWN = object()


class _Ending:
    """The exit steps of one process, and their progress."""

    def __init__(self) -> None:
        self.steps: dict[Step, Stage] = {}
        self.listeners: list[Callable[[], None]] = []
        self.code: object = _UNKNOWN
        """The code of the SystemExit that ends the program, if it was noted (`note_code`)."""
        self.error: BaseException | None = None
        """In a multiprocessing child: the exception that ended its program, also an unsuccessful SystemExit,
        or a ProgramFailed."""
        self.is_child = False
        """Whether multiprocessing runs the steps."""
        self.ended = self.goes_first = self.working = self.over = self.hurries = False
        self.failures: list[Failure] = []
        """Failures of the steps, and later ones from `fail_late`."""

    def ends_now(self) -> bool:
        """Return whether the process should end without finalising the interpreter."""
        known = self.code is not _UNKNOWN or uncaught() is not None
        return bool(self.failures) or (self.hurries and known)

    def run(self) -> None:
        """Run all steps by stage, last registered first, and collect failures."""
        self.working = True
        # sorted() is stable, so within a stage the last registered stays first.
        last_first = reversed(self.steps)
        for step in sorted(last_first, key=self.steps.__getitem__):
            try:
                failure = step()
            except BaseException as error:
                failure = Failure("".join(traceback.format_exception(error)).rstrip())
            if failure is not None:
                self.failures.append(failure)
        self.steps.clear()
        self.working, self.over = False, True


_ending = _Ending()
_hooked = False
"""Whether the handlers are registered with the interpreter. A fork inherits the registration."""
_lock = threading.Lock()


def at_exit(stage: Stage, step: Step) -> None:
    """Run `step` once at the end of this process, in its stage. A Failure from it fails the process."""
    _hook()
    _ending.steps.setdefault(step, stage)


def not_at_exit(step: Step) -> None:
    """Remove a step that `at_exit` registered."""
    _ending.steps.pop(step, None)


def on_main_thread_end(listener: Callable[[], None]) -> None:
    """Call `listener` on the main thread of this process once it has ended, before it waits for anything."""
    _hook()
    _ending.listeners.append(listener)


def is_working() -> bool:
    """Return whether the steps of `at_exit` are running; they have deadlines of their own."""
    return _ending.working


def is_over() -> bool:
    """Return whether the steps of `at_exit` are done. Nothing waits for work that starts later."""
    return _ending.over


def fail_late(failure: Failure) -> None:
    """Fail the process after the `atexit` handlers that were registered later than Holdfast's first one."""
    _ending.failures.append(failure)


def hurry() -> None:
    """Skip the finalisation of the interpreter when this process ends: with torch loaded it takes seconds,
    while other ranks wait in collectives until its sockets are closed. All `atexit` handlers still run. It
    applies only if the exit code is known, from an exception or from a SystemExit passed to `note_code`."""
    _hook()
    _ending.hurries = True


def say(text: str) -> None:
    """Write a line to stderr, unless the program has closed it."""
    with suppress(Exception):
        print(text, file=sys.stderr, flush=True)


def note_code(code: object) -> None:
    """Record the code of the SystemExit that ends the program: a number, a message, or None."""
    _ending.code = code


def uncaught() -> BaseException | None:
    """Return the uncaught exception that ends this process, or None. In the main process, a SystemExit does
    not count."""
    error = _ending.error or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None


def error_of_child() -> BaseException | None:
    """Return the exception that ends a multiprocessing child, which has no excepthook."""
    return _ending.error


# -- what the interpreter calls ------------------------------------------------------------------


def _hook() -> None:
    global _hooked
    with _lock:
        if multiprocessing.parent_process() is not None and not _ending.is_child:
            _ending.is_child = True
            # A child usually ends by os._exit without `atexit` handlers. This priority makes it the first
            # finalizer.
            multiprocessing.util.Finalize(None, _at_end_of_child, exitpriority=1000)
        if _hooked:
            return
        _hooked = True
        # atexit calls the last registered first, so `_at_last` comes after `_at_exit`, and after all that is
        # registered from now on.
        atexit.register(_at_last)
        atexit.register(_at_exit)
        # A private name of CPython, by which concurrent.futures ends its workers. Functions registered by it
        # run before threads are joined. Without it the end of the main thread is seen only after that.
        before_joins = getattr(threading, "_register_atexit", None)
        if before_joins is not None:
            with suppress(RuntimeError):  # the main thread has ended already
                before_joins(_main_thread_ended)


def _main_thread_ended() -> None:
    """Record that the main thread has ended and now joins the other threads."""
    _ending.goes_first = True
    # Registered again it is the last one, which atexit calls first: before handlers that were registered
    # after Holdfast's.
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    _tell()


def _tell() -> None:
    if not _ending.ended:
        _ending.ended = True
        for listener in _ending.listeners:
            with suppress(Exception):  # an exception must not prevent the joins
                listener()


def _at_end_of_child() -> None:
    """Run as a finalizer of a multiprocessing child. Since Python 3.13, `_at_exit` has run before; in earlier
    versions, multiprocessing handles the program's exception only after this."""
    error = sys.exc_info()[1]
    if not isinstance(error, SystemExit) or error.code:
        _ending.error = _ending.error or error
    _tell()
    _ending.run()
    if _ending.failures and error is None:
        _end()


def _note_code_of_child() -> None:
    """Record how a multiprocessing child has ended. Since Python 3.13 it runs `atexit` handlers, after
    handling its program's exception; the exit code is then only in a local variable of a calling frame."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") in _RUN_HANDLERS and isinstance(
            code := frame.f_locals.get("code"), int
        ):
            _ending.code = code
            _ending.error = ProgramFailed(code) if code else None
            return


def _at_exit() -> None:
    if _ending.is_child:
        _note_code_of_child()
    _tell()
    _ending.run()
    if _ending.goes_first and _ending.ends_now():
        # os._exit skips the remaining handlers, so run them first, except this one.
        atexit.unregister(_at_exit)
        atexit.unregister(_at_last)
        with suppress(BaseException):
            atexit._run_exitfuncs()
        _end()


def _at_last() -> None:
    """Run after the handlers that were registered since Holdfast was first used."""
    if _ending.ends_now():
        _end()


def _end() -> NoReturn:
    """End this process without finalising the interpreter."""
    _flush_files()
    for failure in filter(lambda failure: failure.message, _ending.failures):
        say(failure.message)
    if isinstance(uncaught(), KeyboardInterrupt):  # end as the interpreter does then
        # By the signal, not by a code, so that a shell which runs a script recognises Ctrl-C and stops.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    # The system keeps eight bits of a code, so 256 would be read as success. A message counts as 1, as in
    # Python.
    code = None if _ending.code is _UNKNOWN else _ending.code
    asked = code & 0xFF if isinstance(code, int) else int(code is not None)
    os._exit(asked or next((failure.code for failure in _ending.failures), int(uncaught() is not None)))


def _flush_files() -> None:
    """Flush all open files, as the interpreter does at its end."""
    for candidate in gc.get_objects():
        # By type(): isinstance also reads `__class__`, which in a proxy object may run any code.
        if issubclass(type(candidate), io.IOBase):
            with suppress(Exception):
                candidate.flush()


def _forget() -> None:
    """Reset in a fork, which has no exit steps."""
    global _ending, _lock
    _ending, _lock = _Ending(), threading.Lock()


os.register_at_fork(after_in_child=_forget)
