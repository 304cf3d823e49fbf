"""What the contract of stores does with one: whole files, and several actions at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from holdfast._core.store.base import Store


def race(actions: Sequence[Callable[[], object]]) -> list[object]:
    """Run all at once, each on a thread of its own; return what each returned or raised.

    A TimeoutError stands for an action that has not ended after 60 s.
    """
    # Threads start one after the other: without a barrier the first would be done before the last begins.
    gate = threading.Barrier(len(actions))
    outcomes: list[object] = [TimeoutError("not ended after 60 s") for _ in actions]

    def run(index: int) -> None:
        gate.wait(30)
        try:
            outcomes[index] = actions[index]()
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(actions))]
    for thread in threads:
        thread.start()
    ends = time.monotonic() + 60
    for thread in threads:
        thread.join(max(ends - time.monotonic(), 0))
    return outcomes


def put(store: Store, path: str, data: bytes) -> None:
    """Write a whole file."""
    writer = store.create(path)
    writer.write_at(0, [data])
    writer.finish()


def content(store: Store, path: str) -> bytes:
    """Read a whole file."""
    reader = store.open(path)
    try:
        return reader.read(0, reader.size)
    finally:
        reader.close()
