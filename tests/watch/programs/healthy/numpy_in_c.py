"""One rank is in numpy, in C, to fit its normalisation (a long sort and a decomposition); the others reduce theirs."""

import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import holdfast


def whitening(samples: np.ndarray) -> np.ndarray:
    centered = samples - samples.mean(0)
    _, values, vectors = np.linalg.svd(centered, full_matrices=False)
    return vectors.T / (values + 1e-5)


def quantiles(samples: np.ndarray) -> np.ndarray:
    return np.quantile(np.sort(samples, axis=0), [0.05, 0.5, 0.95], axis=0)


def statistics(rank: int) -> torch.Tensor:
    rng = np.random.default_rng(rank)
    if rank == 3:
        Path(os.environ["READY"]).touch()
        ends = time.monotonic() + 8
        while time.monotonic() < ends:
            samples = rng.standard_normal((3000, 400))
            whitening(samples)
            found = quantiles(samples[:, :16])
    else:
        found = quantiles(rng.standard_normal((500, 16)))
    return torch.from_numpy(found)


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
found = statistics(dist.get_rank())
dist.all_reduce(found, op=dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
found /= dist.get_world_size()
weights = torch.zeros(16, dtype=torch.float64)
for _ in range(5):
    gradient = found[1] - weights
    dist.all_reduce(gradient)
    weights += 0.1 * gradient
dist.destroy_process_group()
