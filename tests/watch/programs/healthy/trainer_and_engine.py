"""Ranks 0 and 1 train, 2 and 3 generate, in groups of their own: the trainer waits for the rollouts of a long turn."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

TRAINERS, ENGINES = [0, 1], [2, 3]


class Trainer:
    def __init__(self, group, bridge) -> None:
        self.group, self.bridge = group, bridge
        self.weights = torch.ones(16)

    def update(self, rollouts: torch.Tensor) -> None:
        advantage = rollouts - rollouts.mean()
        for _ in range(2):
            gradient = advantage.mean(0)
            dist.all_reduce(gradient, group=self.group)
            self.weights -= 0.1 * gradient

    def loop(self, iterations: int) -> None:
        for _ in range(iterations):
            dist.broadcast(self.weights, src=0, group=self.bridge)
            rollouts = torch.empty(8, 16)
            dist.broadcast(rollouts, src=2, group=self.bridge)
            self.update(rollouts)


class Engine:
    def __init__(self, group, bridge, rank: int) -> None:
        self.group, self.bridge, self.rank = group, bridge, rank
        self.weights = torch.empty(16)

    def generate(self, tokens: int) -> torch.Tensor:
        state = torch.randn(8, 16)
        for _ in range(tokens):
            state = torch.tanh(state * self.weights)
            dist.all_reduce(state, group=self.group)  # tensor parallel
            time.sleep(0.03)
        return state

    def loop(self, iterations: int) -> None:
        for iteration in range(iterations):
            dist.broadcast(self.weights, src=0, group=self.bridge)
            if iteration == 1:
                Path(os.environ["READY"]).touch()
            rollouts = self.generate(300 if iteration == 1 else 5)
            dist.broadcast(rollouts, src=2, group=self.bridge)


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
rank = dist.get_rank()
trainers = dist.new_group(TRAINERS, group_desc="actor_dp")
engines = dist.new_group(ENGINES, group_desc="rollout_tp")
bridge = dist.new_group([0, 1, 2, 3], group_desc="weights")
side = Trainer(trainers, bridge) if rank in TRAINERS else Engine(engines, bridge, rank)
side.loop(3)
dist.destroy_process_group()
