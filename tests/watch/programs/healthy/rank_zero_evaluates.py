"""Only rank 0 evaluates after each epoch, and the others wait at the barrier of the next."""

import logging
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import holdfast

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")


def evaluate(model: torch.nn.Module, batches: int) -> float:
    model.eval()
    losses = []
    with torch.inference_mode():
        for number in range(batches):
            x = torch.randn(64, 32)
            losses.append(F.mse_loss(model(x), x).item())
            time.sleep(0.005)  # reads the batch
            if number % 500 == 0:
                logging.info("evaluated %d batches", number)
    model.train()
    return sum(losses) / len(losses)


def train(model: torch.nn.Module, epochs: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        for _ in range(5):
            x = torch.randn(8, 32)
            F.mse_loss(model(x), x).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            if epoch == 1:
                Path(os.environ["READY"]).touch()
            loss = evaluate(model, 1500 if epoch == 1 else 5)
            logging.info("epoch %d: %.3f", epoch, loss)
        dist.barrier()


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
torch.manual_seed(0)
train(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32)), epochs=3)
dist.destroy_process_group()
