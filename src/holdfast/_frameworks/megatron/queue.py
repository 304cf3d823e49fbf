"""megatron-core's AsyncCallsQueue for Holdfast's saves, without stock's all_reduce at every step to find out
whether all ranks are done. Here each rank checks locally, and once the save is committed, ranks agree in the
background on the call that finalizes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from holdfast._core.background.pending import Pending
from holdfast._core.protocol.consensus import StepConsensus
from holdfast._frameworks.foreign_errors import raising
from holdfast._frameworks.guard import note_committed, telling_apart
from holdfast._frameworks.megatron import mcore
from holdfast._frameworks.megatron.errors import of_megatron


class Committed:
    """The first finalize function of a request: it waits until the save is committed, and raises its error.

    The stock queue calls it, too, so a request also works there, with stock's all_reduce.
    """

    def __init__(self, pending: Pending, consensus: StepConsensus) -> None:
        self.pending, self._consensus = pending, consensus
        # Also after a failure, so that its error is raised at the same call on all ranks.
        pending.add_done_callback(lambda future: consensus.propose())

    def __call__(self) -> None:
        with raising(of_megatron):
            note_committed(self.pending.committed().path)

    def is_due(self, no_dist: bool) -> bool:
        """Return whether to finalize now. It becomes True in the same call on all ranks, because finalize
        functions of frameworks have barriers."""
        return self.pending.done() if no_dist else self._consensus.reached()


class _Call(NamedTuple):
    """An entry of `AsyncCallsQueue.async_calls`."""

    idx: int
    async_caller: object
    async_request: mcore.AsyncRequest


def _ours(request: mcore.AsyncRequest) -> Committed | None:
    """Return Holdfast's finalize function in a request; None for a request of megatron-core's own."""
    first = request.finalize_fns[0] if request.finalize_fns else None
    return first if isinstance(first, Committed) else None


def schedule(
    stock: Callable[..., int], queue: mcore.AsyncCallsQueue, async_request: mcore.AsyncRequest
) -> int:
    """Replace `AsyncCallsQueue.schedule_async_request`."""
    ours = _ours(async_request)
    if ours is None:
        return stock(queue, async_request)
    queue.call_idx += 1
    # Nothing to start: the save runs since the request was made.
    queue.async_calls.append(_Call(queue.call_idx, ours, async_request.freeze()))
    return int(queue.call_idx)


def finalize(
    stock: Callable[..., list[int]],
    queue: mcore.AsyncCallsQueue,
    blocking: bool = False,
    no_dist: bool = False,
) -> list[int]:
    """Replace `AsyncCallsQueue.maybe_finalize_async_calls`."""
    finalized: list[int] = []
    while queue.async_calls:
        save = _ours(queue.async_calls[0].async_request)
        if save is None:
            # The oldest request is megatron-core's own: stock finalizes it, and those after it.
            return finalized + stock(queue, blocking, no_dist)
        if not (blocking or save.is_due(no_dist)):
            break
        # Removed first, so that a request that raises is not finalized again by the next call.
        number, _, request = queue.async_calls.popleft()
        # Named by its folder, so that after a failure on one rank all ranks still meet in the next one.
        with telling_apart(save.pending.path):
            for finish in request.finalize_fns:
                finish()
        finalized.append(number)
    return finalized
