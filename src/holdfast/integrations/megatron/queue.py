"""megatron-core's AsyncCallsQueue for saves of Holdfast, without the all_reduce at every step by which stock
asks all ranks whether they are done: a rank looks at itself, and once the save is committed they agree on one
call, in the background."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import NamedTuple

from holdfast.background.pending import Pending
from holdfast.integrations.foreign_errors import of_megatron, raising
from holdfast.integrations.guard import note_committed, telling_apart
from holdfast.integrations.megatron import mcore
from holdfast.protocol.consensus import StepConsensus


class Committed:
    """The first finalize function of a request: waits until the save is committed, and raises its error.

    The stock queue calls it, too; so a request is right there as well, if with stock's all_reduce.
    """

    def __init__(self, pending: Pending, consensus: StepConsensus) -> None:
        self.pending, self._consensus = pending, consensus
        # Also after a failure, so that its error is raised at the same call on all ranks.
        pending.upload_completion.add_done_callback(lambda future: consensus.propose())

    def __call__(self) -> None:
        with raising(of_megatron):
            note_committed(self.pending.committed().path)

    def is_due(self, no_dist: bool) -> bool:
        """Is it time to finalize? At the same call on all ranks, as finalize functions of frameworks have
        barriers."""
        return self.pending.done() if no_dist else self._consensus.reached()

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """What the stock queue asks of a caller, if it is put back while a request of ours is in it."""
        return blocking or self.is_due(no_dist)


class _Call(NamedTuple):
    """An entry of `AsyncCallsQueue.async_calls`."""

    idx: int
    async_caller: object
    async_request: mcore.AsyncRequest


def _ours(request: mcore.AsyncRequest) -> Committed | None:
    """What Holdfast put into a request, if it is one of its own."""
    first = request.finalize_fns[0] if request.finalize_fns else None
    return first if isinstance(first, Committed) else None


def schedule(original: Callable[..., int]) -> Callable[..., int]:
    @wraps(original)
    def schedule_async_request(self: mcore.AsyncCallsQueue, async_request: mcore.AsyncRequest) -> int:
        ours = _ours(async_request)
        if ours is None:
            return original(self, async_request)
        self.call_idx += 1
        # Nothing is started: the save is under way since the request was made.
        self.async_calls.append(_Call(self.call_idx, ours, async_request.freeze()))
        return int(self.call_idx)

    return schedule_async_request


def finalize(original: Callable[..., list[int]]) -> Callable[..., list[int]]:
    @wraps(original)
    def maybe_finalize_async_calls(
        self: mcore.AsyncCallsQueue, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        found: list[int] = []
        while self.async_calls:
            save = _ours(self.async_calls[0].async_request)
            if save is None:
                # A request of megatron-core's own is the oldest: stock finalizes it, and what follows.
                return found + original(self, blocking, no_dist)
            if not (blocking or save.is_due(no_dist)):
                break
            # Taken out before: a request that raises must not be met again by the next call.
            number, _, request = self.async_calls.popleft()
            # By its folder, so that a request that failed on one rank leaves the next in step.
            with telling_apart(save.pending.path):
                for finish in request.finalize_fns:
                    finish()
            found.append(number)
        return found

    return maybe_finalize_async_calls
