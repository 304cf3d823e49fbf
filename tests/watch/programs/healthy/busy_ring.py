"""Nobody waits long: blocks of keys go around a ring by isend and irecv, as in ring attention, all the time."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Ring:
    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.after, self.before = (self.rank + 1) % self.size, (self.rank - 1) % self.size

    def turn(self, block: torch.Tensor) -> torch.Tensor:
        incoming = torch.empty_like(block)
        sending = dist.isend(block, self.after)
        receiving = dist.irecv(incoming, self.before)
        sending.wait()
        receiving.wait()
        return incoming


def ring_attention(ring: Ring, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(query)
    for _ in range(ring.size):
        scores = (query @ keys.T).softmax(-1)
        total = total + scores @ keys
        keys = ring.turn(keys)
    return total


def run(seconds: float) -> None:
    ring = Ring()
    query, keys = torch.randn(64, 16), torch.randn(64, 16)
    begun, goes_on, step = time.monotonic(), torch.ones(1), 0
    while goes_on.item():
        query = torch.nn.functional.normalize(ring_attention(ring, query, keys))
        step += 1
        if step % 20 == 0:
            goes_on.fill_(time.monotonic() - begun < seconds)
            dist.broadcast(goes_on, src=0)
        if step == 20:
            Path(os.environ["READY"]).touch()


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
run(11.0)
dist.barrier()
dist.destroy_process_group()
