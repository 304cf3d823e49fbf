"""accelerate itself: the main process filters the data within `main_process_first`; then all gather their metrics."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import holdfast


def filtered(path: Path) -> torch.Tensor:
    if path.exists():
        return torch.load(path)
    Path(os.environ["READY"]).touch()
    rows = torch.randn(64, 8)
    ends = time.monotonic() + 9
    while time.monotonic() < ends:
        rows = rows[rows.norm(dim=1).argsort()]
    torch.save(rows, path)
    return rows


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    accelerator = Accelerator(cpu=True)
    with accelerator.main_process_first():
        rows = filtered(Path(os.environ["RUN_FOLDER"], "rows.pt"))
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(rows), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for (batch,) in loader:
        loss = model(batch).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach().reshape(1)))
    accelerator.print(torch.cat(losses).mean().item())
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
