"""The demo's MoE training under torchrun, on one node or several, with checkpoints and automatic restart.

One node, 4 ranks:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 4 --max-restarts 3 \\
        -m examples.torchrun_moe --folder /tmp/moe-run

Two nodes, 4 ranks each; the same lines on both, with the folder on storage that both see:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes 2 --nproc-per-node 4 --max-restarts 3 \\
        --rdzv-backend c10d --rdzv-endpoint FIRST-NODE:29400 --rdzv-id moe \\
        -m examples.torchrun_moe --folder /shared/moe-run

Without that variable (seen with torch 2.13) the restarted ranks get the store of the attempt before, in which
gloo finds the addresses of ranks that are gone, and the restart fails or hangs before the training begins.

The experts are spread over ``--ep`` ranks (4 if the number of ranks allows it), data parallel is the rest.
When a rank dies, torchrun stops the others of its node, and a rank of another node that is in ``save`` leaves
it with an error that says who is missing. torchrun then starts all ranks again, and they go on from the
newest committed checkpoint. So does the same line with another number of ranks: names and shapes in the
checkpoint do not depend on the layout.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from examples.moe.train import Hooks, Layout, TrainConfig, Trainer, train


class PrintOnFirstRank(Hooks):
    def __init__(self) -> None:
        self.quiet = dist.get_rank() != 0

    def say(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)

    def restored(self, trainer: Trainer) -> None:
        self.say(f"going on from step {trainer.step} on {trainer.layout}")

    def step_done(self, step: int, loss: float, probe: float, seconds: float) -> None:
        self.say(f"step {step:>3}  loss {loss:.6f}  {seconds:.2f} s")

    def saved(self, report: Any) -> None:
        self.say(f"step {report.step:>3}  saved in {report.seconds:.2f} s")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", required=True, help="checkpoints go here; on storage that all nodes share"
    )
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--save-every", type=int, default=6)
    parser.add_argument("--ep", type=int, default=None, help="ranks that the experts are spread over")
    args = parser.parse_args(argv)

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    world = dist.get_world_size()
    ep = args.ep or math.gcd(world, 4)
    if world % ep:
        parser.error(f"--ep {ep} does not divide the {world} ranks")
    config = TrainConfig(
        steps=args.steps, save_every=args.save_every, save_to=args.folder, resume_from=args.folder
    )
    train(config, Layout(dp=world // ep, ep=ep), PrintOnFirstRank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
