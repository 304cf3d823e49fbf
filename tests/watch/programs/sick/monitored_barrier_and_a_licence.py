"""Each phase begins with a monitored barrier; rank 1 waits for a licence that the server does not grant.

who: 1
why: unproven
Rank 1 waits in `select` for a reply; rank 0 waits for it in monitored_barrier, ranks 2 and 3 for rank 0.
"""

import os
import selectors
import socket
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class LicenceClient:
    def __init__(self) -> None:
        self.mine, self.server = socket.socketpair()
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.mine, selectors.EVENT_READ)

    def acquire(self, granted: bool) -> None:
        self.mine.send(b"please")
        if granted:
            self.server.send(b"yes")
        self.selector.select()
        self.mine.recv(16)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    licence = LicenceClient()
    for phase in range(1000):
        if phase == 10:
            Path(os.environ["READY"]).touch()
        licence.acquire(granted=(dist.get_rank(), phase) != (1, 10))
        dist.monitored_barrier(timeout=timedelta(minutes=10))
        for _ in range(3):
            dist.all_reduce(torch.ones(2))
            time.sleep(0.08)


if __name__ == "__main__":
    main()
