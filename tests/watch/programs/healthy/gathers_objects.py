"""Predictions are gathered as objects: one rank still builds its own, the others are in `gather_object`."""

import math
import os
import pickle
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Prediction:
    def __init__(self, number: int, scores: list[float]) -> None:
        self.number, self.scores = number, scores

    def best(self) -> int:
        return max(range(len(self.scores)), key=self.scores.__getitem__)


def predict(count: int, seconds: float) -> list[Prediction]:
    found: list[Prediction] = []
    ends = time.monotonic() + seconds
    while len(found) < count or time.monotonic() < ends:
        scores = [math.sin(number * len(found)) for number in range(50)]
        found.append(Prediction(len(found), scores))
        if len(found) > 4 * count:
            found = pickle.loads(pickle.dumps(found[:count]))
    return found[:count]


def collect(predictions: list[Prediction]) -> list[Prediction]:
    is_main = dist.get_rank() == 0
    parts = [None] * dist.get_world_size() if is_main else None
    dist.gather_object(predictions, parts, dst=0)
    return sorted((one for part in parts or () for one in part), key=lambda one: one.number)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    settings = [{"count": 20} if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(settings)
    collect(predict(settings[0]["count"], 0.0))
    if dist.get_rank() == 3:
        Path(os.environ["READY"]).touch()
        predictions = predict(settings[0]["count"], 9.0)
    else:
        predictions = predict(settings[0]["count"], 0.1)
    merged = collect(predictions)
    results = [None] * dist.get_world_size()
    dist.all_gather_object(results, {"rank": dist.get_rank(), "best": [one.best() for one in merged][:3]})
    dist.destroy_process_group()


main()
