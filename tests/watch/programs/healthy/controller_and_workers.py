"""A controller sends commands by name; one worker scores for long, and the controller waits to gather its result."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Worker:
    """Does what it is told, until `stop`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.weights = torch.zeros(8)
        self.scored = 0

    def do_update(self, amount: float) -> float:
        self.weights += amount
        return float(self.weights.sum())

    def do_score(self, count: int) -> list[float]:
        self.scored += 1
        is_long = self.rank == 2 and self.scored == 2
        if is_long:
            Path(os.environ["READY"]).touch()
        ends = time.monotonic() + (9 if is_long else 0)
        while True:
            scores = [float(torch.tanh(self.weights * number).sum()) for number in range(count)]
            if time.monotonic() >= ends:
                return scores

    def run(self) -> None:
        while True:
            command = [None]
            dist.broadcast_object_list(command, src=0)
            name, kwargs = command[0]
            if name == "stop":
                break
            result = getattr(self, f"do_{name}")(**kwargs)
            dist.gather_object(result, dst=0)


class Controller:
    def call(self, name: str, **kwargs):
        dist.broadcast_object_list([(name, kwargs)], src=0)
        if name == "stop":
            return None
        results = [None] * dist.get_world_size()
        dist.gather_object(None, results, dst=0)
        return results[1:]

    def run(self) -> None:
        for _ in range(3):
            self.call("update", amount=0.1)
            scores = self.call("score", count=10)
            assert len(scores) == dist.get_world_size() - 1
        self.call("stop")


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
(Worker(dist.get_rank()) if dist.get_rank() else Controller()).run()
dist.destroy_process_group()
