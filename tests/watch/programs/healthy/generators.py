"""Data comes through a chain of generators: one rank's shuffle buffer is filled slowly, the others have their batch."""

import itertools
import os
import random
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def read_records(rank: int):
    rng = random.Random(rank)
    for number in itertools.count():
        yield number, rng.randbytes(64)


def decode(records):
    for number, record in records:
        packed = zlib.compress(record)
        yield number, zlib.decompress(packed)


def only_good(records, is_strict: bool):
    """A strict filter finds one good record among very many."""
    began = None
    for number, record in records:
        if is_strict and number == 200:
            Path(os.environ["READY"]).touch()
            began = time.monotonic()
        if began is not None:
            if time.monotonic() - began < 9:
                continue
            began = None
        yield record


def shuffled(records, size: int = 32):
    buffer = []
    for record in records:
        buffer.append(record)
        if len(buffer) == size:
            random.shuffle(buffer)
            yield from buffer
            buffer.clear()


def batches(records, size: int = 16):
    while batch := list(itertools.islice(records, size)):
        yield torch.tensor([list(record) for record in batch], dtype=torch.float32)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    rank = dist.get_rank()
    pipeline = batches(shuffled(only_good(decode(read_records(rank)), rank == 2)))
    total = torch.zeros(64)
    for batch in itertools.islice(pipeline, 20):
        total += batch.sum(0)
        dist.reduce(total, dst=0)
        dist.broadcast(total, src=0)
    dist.destroy_process_group()


main()
