"""Ranks wait on the store for a coordinator outside of the job, which is gone.

who: none
why: unproven
All four ranks wait for one key of the store, at one line; no rank waits for another.
"""

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Coordinator:
    """What a service outside would do: it says which round is next."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store

    def announce(self, number: int) -> None:
        self.store.set(f"round/{number}", "go")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    store = dist.PrefixStore("federated", dist.distributed_c10d._get_default_store())
    coordinator = Coordinator(store)
    for number in range(1000):
        if number < 30 and dist.get_rank() == 0:
            coordinator.announce(number)
        if number == 30:
            Path(os.environ["READY"]).touch()
        store.wait([f"round/{number}"], timedelta(hours=2))
        update = torch.rand(16)
        dist.all_reduce(update)
        time.sleep(0.08)


if __name__ == "__main__":
    main()
