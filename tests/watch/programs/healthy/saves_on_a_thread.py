"""Each rank saves on a thread with a group of its own; rank 0's thread writes long, and later all wait for the threads."""

import os
import pickle
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class AsyncSaver:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.group = dist.new_group(backend="gloo", group_desc="save")
        self.thread: threading.Thread | None = None

    def save(self, state: dict[str, torch.Tensor], step: int) -> None:
        self.wait()
        copied = {name: value.clone() for name, value in state.items()}
        self.thread = threading.Thread(target=self._save, args=(copied, step), name=f"save-{step}")
        self.thread.start()

    def _save(self, state: dict[str, torch.Tensor], step: int) -> None:
        rank = dist.get_rank()
        if rank == 0 and step == 20:
            Path(os.environ["READY"]).touch()
            ends = time.monotonic() + 10
            while time.monotonic() < ends:
                (self.folder / "probe").write_bytes(pickle.dumps(state))
                time.sleep(0.02)
        torch.save(state, self.folder / f"step-{step}-rank-{rank}.pt")
        dist.barrier(group=self.group)

    def wait(self) -> None:
        if self.thread is not None:
            self.thread.join()


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
saver = AsyncSaver(Path(os.environ["RUN_FOLDER"]))
weight = torch.randn(64, 64)
for step in range(1, 61):
    gradient = torch.tanh(weight @ weight.T) / 64
    dist.all_reduce(gradient)
    weight -= 0.01 * gradient
    time.sleep(0.1)
    if step % 20 == 0:
        saver.save({"weight": weight}, step)
saver.wait()
dist.barrier()
dist.destroy_process_group()
