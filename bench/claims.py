"""What the pages say about speed and memory, the row that each sentence rests on, and what keeps it true.

`tests/docs/test_benchmarks.py` holds the sentences against the pages and the rows against the results; `make bench` fails
if a measurement contradicts a sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bench.rows import Results, Row, number


@dataclass(frozen=True)
class Claim:
    page: str
    words: str
    """As they stand in the page, on one line."""
    bench: str
    row: str
    """How the metric of one or more rows of that benchmark begins."""
    least: float | None = None
    """The smallest ratio of those rows at which the words are true; None: they promise no figure."""


CLAIMS = (
    Claim(
        "docs/engine.md",
        "at most 0.2 s a GB and core in bfloat16",
        "fingerprint",
        "fingerprint 0.19 GB: experts in bf16 / target",
        1.0,
    ),
    Claim(
        "docs/engine.md",
        "transposed ones at more than 1 GB/s",
        "fingerprint",
        "fingerprint 0.19 GB: transposed experts in bf16 / target",
        1.0,
    ),
    Claim(
        "docs/storage.md",
        "Training waits as for a save into the local folder alone",
        "local_tier",
        "blocking time, 2 ranks of",
        0.9,
    ),
    Claim(
        "docs/storage.md",
        "at most 1.2 times as long as plain obstore with the same parts",
        "objects",
        "save 0.10 GB, moto / obstore",
        0.84,
    ),
    Claim(
        "docs/storage.md",
        "at most 1.2 times as long as plain obstore with the same parts",
        "objects",
        "load 0.10 GB, moto / obstore",
        0.84,
    ),
    Claim(
        "docs/questions.md",
        "about 0.1 s a GB and core",
        "defaults",
        'check_replicas="auto" of',
        1.0,
    ),
    Claim(
        "docs/api.md",
        "hashes every replica (about 0.1 s a GB and core)",
        "defaults",
        'check_replicas="auto" of',
        1.0,
    ),
    Claim(
        "README.md",
        "copies the state and goes on",
        "async_save",
        "blocking time, 2 GiB over 8 ranks / plain copy",
        0.5,  # no longer than two plain copies
    ),
    Claim(
        "docs/questions.md",
        "memory above the state below 64 MiB on each rank",
        "save_load",
        "save 2.38 GB, EP4xDP2, disk: peak memory above the state",
        1.0,
    ),
    Claim(
        "docs/questions.md",
        "memory above the state below 64 MiB on each rank",
        "save_load",
        "load 6.36 GB, EP4xDP2 -> EP4xDP2, tmpfs: peak memory above the state",
        1.0,
    ),
    Claim(
        "docs/questions.md",
        "takes less than 60 MiB above that",
        "async_save",
        "memory of a writer process of its own",
        1.0,
    ),
    Claim(
        "docs/api.md",
        "large matrices are stored as column panels, so that a slice along the last axis reads only its own bytes",
        "save_load",
        "load EP4xDP2 -> TP2xEP2xDP2, tmpfs, in columns: bytes read / needed",
        1.0,
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
        5 / 0.15,  # the row has 5 s over ours, and a tenth is rounded
    ),
    Claim(
        "docs/megatron.md",
        "up to 100 MiB above the state",
        "megatron",
        "memory above the state, worst rank, 48 layers, EP1",
        1.0,
    ),
    Claim(
        "docs/fsdp.md",
        "2 GB on 8 ranks against DCP",
        "fsdp",
        "save 2.11 GB, FSDP2 over 8 / DCP",
    ),
)


def rows_of(claim: Claim, results: Iterable[Results]) -> list[Row]:
    """The rows that a claim rests on."""
    return [
        row
        for one in results
        if one.bench == claim.bench
        for row in one.rows
        if row.metric.startswith(claim.row)
    ]


def broken(results: Iterable[Results], claims: Iterable[Claim] = CLAIMS) -> Iterator[str]:
    """Yield a sentence for each claim whose figure was not measured, or that a measurement contradicts."""
    results = list(results)
    for claim in claims:
        rows = rows_of(claim, results)
        says = f'{claim.page} says "{claim.words}", but'
        if not rows:
            yield f"{says} {claim.bench} has no row {claim.row!r}."
        for row in rows if claim.least is not None else ():
            if row.ratio is None or claim.least is None:
                yield f"{says} {claim.bench} measured no ratio of {row.metric!r}."
            elif row.ratio < claim.least:
                sides = f"{number(row.ours)} and {number(row.peer)} {row.unit}".strip()
                needs = f"a ratio of {number(row.ratio)}, and the words need {number(claim.least)}"
                yield f"{says} {claim.bench} measured {sides} of {row.metric!r}: {needs}."
