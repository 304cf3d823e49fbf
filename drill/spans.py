"""The same state saved by torch.distributed.checkpoint and by Holdfast, as what each rank does when.

Two scenarios: all ranks come; and one rank never comes, because it is still in its data loader. Nothing is changed
in either library. Functions of torch are wrapped to note when a rank is inside of them; Holdfast's own events say
which phase it is in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as stock
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import holdfast
from drill.ranks import ask, shorten_timeouts
from holdfast import dcp, events
from holdfast.events import Event

WORLD, AWAY = 4, 2
LAYERS, WIDTH = 24, 64
LIMIT_S, REPORT_S = 10.0, 1.0
COLLECTIVES = (
    "gather_object", "scatter_object_list", "broadcast_object_list", "all_gather_object", "broadcast", "all_reduce", "barrier"
)  # fmt: skip
PHASES = {
    "entered": "works",
    "assigning": "waits",
    "writing": "writes",
    "written": "waits",
    "committing": "works",
}
"""What a rank does in a phase of a save."""


class Span(msgspec.Struct, frozen=True):
    """What a rank does for a while; seconds since the first rank entered the save."""

    does: str
    """`works`, `writes`, `collective` or `waits` (for a message, with a deadline)."""
    begin: float
    end: float


class Rank(msgspec.Struct, frozen=True):
    rank: int
    spans: tuple[Span, ...]
    error: str = ""
    told: float | None = None
    """When it first told in the log whom it waits for."""


class Run(msgspec.Struct, frozen=True):
    """One save on one side."""

    away: bool
    """Does one rank never come?"""
    ours: bool
    ranks: tuple[Rank, ...]


class Picture(msgspec.Struct, frozen=True):
    """Everything that the picture shows."""

    measured: str
    tensors: int
    machine: str
    runs: tuple[Run, ...]


class Noted(list[tuple[str, float, float]]):
    """What one rank did: (what, begin, end), by the wall clock, which all ranks of a host share."""

    def __init__(self) -> None:
        self._inside = False

    @contextmanager
    def noting(self, does: str) -> Iterator[None]:
        """Note the outermost of the wrapped calls."""
        if self._inside:
            yield
            return
        self._inside, begin = True, time.time()
        try:
            yield
        finally:
            self._inside = False
            self.append((does, begin, time.time()))


def wrap(owner: Any, name: str, does: str, noted: Noted) -> None:
    inner = getattr(owner, name)

    def call(*args: Any, **named: Any) -> Any:
        with noted.noting(does):
            return inner(*args, **named)

    setattr(owner, name, call)


def sharded_state() -> dict[str, Any]:
    """The state of a transformer and its AdamW under FSDP2, as torch's own function gives it."""
    torch.manual_seed(0)
    layers = [torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4, WIDTH)).sum().backward()
    optimizer.step()
    model_state, optim_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optim_state}


def fetch_batch() -> None:
    """A data loader that waits for its storage."""
    time.sleep(10 * LIMIT_S)


def save_job(rank: int, folder: str, away: bool, ours: bool) -> Any:
    state, noted = sharded_state(), Noted()
    phases: list[tuple[str, float]] = []
    save: Callable[[str], Any]
    if ours:
        holdfast.session().__enter__()  # to the end of the process, as install() begins one

        def note(event: Event) -> None:
            if event.name.startswith("save."):
                phases.append((event.name.removeprefix("save."), event.at))

        events.subscribe(note)
        job = holdfast.Job(report_after=REPORT_S, timeout=LIMIT_S if away else None)
        save = lambda name: dcp.save(state, checkpoint_id=f"{folder}/{name}", job=job)  # noqa: E731
    else:
        for name in COLLECTIVES:
            wrap(dist, name, "collective", noted)
        wrap(stock.FileSystemWriter, "write_data", "writes", noted)
        save = lambda name: stock.save(state, checkpoint_id=f"{folder}/{name}")  # noqa: E731
    save("first")  # imports modules, and finds the other ranks
    if away:
        shorten_timeouts(LIMIT_S)
    dist.barrier()
    noted.clear()
    phases.clear()
    if away and rank == AWAY:
        fetch_batch()
    error, begin = "", time.time()
    try:
        save("second")
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    end = time.time()
    if ours:
        # Each phase lasts until the next one.
        known = [(PHASES[name], at) for name, at in phases if name in PHASES]
        for (does, at), stop in zip(known, [at for _, at in known[1:]] + [end], strict=True):
            if noted and noted[-1][0] == does:
                _, at, _ = noted.pop()
            noted.append((does, at, stop))
    told = next((at for name, at in phases if name == "late"), None)
    return rank, begin, end, list(noted), error, told, len(dict(flat(state)))


def flat(state: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        elif isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value


def measure(away: bool, ours: bool) -> tuple[Run, int]:
    """Save once; also how many tensors there are."""
    waited_for = [rank for rank in range(WORLD) if not (away and rank == AWAY)]
    with TemporaryDirectory(prefix="holdfast-drill-", dir="/dev/shm") as top:
        found = ask(WORLD, save_job, top, away, ours, waited_for=waited_for, patience=60.0)
    answers: list[Any] = list(found)
    first = min(answer[1] for answer in answers)
    ranks = []
    for rank, begin, end, noted, error, told, _ in answers:
        spans, at = [], begin
        for does, start, stop in sorted(noted, key=lambda one: one[1]):
            if start > at:
                spans.append(Span("works", round(at - first, 4), round(start - first, 4)))
            spans.append(Span(does, round(max(start, at) - first, 4), round(stop - first, 4)))
            at = max(at, stop)
        if end > at:
            spans.append(Span("works", round(at - first, 4), round(end - first, 4)))
        ranks.append(Rank(rank, tuple(spans), " ".join(error.split()), told and round(told - first, 4)))
    return Run(away, ours, tuple(ranks)), answers[0][-1]
