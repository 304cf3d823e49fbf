"""Rank 0 evaluates in a process of its own and joins it; that process waits for a queue that nobody fills.

who: 0
why: unproven
Rank 0 waits in `Process.join`; ranks 1-3 are in the broadcast of the decision whether to go on.
"""

import multiprocessing
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

fork = multiprocessing.get_context("fork")


def evaluate(tasks, results) -> None:
    total = 0
    while (task := tasks.get()) is not None:
        total += task
    results.put(total)


def evaluation(epoch: int) -> None:
    tasks, results = fork.Queue(), fork.Queue()
    child = fork.Process(target=evaluate, args=(tasks, results), daemon=True)
    child.start()
    for number in range(3):
        tasks.put(number)
    if epoch != 4:
        tasks.put(None)
        results.get()
    child.join()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    for epoch in range(100):
        for _ in range(10):
            dist.all_reduce(torch.rand(4))
            time.sleep(0.05)
        if epoch == 4:
            Path(os.environ["READY"]).touch()
        if dist.get_rank() == 0:
            evaluation(epoch)
        go_on = torch.tensor([1])
        dist.broadcast(go_on, src=0)


if __name__ == "__main__":
    main()
