"""Asynchronous saves in a row: each call blocks for its own copy only, and they are written in order.

verl saves a model, its optimizer and the rest as three requests. With one arena the third call would wait for
the first two saves. Here each save has its own arena until it is committed, within a budget; one writer
process serves them all, because they are written one after another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from weakref import finalize, ref

from holdfast.background.manager import Background, background_of
from holdfast.background.pending import Pending
from holdfast.background.writer_client import WriterClient
from holdfast.exits import Stage, at_exit
from holdfast.saving.job import SaveJob

MOST = 8
"""The most saves that may be under way; a budget may allow fewer."""


class SaveQueue:
    """The saves of one thread."""

    def __init__(self) -> None:
        self.writer = WriterClient()
        self._slots: list[Background] = []
        """Ordered by their saves, the oldest first."""
        self._last: Pending | None = None
        finalize(self, self.writer.kill).atexit = False

    def save(
        self, make: Callable[[], SaveJob], path: str, step: int | None, budget: int | None, retries: int = 0
    ) -> Pending:
        """Call `Background.save` of a slot that has no save under way.

        budget: bytes that the copies of all saves in the queue may take. If this one does not fit beside
            them, it waits for the oldest; if it does not fit alone, it is copied in waves.
        """
        slot = self._free_slot()
        self._slots.remove(slot)
        self._slots.append(slot)

        def make_room(nbytes: int) -> None:
            if budget is not None:
                # A copy that is larger than the budget is made in waves, which never take more than that.
                self._make_room(min(nbytes, budget), budget, slot)

        # After the previous save, as all slots share one writer process, which does one job at a time.
        self._last = slot.save(make, path, step, budget, retries, self._last, make_room)
        return self._last

    def is_of_another_process(self) -> bool:
        """Return whether it was made before this process was forked."""
        return any(slot.is_of_another_process() for slot in self._slots)

    def _free_slot(self) -> Background:
        idle = next((slot for slot in self._slots if slot.is_idle), None)
        if idle is not None:
            return idle
        if len(self._slots) < MOST:
            self._slots.append(background_of(self, self.writer))
            if len(self._slots) == 1:
                at_exit(Stage.SAVES, partial(_end, ref(self)))  # it may be gone with its thread by then
            return self._slots[-1]
        self._slots[0].wait()  # for the oldest, which ends by its own deadline
        return self._slots[0]

    def _make_room(self, nbytes: int, budget: int, mine: Background) -> None:
        """Free arenas until all take at most `budget` bytes with this save's `nbytes`: wait for other saves,
        the oldest first. Each ends by its own deadline."""
        others = [slot for slot in self._slots if slot is not mine]
        nbytes = max(nbytes, mine.held_bytes)  # an arena does not shrink
        for slot in sorted(others, key=lambda slot: not slot.is_idle):  # the oldest first among those at work
            if sum(other.held_bytes for other in others) + nbytes <= budget:
                return
            slot.wait()
            # Waiting gives no memory back: an idle slot keeps its arena for the next save.
            slot.release()

    def end(self) -> None:
        """Wait for all saves, which end by their own deadlines, and end the writer process."""
        for slot in self._slots:
            slot.wait()
        self.writer.kill()


def _end(known: ref[SaveQueue]) -> None:
    queue = known()
    if queue is not None:
        queue.end()


_of_thread = threading.local()


def queue_of_this_thread() -> SaveQueue:
    """Return this thread's queue: no thread waits for another's save."""
    queue: SaveQueue | None = getattr(_of_thread, "queue", None)
    if queue is None or queue.is_of_another_process():
        _of_thread.queue = queue = SaveQueue()
    return queue
