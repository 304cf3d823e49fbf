"""The GPU that this rank's groups use, and its free memory."""

from __future__ import annotations

import torch
import torch.distributed as dist


class Device:
    """The CUDA device of the creating thread. A new thread starts on device 0.

    uses_gpu: whether to use the GPU; None: only if the default group is of NCCL. A process that does not
        communicate from a GPU must not touch it: that would take memory.
    """

    def __init__(self, uses_gpu: bool | None = None) -> None:
        if uses_gpu is None:
            uses_gpu = torch.cuda.is_available() and "nccl" in dist.get_backend_config()
        self._index = torch.cuda.current_device() if uses_gpu else None

    def use(self) -> None:
        """Make it the current device of this thread."""
        if self._index is not None:
            torch.cuda.set_device(self._index)

    def free(self) -> int | None:
        """Return the free bytes of the device, shared with other processes; None without a GPU."""
        # From the driver, not torch's allocator: NCCL does not allocate through torch.
        return None if self._index is None else int(torch.cuda.mem_get_info(self._index)[0])

    def settle(self) -> None:
        """Wait until the GPU has done what this thread has enqueued."""
        if self._index is not None:
            # An NCCL collective returns when it is enqueued, but time and memory are measured after its end.
            torch.cuda.current_stream(self._index).synchronize()
