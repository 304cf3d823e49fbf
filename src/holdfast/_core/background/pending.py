"""The handle of an asynchronous save."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from holdfast._core.base.deadline import check_wait
from holdfast._core.base.threads import start_thread
from holdfast._core.saving.job import SaveJob, SaveReport
from holdfast.errors import DeadlineExceeded, HoldfastError, NotStarted

CANCELLED = "cancelled"
"""Key in the details of an error: the save did not fail, but was cancelled by some rank."""


class Progress(msgspec.Struct, frozen=True):
    """The progress of a pending save on this rank."""

    phase: str
    """A phase of the protocol (docs/protocol.md)."""
    bytes_done: int
    bytes_total: int
    """Bytes that this rank will write; 0 until known."""


class Pending(Future[SaveReport]):
    """An asynchronous save: a future of its `SaveReport`. `staged`, `committed`, `wait`, `result` and
    `exception` block; everything else returns at once.

    A cancelled save ends with a HoldfastError that names the cancelling rank, not with CancelledError.
    With `Checkpoints(local=)` the future ends with the durable commit; `committed` does not wait for that.
    """

    def __init__(self, path: str, step: int | None) -> None:
        super().__init__()
        self.path: str = path
        self.step: int | None = step
        self.staging_completion: Future[None] = Future()
        for future in (self, self.staging_completion):
            # Future.cancel can't end a save; ours can.
            future.set_running_or_notify_cancel()
        self._begun = threading.Lock()
        """Held by the thread that runs the save."""
        self._thread: threading.Thread | None = None
        """The thread that runs the save."""
        self.seen: bool = False
        """Whether the result or the error has been read."""
        self.only_warns = False
        """Whether a failure is logged instead of raised."""
        self._save: SaveJob | None = None
        self.who: str = "a rank"
        """Description of the saving rank, for messages."""
        self.there: str = ""
        """The same, as where something happened."""
        self.local: Future[SaveReport] | None = None
        """The commit in the local folders of all hosts, before the durable one; cancelled: there is none."""
        self._last = Progress("staging", 0, 0)
        self._cancel: HoldfastError | None = None

    def __repr__(self) -> str:
        state = "done" if self.done() else "pending"
        return f"<{state} save of {self.path}>"

    @property
    def upload_completion(self) -> Pending:
        """The save itself; torch DCP's name for this future."""
        return self

    def start(self, run: Callable[[], SaveReport]) -> None:
        """Run the save on a thread of its own, unless one runs it already."""
        runs = [run]
        del run  # it holds the state: nothing may, once the future is set

        def work() -> None:
            if not self._begun.acquire(blocking=False):
                return
            self._thread = threading.current_thread()
            try:
                report = runs.pop()()
            except BaseException as error:
                # Before the future is set, so that the save's memory is free when waiters wake up.
                self._let_go()
                self.has_staged()
                self.set_exception(error)
            else:
                self._let_go()
                self.set_result(report)

        try:
            start_thread(work, "holdfast-async-save")
        # Only NotStarted: a failing session may raise its error at any point in this thread, even after the
        # save's thread has started.
        except NotStarted as error:
            if self._save is not None:
                self._save.operation.cancel.set(error)  # the protocol tells it to the others, on this thread
            work()
        except BaseException:  # Ctrl-C: the thread may have begun, or never begin
            self.cancel()
            work()
            raise

    def _let_go(self) -> None:
        """Drop the job, so that a reference to this object does not keep the state in memory."""
        self._last = self.progress()
        self._save = None

    def _attempt(self, save: SaveJob) -> None:
        """Record the running job: the first attempt, or a retry."""
        context = save.operation.context
        self._save, self.who, self.there = save, context.who, context.there
        if self._cancel is not None:  # it was cancelled before this attempt began
            save.operation.cancel.set(self._cancel)

    def has_staged(self) -> None:
        """Record that the state is copied and may change."""
        if not self.staging_completion.done():
            self.staging_completion.set_result(None)

    def staged(self, timeout: float | None = None) -> None:
        """Wait until the state is copied; from then on, training may change it."""
        if not concurrent.futures.wait([self.staging_completion], check_wait(timeout)).done:
            raise self.late("staged", timeout)

    def committed(self, timeout: float | None = None) -> SaveReport:
        """Wait until the save is committed on all ranks; if it fails, raise the same error on all ranks.

        With `Checkpoints(local=)`: until it is committed in the local folders of all hosts or, if a host
        could not, in the run.

        timeout: seconds to wait; default: no limit besides the deadline of the save itself. Raises
            DeadlineExceeded after that; the save goes on.
        """
        begun, timeout = time.monotonic(), check_wait(timeout)
        if self.local is not None:
            concurrent.futures.wait([self.local, self], timeout, concurrent.futures.FIRST_COMPLETED)
            if (report := self._local_report()) is not None:
                return report
        if not self.wait(None if timeout is None else max(0.0, begun + timeout - time.monotonic())):
            raise self.late("committed", timeout)
        return self.result()  # it has ended

    def durable(self, timeout: float | None = None) -> SaveReport:
        """Wait as `committed` does, but until the save is committed in the run itself also with
        `Checkpoints(local=)`."""
        if not self.wait(timeout):
            raise self.late("durable", timeout)
        return self.result()  # it has ended

    def _local_report(self) -> SaveReport | None:
        local = self.local
        return None if local is None or not local.done() or local.cancelled() else local.result()

    def has_local(self, report: SaveReport | None) -> None:
        """Record that the step is committed in all local folders; None: that it is not in all of them."""
        assert self.local is not None
        if report is not None:
            self.local.set_result(report)
        else:
            self.local.cancel()
            self.local.set_running_or_notify_cancel()  # wakes up those who wait for it

    @property
    def goal(self) -> str:
        """What the save is once it has ended well, for messages."""
        return "committed" if self.local is None else "durable"

    @property
    def kept(self) -> str:
        """A sentence for messages: where the step is committed although the save has not ended well."""
        is_local = self._local_report() is not None
        return " The step is committed in the local folders of all hosts." if is_local else ""

    def result(self, timeout: float | None = None) -> SaveReport:
        """Like `durable`, but raise TimeoutError if the save takes longer than `timeout` seconds."""
        try:
            return super().result(check_wait(timeout))
        finally:
            self.seen = self.seen or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait like `result`; return the error, or None if the save is committed."""
        try:
            return super().exception(check_wait(timeout))
        finally:
            self.seen = self.seen or self.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the save has finished or failed; return whether it has. An error stays unseen."""
        concurrent.futures.wait([self], check_wait(timeout))
        return self.done()

    def _join(self, seconds: float) -> None:
        """Wait for the thread of a save that has ended, which still calls callbacks. They may free memory of
        tensors, and a process must not end meanwhile (`native_calls`)."""
        if self.done() and self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def failure(self) -> BaseException | None:
        """Return the error of a failed save, else None, without marking it as seen."""
        return super().exception() if self.done() else None

    def failed_unseen(self) -> bool:
        """Return whether the save failed unexpectedly and its error was not read."""
        error = self.failure()
        return not (error is None or self.seen or self.only_warns or self.is_given_up(error))

    def is_given_up(self, error: BaseException | None) -> bool:
        """Return whether the save was cancelled, here or (by its error) on another rank."""
        return self._cancel is not None or (isinstance(error, HoldfastError) and CANCELLED in error.details)

    def cancelled(self) -> bool:
        """Return whether the save failed because some rank cancelled it."""
        error = self.failure()
        return error is not None and self.is_given_up(error)

    def cancel(self) -> bool:
        """Cancel the save on all ranks. Returns False if it has already ended. It may still be committed:
        `committed` tells."""
        if self.done():
            return False
        # Set the error first, then read the job; `_attempt` does this in the opposite order. So a cancel is
        # never lost, whenever a retry begins.
        self._cancel = HoldfastError(
            f"The save of {self.path} was cancelled{self.there}.", step=self.step, details={CANCELLED: True}
        )
        save = self._save  # its own thread may drop it now
        if save is not None:
            save.operation.cancel.set(self._cancel)
        return True

    def progress(self) -> Progress:
        """Return the phase and the number of bytes written on this rank."""
        save = self._save
        if save is None:
            return self._last
        return Progress(save.operation.context.phase, save.operation.bytes_done, save.operation.bytes_total)

    def late(self, what: str, timeout: float | None) -> DeadlineExceeded:
        """Return the error for a wait that timed out while the save goes on."""
        where = self.progress()
        return DeadlineExceeded(
            f"The save of {self.path} was not {what} within {timeout:g} s: it is in phase {where.phase!r}, "
            f"with {where.bytes_done} of {where.bytes_total} bytes written. It goes on.{self.kept}",
            step=self.step,
            phase=where.phase,
        )


def finished(report: SaveReport, step: int | None) -> Pending:
    """Return a completed `Pending` with the report of a synchronous save."""
    pending = Pending(report.path, step)
    pending.seen = True
    pending.has_staged()
    pending.set_result(report)
    return pending
