"""What the pages say about speed and memory, and the row that each sentence rests on.

`tests/docs/test_benchmarks.py` holds the sentences against the pages and the rows against the results.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    page: str
    words: str
    """As they stand in the page, on one line."""
    bench: str
    row: str
    """How the metric of one or more rows of that benchmark begins."""


CLAIMS = (
    Claim(
        "docs/questions.md",
        "about 0.1 s a GB and core",
        "defaults",
        'check_replicas="auto" of',
    ),
    Claim(
        "docs/api.md",
        "hashes every replica (about 0.1 s a GB and core)",
        "defaults",
        'check_replicas="auto" of',
    ),
    Claim(
        "README.md",
        "copies the state and goes on",
        "async_save",
        "blocking time, 2 GiB over 8 ranks / plain copy",
    ),
    Claim(
        "docs/questions.md",
        "memory above the state below 64 MiB on each rank",
        "save_load",
        "save 2.38 GB, EP4xDP2, disk: peak memory above the state",
    ),
    Claim(
        "docs/questions.md",
        "memory above the state below 64 MiB on each rank",
        "save_load",
        "load 6.36 GB, EP4xDP2 -> EP4xDP2, tmpfs: peak memory above the state",
    ),
    Claim(
        "docs/questions.md",
        "takes less than 60 MiB above that",
        "async_save",
        "memory of a writer process of its own",
    ),
    Claim(
        "docs/api.md",
        "large matrices are stored as column panels, so that a slice along the last axis reads only its own bytes",
        "save_load",
        "load EP4xDP2 -> TP2xEP2xDP2, tmpfs, in columns: bytes read / needed",
    ),
    Claim(
        "docs/api.md",
        "slower otherwise",
        "save_load",
        "load EP4xDP2 -> EP4xDP2, tmpfs, in columns / without columns",
    ),
    Claim(
        "docs/api.md",
        "slower otherwise",
        "save_load",
        "save 2.38 GB, EP4xDP2, tmpfs, in columns / without columns",
    ),
    Claim(
        "docs/groups.md",
        "15 for 16,384 ranks, planned in a tenth of a second",
        "groups",
        "planning the rounds of 16,384 ranks",
    ),
    Claim(
        "docs/megatron.md",
        "up to 100 MiB above the state",
        "megatron",
        "memory above the state, worst rank, 48 layers, EP1",
    ),
    Claim(
        "docs/fsdp.md",
        "2 GB on 8 ranks against DCP",
        "fsdp",
        "save 2.11 GB, FSDP2 over 8 / DCP",
    ),
)
