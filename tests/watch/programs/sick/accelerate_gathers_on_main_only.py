"""Hugging Face accelerate: `gather` is called inside of `if accelerator.is_main_process`.

who: 0
why: mismatch
Rank 0 is in the all_gather of `accelerator.gather`; ranks 1-3 are in the barrier of `wait_for_everyone`.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator

import holdfast


def evaluate(accelerator: Accelerator, step: int) -> None:
    hits = torch.tensor([float(step % 3)], device=accelerator.device)
    if accelerator.is_main_process:
        print(accelerator.gather(hits).mean())


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(4, 1))
    for step in range(10_000):
        accelerator.backward(model(torch.rand(2, 4)).mean())
        model.zero_grad()
        time.sleep(0.05)
        if step == 50:
            Path(os.environ["READY"]).touch()
            evaluate(accelerator, step)
            accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
