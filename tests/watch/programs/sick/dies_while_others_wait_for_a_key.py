"""Ranks publish their addresses in the store and wait for all of them; rank 1 has ended with an error before.

who: 1
why: error
Rank 1 raised a FileNotFoundError and its process has ended; the others wait on the store for its address.
"""

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def own_address(rank: int) -> str:
    if rank == 1:
        return Path("/nonexistent/hostname").read_text(encoding="utf-8")
    return f"10.0.0.{rank}:7777"


def rendezvous(store, rank: int, world: int) -> list[bytes]:
    store.set(f"engine/{rank}", own_address(rank))
    store.wait([f"engine/{one}" for one in range(world)], timedelta(minutes=20))
    return [store.get(f"engine/{one}") for one in range(world)]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    for _ in range(80):
        dist.all_reduce(torch.ones(2))
        time.sleep(0.05)
    Path(os.environ["READY"]).touch()
    store = dist.PrefixStore("rollout", dist.distributed_c10d._get_default_store())
    addresses = rendezvous(store, dist.get_rank(), dist.get_world_size())
    print(addresses)


if __name__ == "__main__":
    main()
