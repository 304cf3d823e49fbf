"""Ask the message store questions, and wait for each answer in bounded time.

The store's client may never return once the store is stuck. So one thread asks all questions, one by one. It
is started early, so that a rank that fails because no more threads can be started still tells the others.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from holdfast.errors import DeadlineExceeded
from holdfast.threads import start_thread

T = TypeVar("T")


class _Question:
    def __init__(self, ask: Callable[[], object]) -> None:
        self._ask = ask
        self.answered = threading.Event()
        self.answer: object = None
        self.error: BaseException | None = None

    def put(self) -> None:
        try:
            self.answer = self._ask()
        # `ask` raises it, on the caller's thread.
        except BaseException as error:
            self.error = error
        finally:
            self.answered.set()


class Questions:
    """One thread that asks. Without it (before `start`, or if it could not be started) the caller asks."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, name: str, rank: int) -> None:
        self._thread = start_thread(self._serve, name, rank)

    def stop(self) -> None:
        """End the thread after the questions that were put."""
        self._waiting.put(None)

    def ask(self, what: Callable[[], T], seconds: float) -> T:
        """Return the answer, or raise what the question raises; DeadlineExceeded if none comes in time."""
        question = _Question(what)
        if self._thread is None:
            question.put()
        else:
            self._waiting.put(question)
            if not question.answered.wait(seconds):
                raise DeadlineExceeded(f"The message store has not answered for {seconds:g} s.")
        if question.error is not None:
            raise question.error
        return question.answer  # type: ignore[return-value]

    def _serve(self) -> None:
        while (question := self._waiting.get()) is not None:
            question.put()
