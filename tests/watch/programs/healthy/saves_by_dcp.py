"""torch.distributed.checkpoint: one rank's writer is slow, and the others wait in the `save` for what it has written."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.stateful import Stateful

import holdfast


class SlowWriter(FileSystemWriter):
    def write_data(self, plan, planner):
        if dist.get_rank() == 2:
            Path(os.environ["READY"]).touch()
            for _ in range(90):
                time.sleep(0.1)  # its mount is slow
        return super().write_data(plan, planner)


class TrainState(Stateful):
    def __init__(self, model: torch.nn.Module, step: int) -> None:
        self.model, self.step = model, step

    def state_dict(self):
        return {"model": self.model.state_dict(), "step": self.step}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.step = state["step"]


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
torch.manual_seed(0)
state = TrainState(torch.nn.Linear(32, 32), 0)
for state.step in range(1, 4):
    mean = state.model.weight.detach().clone()
    dist.all_reduce(mean)
path = os.path.join(os.environ["RUN_FOLDER"], "step-3")
dcp.save({"app": state}, storage_writer=SlowWriter(path))
dcp.load({"app": state}, checkpoint_id=path)
assert state.step == 3
dist.destroy_process_group()
