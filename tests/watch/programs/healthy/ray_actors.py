"""Ray: rank 0 has actors that score; one of them takes long, and the other ranks wait for the advantages."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
rank = dist.get_rank()

if rank == 0:
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)

    @ray.remote(num_cpus=0)
    class Scorer:
        def score(self, texts: list[str], seconds: float) -> list[float]:
            ends = time.monotonic() + seconds
            while True:
                scores = [len(set(text)) / len(text) for text in texts]
                if time.monotonic() >= ends:
                    return scores

    scorers = [Scorer.remote() for _ in range(2)]
    ray.get([scorer.score.remote(["ready"], 0.0) for scorer in scorers])


def advantages(step: int) -> torch.Tensor:
    scores = torch.zeros(8)
    if rank == 0:
        if step == 1:
            Path(os.environ["READY"]).touch()
        seconds = [0.0, 9.0 if step == 1 else 0.0]
        parts = [
            scorer.score.remote(["some text"] * 4, wait)
            for scorer, wait in zip(scorers, seconds, strict=True)
        ]
        scores = torch.tensor(sum(ray.get(parts), []))  # noqa: RUF017
    dist.broadcast(scores, src=0)
    return scores - scores.mean()


for step in range(3):
    gradient = advantages(step) * (rank + 1)
    dist.all_reduce(gradient)
dist.barrier()
if rank == 0:
    ray.shutdown()
dist.destroy_process_group()
