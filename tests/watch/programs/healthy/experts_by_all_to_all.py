"""A mixture of experts: tokens go to their experts by all_to_all, and one expert has got most of them."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

WIDTH = 8


class Expert(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 32), torch.nn.Linear(32, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # One token after the other, as a grouped kernel without a fast path does.
        rows = [self.down(torch.relu(self.up(token))) for token in tokens]
        return torch.stack(rows) if rows else tokens


def exchange_counts(send: torch.Tensor) -> torch.Tensor:
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send)
    return received


def route(tokens: torch.Tensor, favourite: int | None) -> torch.Tensor:
    choice = torch.randint(0, dist.get_world_size(), (len(tokens),))
    return choice if favourite is None else torch.full_like(choice, favourite)


@torch.no_grad()
def moe_layer(expert: Expert, tokens: torch.Tensor, favourite: int | None) -> torch.Tensor:
    choice = route(tokens, favourite)
    order = choice.argsort()
    send = torch.bincount(choice, minlength=dist.get_world_size())
    receive = exchange_counts(send)
    dispatched = torch.empty(int(receive.sum()), WIDTH)
    dist.all_to_all_single(dispatched, tokens[order], receive.tolist(), send.tolist())
    if favourite == dist.get_rank():
        Path(os.environ["READY"]).touch()
        ends = time.monotonic() + 9
        while time.monotonic() < ends:
            output = expert(dispatched)
    else:
        output = expert(dispatched)
    combined = torch.empty_like(tokens)
    dist.all_to_all_single(combined, output, send.tolist(), receive.tolist())
    return combined[order.argsort()]


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
expert = Expert()
tokens = torch.randn(64, WIDTH)
for layer in range(6):
    tokens = moe_layer(expert, tokens, favourite=1 if layer == 3 else None)
dist.barrier()
dist.destroy_process_group()
