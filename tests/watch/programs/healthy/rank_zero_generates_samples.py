"""Rank 0 samples text from the model token by token, and then broadcasts it; the others are in that broadcast."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class CharacterModel(torch.nn.Module):
    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(size, 24)
        self.recurrent = torch.nn.GRU(24, 24, batch_first=True)
        self.head = torch.nn.Linear(24, size)

    def forward(self, ids, hidden=None):
        output, hidden = self.recurrent(self.embedding(ids), hidden)
        return self.head(output), hidden

    @torch.no_grad()
    def generate(self, seconds: float) -> torch.Tensor:
        ids = torch.zeros(1, 1, dtype=torch.long)
        hidden, text = None, []
        ends = time.monotonic() + seconds
        while time.monotonic() < ends or len(text) < 64:
            logits, hidden = self(ids, hidden)
            ids = torch.multinomial(logits[:, -1].softmax(-1), 1)
            text.append(ids.item())
        return torch.tensor(text[-64:])


def show_samples(model: CharacterModel, is_main: bool, seconds: float) -> torch.Tensor:
    samples = model.generate(seconds) if is_main else torch.empty(64, dtype=torch.long)
    dist.broadcast(samples, src=0)
    return samples


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
model = CharacterModel()
is_main = dist.get_rank() == 0
for round_ in range(3):
    ids = torch.randint(0, 32, (4, 17))
    logits, _ = model(ids[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    if is_main and round_ == 1:
        Path(os.environ["READY"]).touch()
    show_samples(model, is_main, 9.0 if round_ == 1 else 0.0)
dist.destroy_process_group()
