"""Copies from a GPU into an arena: pinned memory, and separate streams. No handle of GPU memory leaves the
process."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from holdfast._core.background.arena import Arena
from holdfast._core.base.values import size_text
from holdfast._core.state.memory import not_waiting

log = logging.getLogger("holdfast")
_side: dict[torch.device, torch.cuda.Stream] = {}


@contextmanager
def copies_into(streams: Sequence[torch.cuda.Stream], arena: Arena) -> Iterator[None]:
    """A context for copies from a GPU: they start after the work already queued on training's `streams`, and
    are complete when the context ends."""
    if not streams:
        yield
        return
    with torch.cuda.device(streams[0].device):  # a new thread starts on device 0
        _pin(arena)
    sides = []
    with ExitStack() as stack:
        for training in streams:
            device = training.device
            if device not in _side:
                _side[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            side = _side[device]
            # Copies wait for the work queued on training's stream before this save, not for later work.
            side.wait_stream(training)
            stack.enter_context(torch.cuda.stream(side))
            sides.append(side)
        try:
            with not_waiting():
                yield
        finally:
            for side in sides:
                # Also after an error: started copies still write into the arena.
                side.synchronize()


def _pin(arena: Arena) -> None:
    """Pin an arena's pages, so that the GPU writes into them. Unpinned, copies are slower but correct."""
    if arena.unpin is not None or not arena.size:
        return
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address, size = arena.address, arena.size
    # torch pins only memory that it has allocated; this is our own mapping, so call the CUDA runtime.
    status = int(runtime.cudaHostRegister(address, size, 0))
    if status != 0:
        log.warning("%s of host memory could not be pinned (CUDA error %d).", size_text(size), status)
        return
    arena.unpin = lambda: runtime.cudaHostUnregister(address)
