"""Rank 0 has a tool upload the checkpoint by `subprocess.run`; the others are at the barrier behind it."""

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

UPLOAD = """
import hashlib, sys, time
source, target = sys.argv[1:]
ends = time.monotonic() + 9
with open(source, "rb") as file, open(target, "wb") as out:
    data = file.read()
    while time.monotonic() < ends:
        hashlib.sha256(data).hexdigest()
        time.sleep(0.05)
    out.write(data)
"""


def upload(source: Path, target: Path) -> None:
    subprocess.run([sys.executable, "-c", UPLOAD, str(source), str(target)], check=True, capture_output=True)


def on_train_end(model: torch.nn.Module, folder: Path) -> None:
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), folder / "final.pt")
        Path(os.environ["READY"]).touch()
        upload(folder / "final.pt", folder / "uploaded.pt")
    dist.barrier()
    assert (folder / "uploaded.pt").exists()


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
model = torch.nn.Linear(64, 64)
for _ in range(5):
    gradient = torch.randn_like(model.weight)
    dist.all_reduce(gradient)
    model.weight.data.add_(gradient, alpha=-0.01)
on_train_end(model, Path(os.environ["RUN_FOLDER"]))
dist.destroy_process_group()
