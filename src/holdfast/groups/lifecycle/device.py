"""The GPU that this rank's groups communicate from, and how much of its memory is free."""

from __future__ import annotations

import torch
import torch.distributed as dist

MiB = 1 << 20


class Device:
    """The CUDA device of the creating thread. A new thread starts on device 0.

    uses_gpu: None: if the default group communicates from one. A process that does not must not touch it:
    that would take memory.
    """

    def __init__(self, uses_gpu: bool | None = None) -> None:
        if uses_gpu is None:
            uses_gpu = torch.cuda.is_available() and "nccl" in dist.get_backend_config()
        self._index = torch.cuda.current_device() if uses_gpu else None

    def use(self) -> None:
        """Have it be the current one of this thread, too."""
        if self._index is not None:
            torch.cuda.set_device(self._index)

    def free(self) -> int | None:
        """Bytes that are free, to whoever asks first; None without a GPU."""
        # The driver's count, not that of torch's allocator: NCCL allocates past torch.
        return None if self._index is None else int(torch.cuda.mem_get_info(self._index)[0])

    def settle(self) -> None:
        """Until what this thread has given to the GPU is done."""
        if self._index is not None:
            # A collective of NCCL returns when it is enqueued, but time and memory are measured after it.
            torch.cuda.current_stream(self._index).synchronize()
