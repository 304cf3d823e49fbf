"""The CUDA streams of a caller, whose tensors another thread copies.

A thread's current stream is its own, and begins as the default one. Work that the caller has given to another
stream, `with torch.cuda.stream(s)`, is not waited for by copies that a second thread makes, unless it is told
to.
"""

from __future__ import annotations

import torch

from holdfast.plan.shard_table import ShardTable


class CallerStreams:
    """What the current streams of this thread have been given up to now, on each GPU that has a tensor of a
    holding."""

    def __init__(self, table: ShardTable) -> None:
        self.streams: list[torch.cuda.Stream] = []
        # Asking for a stream initialises CUDA, which a process that has no tensor on a GPU must not pay for.
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            tensors = (getattr(memory, "tensor", None) for memory in table.memory)
            devices = {tensor.device for tensor in tensors if tensor is not None and tensor.is_cuda}
            self.streams = [torch.cuda.current_stream(device) for device in devices]
        # Events, not a synchronize: the caller's thread goes on, and the copying one waits on the GPU.
        self._given = [stream.record_event() for stream in self.streams]

    def wait(self) -> None:
        """Have this thread's current streams come after it."""
        for stream, event in zip(self.streams, self._given, strict=True):
            torch.cuda.current_stream(stream.device).wait_event(event)

    def finish(self) -> None:
        """Wait until what this thread's current streams have been given is done, so that the caller's may use
        it."""
        for stream in self.streams:
            torch.cuda.current_stream(stream.device).synchronize()
