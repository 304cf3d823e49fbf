"""megatron-core's AsyncCallsQueue for requests of Holdfast: what stock asks of all ranks by an all_reduce at every step
was agreed when the save was committed, so each rank looks at its own request alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple


class _Call(NamedTuple):
    """An entry of `AsyncCallsQueue.async_calls`."""

    idx: int
    async_caller: Any
    async_request: Any


def _is_ours(request: Any) -> bool:
    """Does it leave nothing to a background process of megatron-core's?"""
    return request.async_fn is None


def schedule(original: Callable[..., int]) -> Callable[..., int]:
    @wraps(original)
    def schedule_async_request(self: Any, async_request: Any) -> int:
        if not _is_ours(async_request):
            return original(self, async_request)
        self.call_idx += 1
        self.async_calls.append(_Call(self.call_idx, None, async_request.freeze()))
        return int(self.call_idx)

    return schedule_async_request


def finalize(original: Callable[..., list[int]]) -> Callable[..., list[int]]:
    @wraps(original)
    def maybe_finalize_async_calls(self: Any, blocking: bool = False, no_dist: bool = False) -> list[int]:
        found: list[int] = []
        while self.async_calls:
            if not _is_ours(self.async_calls[0].async_request):
                return found + original(self, blocking, no_dist)
            number, _, request = self.async_calls.popleft()
            for finish in request.finalize_fns:
                finish()
            found.append(number)
        return found

    return maybe_finalize_async_calls
