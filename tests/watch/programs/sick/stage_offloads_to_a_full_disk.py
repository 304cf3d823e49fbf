"""Activations of a stage are offloaded by a writer thread with a bounded queue; the writer of rank 1 is stuck.

who: 1
why: unproven
Rank 1 waits in `queue.put`; rank 0 waits to send to it, ranks 2 and 3 to receive.
"""

import os
import queue
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Offloader:
    def __init__(self, device: str) -> None:
        self.pending: queue.Queue[torch.Tensor] = queue.Queue(maxsize=2)
        self.device = device
        threading.Thread(target=self.write, name="offload", daemon=True).start()

    def write(self) -> None:
        _, writer = os.pipe()  # stands for a file system whose server is gone
        while True:
            tensor = self.pending.get()
            if self.device == "dead":
                os.write(writer, bytes(1 << 20))
            del tensor

    def put(self, tensor: torch.Tensor) -> None:
        self.pending.put(tensor)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    offloader = Offloader("disk")
    for number in range(10_000):
        if number == 50:
            Path(os.environ["READY"]).touch()
            offloader.device = "dead" if rank == 1 else "disk"
        tensor = torch.ones(64)
        if rank > 0:
            dist.recv(tensor, src=rank - 1)
        offloader.put(tensor)
        if rank < last:
            dist.send(tensor + rank, dst=rank + 1)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
