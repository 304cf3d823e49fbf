"""ZeroRedundancyOptimizer: the rank that has the embeddings steps for long, the others get its parameters after that."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import holdfast


class Shampoo(torch.optim.Optimizer):
    """Preconditions each matrix by roots, which are computed anew now and then."""

    def __init__(self, params, lr: float = 0.01, every: int = 3) -> None:
        super().__init__(params, {"lr": lr, "every": every})
        self.steps = 0

    def roots(self, gradient: torch.Tensor, seconds: float) -> torch.Tensor:
        statistics = gradient @ gradient.T + torch.eye(len(gradient))
        ends = time.monotonic() + seconds
        while True:
            values, vectors = torch.linalg.eigh(statistics)
            root = vectors @ torch.diag(values.clamp_min(1e-6) ** -0.25) @ vectors.T
            if time.monotonic() >= ends:
                return root

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient.ndim == 2 and self.steps % group["every"] == 0:
                    is_large = gradient.numel() >= 100 * 32 and self.steps == 3
                    if is_large:
                        Path(os.environ["READY"]).touch()
                    gradient = self.roots(gradient, 9.0 if is_large else 0.0) @ gradient
                parameter.sub_(gradient, alpha=group["lr"])


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
model = DistributedDataParallel(
    torch.nn.Sequential(
        torch.nn.Linear(32, 100), torch.nn.ReLU(), torch.nn.Linear(100, 8), torch.nn.Linear(8, 8)
    )
)
optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Shampoo, lr=0.01)
for _ in range(4):
    model(torch.randn(16, 32)).pow(2).mean().backward()
    optimizer.step()
    model.zero_grad()
dist.barrier()
dist.destroy_process_group()
