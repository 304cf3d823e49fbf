"""Rank 0 tokenizes the data set while the others wait at the first barrier, as the examples of Hugging Face do."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

TEXT = ["the quick brown fox jumps over the lazy dog"] * 50


def load_and_cache_examples(cache: Path, rank: int) -> torch.Tensor:
    if rank != 0:
        dist.barrier()  # the first process in distributed training processes the data, the others use the cache

    if cache.exists():
        features = torch.load(cache)
    else:
        Path(os.environ["READY"]).touch()
        vocabulary: dict[str, int] = {}
        rows = []
        begun = time.monotonic()
        while time.monotonic() - begun < 9:
            rows = [[vocabulary.setdefault(word, len(vocabulary)) for word in line.split()] for line in TEXT]
        features = torch.tensor(rows)
        torch.save(features, cache)

    if rank == 0:
        dist.barrier()
    return features


def train(model: torch.nn.Module, features: torch.Tensor) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    total = torch.zeros(1)
    for row in features:
        loss = model(row.float()).pow(2).mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    torch.manual_seed(0)
    features = load_and_cache_examples(Path(os.environ["RUN_FOLDER"], "cached_train"), dist.get_rank())
    print(train(torch.nn.Linear(features.shape[1], 4), features))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
