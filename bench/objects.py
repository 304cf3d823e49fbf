"""One rank saves and loads through S3's API: ours beside plain obstore with the same parts, and beside torch DCP over
s3fs (FsspecWriter) and over s3torchconnector.

All take turns on one server on this machine: moto, whose own time is in each figure, as it is written in Python and
shares the cores. So only ratios tell something. The second server answers each request 20 ms later, as a distant one
does. The two peers of DCP are measured if they are installed (`pip install s3fs 's3torchconnector[dcp]'`); no test
and no user needs them.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from bench.harness import MIB, Bench, Rank, main, median, run_ranks
from bench.rows import number
from bench.turns import Figures, Outcome, order, turn
from tests.support.object_servers import BUCKET, Asked, Proxy, forward, moto, s3_environment

PART, AT_ONCE = 16 * MIB, 4
"""Bytes of a part, and parts at once: what Holdfast uses, but for the 1/64 that its header and index take."""
PEERS = {"DCP over s3fs": "s3fs", "DCP over s3torchconnector": "s3torchconnector"}
LEAST = 0.9
DELAY = 0.02


@dataclass(frozen=True)
class Plan:
    port: int
    sides: tuple[str, ...]
    tensors: int
    reps: int


def state_of(count: int, value: float = 1.0) -> dict[str, torch.Tensor]:
    """Some tensors of one part each."""
    return {f"layer.{number}.w": torch.full((PART // 4,), value + number) for number in range(count)}


class Holdfast:
    def save(self, place: str, state: dict[str, torch.Tensor]) -> Any:
        import holdfast

        return holdfast.save(state, f"s3://{BUCKET}/{place}", job=holdfast.Job(no_dist=True))

    def load(self, place: str, state: dict[str, torch.Tensor]) -> Any:
        import holdfast

        return holdfast.load(state, f"s3://{BUCKET}/{place}", job=holdfast.Job(no_dist=True))


class Raw:
    """Plain obstore: the same parts, as many at once, and an index; nothing is hashed or verified."""

    def __init__(self) -> None:
        import obstore
        from obstore.store import S3Store

        self.obstore: Any = obstore
        self.store = S3Store(BUCKET, client_options={"allow_http": True})

    def save(self, place: str, state: dict[str, torch.Tensor]) -> None:
        parts = (memoryview(tensor.numpy()).cast("B") for tensor in state.values())
        self.obstore.put(
            self.store, f"{place}/data", map(bytes, parts), chunk_size=PART, max_concurrency=AT_ONCE
        )
        self.obstore.put(self.store, f"{place}/index", json.dumps(list(state)).encode(), mode="create")

    def load(self, place: str, state: dict[str, torch.Tensor]) -> None:
        self.obstore.get(self.store, f"{place}/index").bytes()

        def fill(row: int, tensor: torch.Tensor) -> None:
            found = self.obstore.get_range(self.store, f"{place}/data", start=row * PART, length=PART)
            memoryview(tensor.numpy()).cast("B")[:] = found

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(fill, itertools.count(), state.values()))


class Dcp:
    """torch DCP with the writer and reader of another package."""

    def __init__(self, side: str) -> None:
        self.is_fsspec = side == "DCP over s3fs"

    def save(self, place: str, state: dict[str, torch.Tensor]) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(state, storage_writer=self._of("Writer", place), no_dist=True)

    def load(self, place: str, state: dict[str, torch.Tensor]) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(state, storage_reader=self._of("Reader", place), no_dist=True)

    def _of(self, what: str, place: str) -> Any:
        url = f"s3://{BUCKET}/{place}"
        if self.is_fsspec:
            from torch.distributed.checkpoint import _fsspec_filesystem

            return getattr(_fsspec_filesystem, f"Fsspec{what}")(url)
        from s3torchconnector import S3ClientConfig
        from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

        made = {"Writer": S3StorageWriter, "Reader": S3StorageReader}[what]
        return made("us-east-1", url, s3client_config=S3ClientConfig(force_path_style=True))


def job(rank: Rank, plan: Plan) -> Outcome:
    os.environ.update(s3_environment(plan.port))
    out = Outcome()
    raw = Raw()
    made: dict[str, Any] = {"holdfast": Holdfast(), "obstore": raw}
    made |= {side: Dcp(side) for side in plan.sides if side not in made}
    for rep in range(plan.reps + 1):
        for side in order(plan.sides, rep):
            if ("save", side) in out.failed or ("load", side) in out.failed:
                continue
            place, state = f"{side.replace(' ', '-')}/{rep}", state_of(plan.tensors, float(rep))
            back = state_of(plan.tensors, -1.0)

            def check(state: dict[str, torch.Tensor] = state, back: dict[str, torch.Tensor] = back) -> None:
                if not all(torch.equal(back[name], state[name]) for name in state):
                    raise ValueError("what was loaded is not what was saved")

            one = made[side]
            if turn(rank, out, ("save", side), lambda: one.save(place, state), keep=rep > 0):  # noqa: B023
                turn(rank, out, ("load", side), lambda: one.load(place, back), keep=rep > 0, check=check)  # noqa: B023
            for page in raw.obstore.list(raw.store, place):  # moto keeps all in memory
                raw.obstore.delete(raw.store, [meta["path"] for meta in page])
    return out


def later(asked: Asked) -> Any:
    time.sleep(DELAY)
    return forward(asked.port, asked.method, asked.path, asked.headers, asked.body)


def requests_of(port: int, sides: tuple[str, ...], tensors: int) -> dict[tuple[str, str], int]:
    """Return how many requests one warm save and one load of each side make."""
    proxy = Proxy(port)
    (found,) = run_ranks(count, 1, (proxy.port, sides, tensors), limit_s=120.0)
    marks, seen = found, proxy.requests()
    proxy.close()
    counts: dict[tuple[str, str], int] = {}
    at: tuple[str, str] | None = None
    for line in seen:
        path = line.split()[1]
        if path in marks:
            at = marks[path]
        elif at is not None:
            counts[at] = counts.get(at, 0) + 1
    return counts


def count(rank: Rank, port: int, sides: tuple[str, ...], tensors: int) -> dict[str, tuple[str, str]]:
    """Make a save and a load of each side, with a request of a known path before each."""
    os.environ.update(s3_environment(port))
    raw = Raw()
    made: dict[str, Any] = {"holdfast": Holdfast(), "obstore": raw}
    made |= {side: Dcp(side) for side in sides if side not in made}
    marks: dict[str, tuple[str, str]] = {}
    for side in sides:
        state = state_of(tensors)
        made[side].save(f"count/{side.replace(' ', '-')}/warm", state)
        for verb in ("save", "load", "end"):
            name = f"mark/{len(marks)}"
            marks[f"/{BUCKET}/{name}"] = (verb, side)
            raw.obstore.put(raw.store, name, b"1", use_multipart=False)
            if verb != "end":
                getattr(made[side], verb)(f"count/{side.replace(' ', '-')}/it", state)
    return marks


def rows(bench: Bench, what: str, figures: Figures, plan: Plan, counts: dict[tuple[str, str], int]) -> None:
    for verb in ("save", "load"):
        for side in plan.sides:
            if (fault := figures.fault((verb, side))) is not None:
                bench.error(f"{verb}, {side}: {fault}")
        for side in plan.sides:
            if side == "holdfast":
                continue
            note = "; ".join(
                f"{one}: CPU {number(median(figures.cpu(verb, one)))} s, peak "
                f"{number(median(figures.peak_mib(verb, one)))} MiB, {counts.get((verb, one), 0)} requests"
                for one in ("holdfast", side)
            )
            bench.compare(
                f"{verb} {plan.tensors * PART / 1e9:.2f} GB, {what} / {side}",
                figures.wall(verb, "holdfast"),
                figures.wall(verb, side),
                "s",
                limit=LEAST if side == "obstore" else None,
                first=figures.first_wall(verb, "holdfast"),
                peer_first=figures.first_wall(verb, side),
                note=note,
            )


def run(bench: Bench) -> None:
    peers = tuple(side for side, module in PEERS.items() if importlib.util.find_spec(module) is not None)
    sides = ("holdfast", "obstore", *peers)
    tensors = 4 if bench.quick else 6
    with moto() as port:
        counts = requests_of(port, sides, tensors)
        distant = Proxy(port, later)
        try:
            for what, at in (("moto", port), ("moto 20 ms away", distant.port)):
                plan = Plan(at, sides, tensors, bench.reps)
                rows(bench, what, Figures(run_ranks(job, 1, (plan,), limit_s=600.0)), plan, counts)
        finally:
            distant.close()


if __name__ == "__main__":
    sys.exit(main("objects", run))
