"""Ranks tokenize their own documents on the fly; ranks 1 and 2 meet books, and merge pairs for minutes.

who: 1,2
why: unproven
Ranks 1 and 2 work in Python in the collate function; ranks 0 and 3 wait for both in the gradients' all_reduce.
"""

import itertools
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

import holdfast


class Documents(IterableDataset):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self):
        for number in range(100_000):
            yield "lorem ipsum " * (200_000 if number == 50 and self.rank in (1, 2) else 2)


def merge(symbols: list[str]) -> list[str]:
    """Join the most frequent pair, until none is there twice."""
    while True:
        pairs: dict[tuple[str, str], int] = {}
        for pair in itertools.pairwise(symbols):
            pairs[pair] = pairs.get(pair, 0) + 1
        if not pairs or max(pairs.values()) < 2:
            return symbols
        best = max(pairs, key=pairs.__getitem__)
        merged, at = [], 0
        while at < len(symbols):
            if tuple(symbols[at : at + 2]) == best:
                merged.append(symbols[at] + symbols[at + 1])
                at += 2
            else:
                merged.append(symbols[at])
                at += 1
        symbols = merged


def collate(texts: list[str]) -> torch.Tensor:
    return torch.tensor([float(len(merge(list(text)))) for text in texts])


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(Documents(dist.get_rank()), batch_size=1, collate_fn=collate)
    for step, batch in enumerate(loader):
        loss = model(batch[:, None]).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        model.zero_grad(set_to_none=False)
        if step == 49:
            Path(os.environ["READY"]).touch()
        time.sleep(0.05)


if __name__ == "__main__":
    main()
