"""A rollout loop in asyncio; collectives run in an executor. The generation of rank 3 never sets its event.

who: 3
why: unproven
The event loop of rank 3 idles in select; executor threads of the others are in the all_reduce of the rewards.
"""

import asyncio
import os
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Generator:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    async def generate(self, step: int) -> list[int]:
        done = asyncio.Event()
        if (self.rank, step) != (3, 40):
            asyncio.get_running_loop().call_later(0.05, done.set)
        await done.wait()
        return list(range(8))


async def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    await asyncio.get_running_loop().run_in_executor(None, dist.all_reduce, tensor)
    return tensor


async def rollout(rank: int) -> None:
    generator = Generator(rank)
    for step in range(10_000):
        if step == 40:
            Path(os.environ["READY"]).touch()
        tokens = await generator.generate(step)
        await all_reduce(torch.tensor([float(sum(tokens))]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    asyncio.run(rollout(dist.get_rank()))
