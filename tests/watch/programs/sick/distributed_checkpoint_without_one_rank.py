"""torch.distributed.checkpoint saves with all ranks; rank 3 believes that it has nothing new to save.

who: 3
why: mismatch
Ranks 0-2 are in the gather of the checkpoint's plans; rank 3 is in the all_reduce of the next step.
"""

import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import holdfast


class Saver:
    def __init__(self, root: str) -> None:
        self.root = root
        self.saved: set[int] = set()

    def maybe_save(self, step: int, state: dict[str, torch.Tensor]) -> None:
        if step in self.saved:
            return
        self.saved.add(step)
        dcp.save(state, checkpoint_id=os.path.join(self.root, f"step-{step}"))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    root = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(root)
    saver = Saver(root[0])
    if dist.get_rank() == 3:
        saver.saved.add(40)  # restored from a file of its own
    weights = torch.zeros(8)
    for step in range(10_000):
        gradients = torch.rand(8)
        dist.all_reduce(gradients)
        weights -= gradients
        time.sleep(0.05)
        if step % 40 == 0 and step:
            Path(os.environ["READY"]).touch()
            saver.maybe_save(step, {"weights": weights})


if __name__ == "__main__":
    main()
