"""Programs that begin and end as `python -c` has them, with torch in their memory from their first line on."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd  # type: ignore[attr-defined]
from typing import Any, NoReturn

from tests.support.processes import PRELOAD


class ReachedItsEnd(SystemExit):
    """Ends a process whose program has come to its last line. Holdfast, which sees by its attribute who has called
    `sys.exit`, takes it for no call of that."""

    code = 0


class Interpreter(ForkServerProcess):
    """A fork of the tests' forkserver that is, for what runs in it, no child of multiprocessing: it ends by the
    interpreter's own finalisation."""

    def start(self) -> None:
        multiprocessing.set_forkserver_preload([*PRELOAD, "tests.support.frozen"])
        super().start()

    # It does nothing of what `BaseProcess._bootstrap` does, by which a process becomes a child of multiprocessing.
    def _bootstrap(self, parent_sentinel: Any = None) -> int:
        end: BaseException = ReachedItsEnd()
        try:
            self.become()
        except BaseException as error:
            end = self.raised(error)
        _leave_by_the_main_module(end)
        return 1

    def become(self) -> None:
        """Run the program."""
        raise NotImplementedError

    def raised(self, error: BaseException) -> BaseException:
        """Return what the program has raised as `python` would show it."""
        return error


def _leave_by_the_main_module(end: BaseException) -> None:
    """Have the forkserver's child, which would call os._exit, leave its main module by an exception instead."""
    usual = os._exit, atexit._run_exitfuncs

    def leave(*_: object) -> NoReturn:
        os._exit, atexit._run_exitfuncs = usual
        raise end

    os._exit = atexit._run_exitfuncs = leave


class _Code(Interpreter):
    def __init__(self, words: tuple[str, ...], files: list[int]) -> None:
        super().__init__()
        self._words, self._files = words, files

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": [DupFd(file) for file in self._files]}

    def become(self) -> None:
        for number, file in enumerate(self._files):
            os.dup2(file.detach(), number)  # type: ignore[attr-defined]
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (lives as long as the process)
        code, *args = self._words
        sys.argv = ["-c", *args]
        main = sys.modules["__main__"].__dict__
        main["__name__"] = "__main__"
        exec(code, main)


class Program:
    """`python -c CODE ARGS...`, with a pipe to its stdin and one from its stdout; what it writes to stderr is shown."""

    def __init__(self, *words: str) -> None:
        (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
        self._process = _Code(words, [theirs_in, theirs_out])
        self._process.start()
        os.close(theirs_in)
        os.close(theirs_out)
        self.stdin, self.stdout = os.fdopen(ours_in, "w"), os.fdopen(ours_out)

    @property
    def pid(self) -> int:
        return int(self._process.pid or 0)

    def wait(self, seconds: float) -> int:
        """Return its exit code."""
        self._process.join(seconds)
        assert self._process.exitcode is not None, f"process {self.pid} was still there after {seconds} s"
        self.stdin.close()
        self.stdout.close()
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self.wait(60)
