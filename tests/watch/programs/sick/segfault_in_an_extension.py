"""An extension in C reads a null pointer on rank 3, before all ranks open the groups of the pipeline.

who: 3
why: error
Rank 3 has died of SIGSEGV; the others wait in new_group until it takes part.
"""

import ctypes
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class NativeIndex:
    """An index of samples in C."""

    def __init__(self, rank: int) -> None:
        self.buffer = ctypes.create_string_buffer(b"\x01\x02\x03")
        self.address = 0 if rank == 3 else ctypes.addressof(self.buffer)

    def first(self) -> int:
        return ctypes.c_uint8.from_address(self.address).value


def warm_up() -> None:
    for _ in range(70):
        dist.all_reduce(torch.zeros(3))
        time.sleep(0.06)


def open_groups() -> list:
    whole = dist.new_group(group_desc="pipeline")
    return [whole, *(dist.new_group([first, first + 1], group_desc=f"stage-{first}") for first in range(3))]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    warm_up()
    Path(os.environ["READY"]).touch()
    NativeIndex(dist.get_rank()).first()
    open_groups()
    dist.barrier()


if __name__ == "__main__":
    main()
