"""A schedule of phases, dispatched by `match`: in `filter` one rank has most of the work, then all gather."""

import os
import time
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Phase(Enum):
    WARM_UP = auto()
    TRAIN = auto()
    FILTER = auto()


@dataclass
class Event:
    phase: Phase
    steps: int = 1


PLAN = [Event(Phase.WARM_UP, 2), Event(Phase.TRAIN, 3), Event(Phase.FILTER), Event(Phase.TRAIN, 2)]


def keep_good(samples: torch.Tensor, seconds: float) -> torch.Tensor:
    kept = samples
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        distance = torch.cdist(samples, samples)
        kept = samples[distance.mean(1).argsort()[:16]]
    return kept


def run(rank: int) -> None:
    weights = torch.zeros(8)
    samples = torch.randn(64, 8)
    for event in PLAN:
        match event:
            case Event(phase=Phase.WARM_UP, steps=steps):
                for _ in range(steps):
                    dist.broadcast(weights, src=0)
            case Event(phase=Phase.TRAIN, steps=steps) if steps > 0:
                for _ in range(steps):
                    weights += samples.mean(0)
                    dist.all_reduce(weights)
            case Event(phase=Phase.FILTER):
                match rank:
                    case 1:
                        Path(os.environ["READY"]).touch()
                        kept = keep_good(samples, 9.0)
                    case _:
                        kept = keep_good(samples, 0.1)
                gathered = [torch.empty_like(kept) for _ in range(dist.get_world_size())]
                dist.all_gather(gathered, kept)
                samples = torch.cat(gathered)
            case _:
                raise ValueError(event)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    run(dist.get_rank())
    dist.destroy_process_group()
