"""An asyncio program: collectives run by `to_thread`; rank 0 awaits the upload of what it has, the others a barrier."""

import asyncio
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def hash_blocks(seconds: float) -> int:
    import hashlib

    digest = hashlib.sha256()
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        digest.update(os.urandom(4096))
    return digest.digest()[0]


class Job:
    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.weights = torch.ones(32)

    async def train_step(self) -> None:
        await asyncio.to_thread(dist.all_reduce, self.weights)
        self.weights /= dist.get_world_size()
        await asyncio.sleep(0)

    async def upload(self) -> None:
        Path(os.environ["READY"]).touch()
        parts = await asyncio.gather(*(asyncio.to_thread(hash_blocks, seconds) for seconds in (4.0, 9.0)))
        assert len(parts) == 2

    async def heartbeat(self) -> None:
        while True:
            await asyncio.sleep(0.5)

    async def run(self) -> None:
        beats = asyncio.create_task(self.heartbeat())
        for _ in range(4):
            await self.train_step()
        if self.rank == 0:
            await self.upload()
        await asyncio.to_thread(dist.barrier)
        for _ in range(2):
            await self.train_step()
        beats.cancel()


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
asyncio.run(Job().run())
dist.destroy_process_group()
