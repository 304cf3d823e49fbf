"""Byte-level text from the Python standard library, in an order that no layout of ranks can change."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

SEPARATOR = 256  # the one token that is not a byte: the start of a file


class Corpus:
    """The sources of the standard library as one long row of tokens.

    The global batch of a step is a pure function of (seed, step). A rank takes its part of it, so a run that
    goes on with another number of ranks sees the very same batches, and there is no reader position to save.
    """

    def __init__(self, sequences: int, length: int, seed: int, max_bytes: int = 2_000_000) -> None:
        self.sequences, self.length, self.seed = sequences, length, seed
        self.tokens = _read_tokens(max_bytes)

    def batch(self, step: int) -> Tensor:
        """Global batch of ``step``: [sequences, length + 1] tokens."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        high = len(self.tokens) - self.length - 1
        starts = torch.randint(high, (self.sequences, 1), generator=generator)
        return self.tokens[starts + torch.arange(self.length + 1)]

    def part(self, step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one rank: an equal, consecutive part of the global batch."""
        if self.sequences % world:
            raise ValueError(f"{self.sequences} sequences cannot be split evenly over {world} ranks")
        mine = self.batch(step).chunk(world)[rank]
        return mine[:, :-1], mine[:, 1:]


def _read_tokens(max_bytes: int) -> Tensor:
    parts: list[Tensor] = []
    total = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_bytes()
        if not text:
            continue
        parts.append(torch.tensor([SEPARATOR], dtype=torch.int16))
        parts.append(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int16))
        total += len(text)
        if total >= max_bytes:
            break
    return torch.cat(parts).to(torch.int64)
