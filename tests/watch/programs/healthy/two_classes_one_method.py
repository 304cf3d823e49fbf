"""`Trainer.step` reduces gradients, `Environment.step` simulates: one rank is in the latter, which has the same name."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Environment:
    def __init__(self, hardness: float) -> None:
        self.hardness = hardness
        self.state = torch.zeros(4)

    def step(self, action: torch.Tensor) -> tuple[torch.Tensor, float]:
        ends = time.monotonic() + self.hardness
        while True:
            self.state = torch.tanh(self.state + 0.1 * action)
            if time.monotonic() >= ends:
                break
        return self.state, float(self.state.sum())


class Trainer:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.policy = torch.nn.Linear(4, 4)
        for parameter in self.policy.parameters():
            dist.broadcast(parameter.data, 0)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.1)

    def step(self, reward: float, action: torch.Tensor) -> None:
        (action.sum() * -reward).backward()
        for parameter in self.policy.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fit(self, episodes: int) -> None:
        state = torch.zeros(4)
        for episode in range(episodes):
            is_long = episode == 3 and self.rank == 3
            if is_long:
                Path(os.environ["READY"]).touch()
            environment = Environment(9.0 if is_long else 0.01)
            action = self.policy(state)
            state, reward = environment.step(action.detach())
            self.step(reward, action)


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
Trainer(dist.get_rank()).fit(6)
dist.destroy_process_group()
