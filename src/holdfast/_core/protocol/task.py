"""A collective task: work that all ranks do together, on a thread, under a deadline, with published
progress."""

from __future__ import annotations

import threading
from contextlib import suppress

from holdfast._core.base.stacks import calls_of_frame, frame_of
from holdfast._core.base.threads import start_thread
from holdfast._core.base.values import Message
from holdfast._core.process.exits import Failure, Stage, at_exit
from holdfast._core.protocol.call import Call
from holdfast._core.protocol.core import task_steps
from holdfast._core.protocol.operation import Operation
from holdfast._core.protocol.phases import TASK_TRANSITIONS
from holdfast._core.roster.lost import Seen
from holdfast.errors import HoldfastError

_started: list[tuple[threading.Thread, list[tuple[Message | None, Exception | None]]]] = []
"""Running threads of tasks, each with what it leaves when its work is done."""


def _fail_with_stuck_threads() -> Failure | None:
    """End the process with a plain exit code while a thread is in a collective.

    Otherwise torch would abort the process when the interpreter ends. A thread whose work is done may still
    be alive on a busy machine: it is in no collective.
    """
    return Failure("") if any(thread.is_alive() and not done for thread, done in _started) else None


class CollectiveTask:
    """A task that all ranks do together in one call. Subclasses define the work.

    `execute` runs on a thread of its own, because it may never return; the call then ends without it.
    """

    kind = "groups"

    def __init__(self, title: str, place: str, call: Call) -> None:
        self.operation = Operation(self.kind, title, place, call, TASK_TRANSITIONS)
        self.operation.presence.more = self._more
        self.operation.context.suspicion = self.suspicion
        self.operation.context.hint = "Look at that rank's log, or at its stack (py-spy dump --pid)."
        self.roster = call.roster
        self.collect_error: HoldfastError | None = None
        """An error that prevents this rank from doing its part; sent to the others."""
        self._doing = ""
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._ended: list[tuple[Message | None, Exception | None]] = []

    def run(self) -> Message:
        """Run the task. Raises the error that all ranks raise."""
        context = self.operation.context
        context.explain = self._explain
        try:
            steps = task_steps(context, self)
            result: Message = self.operation.run(steps, self.collect_error)
            return result
        finally:
            # A reference cycle would keep this task and its groups until the next garbage collection.
            context.explain, context.suspicion = None, lambda seen: 0
            _started[:] = [one for one in _started if one[0].is_alive()]
            self.operation.presence.more = dict  # no reference cycle: groups go when their last user does

    # -- for subclasses to override ---------------------------------------------------------------

    def contribute(self) -> Message:
        return {}

    def decide(self, contributions: dict[int, Message]) -> dict[int, Message]:
        return {rank: {} for rank in contributions}

    def execute(self, answer: Message) -> Message:
        """Do this rank's part, on its own thread. By default nothing: the ranks only meet."""
        return {}

    def finish(self, reports: dict[int, Message]) -> Message:
        return {}

    def better(self, error: HoldfastError) -> HoldfastError | None:
        """Return a more informative error in place of one of this rank, for example from the presence of
        other ranks; None if there is none."""
        return None

    def suspicion(self, seen: Seen) -> int:
        """Return a sort key: lower for ranks that more likely delay the others."""
        return 0

    def now(self) -> Message:
        """Return machine-readable values for the presence messages."""
        return {}

    # -- called by the protocol -------------------------------------------------------------------

    def doing(self, what: str) -> None:
        """Record the current activity of this rank; counts as progress."""
        self._doing = what
        self.operation.tick()

    def phrase(self) -> str:
        """Return the current activity as text."""
        return self._doing

    def begin(self, answer: Message) -> None:
        def work() -> None:
            try:
                self._ended.append((self.execute(answer), None))
            except Exception as error:
                self._ended.append((None, error))
            self._over.set()

        # It may be in a collective that never returns: the call ends without it, by its deadline.
        self._thread = start_thread(work, "holdfast-groups", self.roster.rank)
        at_exit(Stage.THREADS, _fail_with_stuck_threads)
        _started.append((self._thread, self._ended))

    def _explain(self, error: HoldfastError) -> HoldfastError:
        if error.rank not in (None, self.roster.rank) and not error.missing:
            return error  # another rank's
        with suppress(Exception):  # a failure to explain an error must not replace it
            return self.better(error) or error
        return error

    def wait(self, seconds: float) -> None:
        self._over.wait(seconds)

    def poll(self) -> Message | None:
        if not self._ended:
            return None
        report, error = self._ended[0]
        if error is not None:
            raise error
        return report

    def _more(self) -> Message:
        doing = f"{self.phrase()}, at {self._stack()}" if self._doing and not self._ended else ""
        return {**self.now(), "doing": doing}

    def _stack(self) -> str:
        """Return the stack of the thread, innermost call last."""
        return calls_of_frame(frame_of(self._thread)) if self._thread is not None else ""
