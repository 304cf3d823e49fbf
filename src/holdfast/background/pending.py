"""The handle of a save that goes on while training does."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

import msgspec

from holdfast.errors import DeadlineExceeded, HoldfastError
from holdfast.saving.job import SaveJob, SaveReport
from holdfast.threads import start_thread

T = TypeVar("T")
CANCELLED = "cancelled"
"""Key in the details of an error: some rank cancelled the save; it did not fail by itself."""


class Progress(msgspec.Struct, frozen=True):
    """Where a pending save is, on this rank."""

    phase: str
    """Of the protocol (docs/protocol.md)."""
    bytes_done: int
    bytes_total: int
    """0 until it is known."""


class Completion(concurrent.futures.Future[SaveReport]):
    """The future of a save; it knows whether anybody has seen how the save ended."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def result(self, timeout: float | None = None) -> SaveReport:
        try:
            return super().result(timeout)
        finally:
            self.seen = self.seen or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            return super().exception(timeout)
        finally:
            self.seen = self.seen or self.done()

    def failure(self) -> BaseException | None:
        """Return its error, if it has ended with one, without counting that as seen."""
        return super().exception() if self.done() else None


class Pending:
    """An asynchronous save. `staged` and `committed` wait; everything else answers at once.

    staging_completion, upload_completion: the same as futures, under torch DCP's names.
    """

    def __init__(self, path: str, step: int | None) -> None:
        self.path, self.step = path, step
        self.staging_completion: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.upload_completion = Completion()
        for future in (self.staging_completion, self.upload_completion):
            # `cancel` of a future can't end a save; `Pending.cancel` can.
            future.set_running_or_notify_cancel()
        self.only_warns = False
        """Is a failure only logged?"""
        self._save: SaveJob | None = None
        self._who = "a rank"
        self._last = Progress("staging", 0, 0)
        self.cancelled: HoldfastError | None = None

    def __repr__(self) -> str:
        state = "done" if self.done() else "pending"
        return f"<{state} save of {self.path}>"

    def start(self, run: Callable[[], SaveReport]) -> None:
        """Run it on a thread of its own."""

        def work() -> None:
            try:
                report = run()
            except BaseException as error:
                # Before the future is set: the save's memory is free when its waiters wake up.
                self._let_go()
                self.has_staged()
                self.upload_completion.set_exception(error)
            else:
                self._let_go()
                self.upload_completion.set_result(report)

        try:
            start_thread(work, "holdfast-async-save")
        except HoldfastError as error:
            if self._save is not None:
                self._save.operation.cancel.set(error)  # the protocol tells it to the others, on this thread
            work()

    def _let_go(self) -> None:
        """Drop the job: who keeps this object must not keep what the save needed."""
        self._last = self.progress()
        self._save = None

    def attempt(self, save: SaveJob) -> None:
        """Note the job that runs now: the first one, or that of a retry."""
        self._save, self._who = save, save.operation.context.who
        if self.cancelled is not None:  # it was cancelled before this attempt began
            save.operation.cancel.set(self.cancelled)

    def has_staged(self) -> None:
        """Note that the state was copied, and may change."""
        if not self.staging_completion.done():
            self.staging_completion.set_result(None)

    def done(self) -> bool:
        """Return whether it has ended, well or not. Sends no message: a flag of this process."""
        return self.upload_completion.done()

    def staged(self, timeout: float | None = None) -> None:
        """Wait until the state has been copied, and may change."""
        self._wait(self.staging_completion, timeout, "staged")

    def committed(self, timeout: float | None = None) -> SaveReport:
        """Wait until it is committed on all ranks; if it fails, raise the error that all ranks raise.

        timeout: seconds; by default those of the save itself, which end it in any case.
        """
        return self._wait(self.upload_completion, timeout, "committed")

    def result(self, timeout: float | None = None) -> SaveReport:
        """Do what `committed` does, under a future's name for it."""
        return self.committed(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as `committed` does; return the error, or None if it is committed."""
        try:
            self.committed(timeout)
        except HoldfastError as error:
            if not self.done():
                raise
            return error
        return None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, well or not; return whether it has. Does not count a failure as seen."""
        concurrent.futures.wait([self.upload_completion], timeout)
        return self.done()

    def failed_unseen(self) -> bool:
        """Return whether it has ended with an error that nobody has asked for, and that is not expected."""
        error = self.upload_completion.failure()
        # Another rank may have cancelled it.
        cancelled = isinstance(error, HoldfastError) and CANCELLED in error.details
        return not (
            error is None
            or self.upload_completion.seen
            or self.cancelled is not None
            or cancelled
            or self.only_warns
        )

    def add_done_callback(self, callback: Callable[[concurrent.futures.Future[SaveReport]], object]) -> None:
        """Call `callback` with `upload_completion` once it has ended; at once if it has already."""
        self.upload_completion.add_done_callback(callback)

    def cancel(self) -> bool:
        """Give it up, on all ranks; False if it has ended already. It may still be committed, as `committed`
        tells."""
        if self.done():
            return False
        # Set first, then read the job; `attempt` does these two the other way round. So one of them sees the
        # other, whenever a retry begins.
        self.cancelled = HoldfastError(
            f"The save of {self.path} was cancelled on {self.who}.", step=self.step, details={CANCELLED: True}
        )
        save = self._save  # its own thread may drop it now
        if save is not None:
            save.operation.cancel.set(self.cancelled)
        return True

    @property
    def who(self) -> str:
        """The rank that saves, as messages name it."""
        return self._who

    def progress(self) -> Progress:
        """Return the phase and the bytes written on this rank."""
        save = self._save
        if save is None:
            return self._last
        return Progress(
            save.operation.context.phase, save.operation.presence.progress, save.operation.bytes_total
        )

    def _wait(self, future: concurrent.futures.Future[T], timeout: float | None, what: str) -> T:
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            if future.done() or timeout is None:
                raise  # it is the error of the save itself
            where = self.progress()
            raise DeadlineExceeded(
                f"The save of {self.path} was not {what} within {timeout:g} s: it is in phase "
                f"{where.phase!r}, with {where.bytes_done} of {where.bytes_total} bytes written. It goes on.",
                step=self.step,
                phase=where.phase,
            ) from None


def finished(report: SaveReport, step: int | None) -> Pending:
    """Return a synchronous save's report as a `Pending` that is done."""
    pending = Pending(report.path, step)
    pending.upload_completion.seen = True
    pending.staging_completion.set_result(None)
    pending.upload_completion.set_result(report)
    return pending
