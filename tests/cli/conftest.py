"""Real checkpoints, saved by threads that stand for ranks, and a way to run commands."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import holdfast
from holdfast._core.roster.memory import Board, MemoryRoster
from holdfast._tools.cli import cli

WIDE = torch.arange(512 * 1024, dtype=torch.float32).reshape(512, 1024)
EXPERTS = torch.arange(8 * 6 * 10, dtype=torch.float32).reshape(8, 6, 10)


def state_of(rank: int, world: int, **changes: Any) -> dict[str, Any]:
    """Rank `rank`'s part: experts cut along the first axis, a wide matrix along the second, a replica,
    objects."""
    each, columns = 8 // world, 1024 // world
    state: dict[str, Any] = {
        "experts": holdfast.Shard(EXPERTS[rank * each : (rank + 1) * each], (8, 6, 10), (rank * each, 0, 0)),
        "wide": holdfast.Shard(
            WIDE[:, rank * columns : (rank + 1) * columns].contiguous(), (512, 1024), (0, rank * columns)
        ),
        "norm": torch.full((64,), 0.5, dtype=torch.bfloat16),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
        "lr": 0.25,
        "args": {"b": 2, "a": [1, "x[bold]y"]},
        f"layer{rank}": {"weight": torch.full((100, 7), float(rank))},
    }
    return state | changes


def save_ranks(place: Path, world: int = 2, step: int | None = None, **changes: Any) -> Path:
    """Save from `world` ranks; keyword arguments replace values of the state on every rank."""
    board, errors = Board(), list[BaseException]()

    def one(rank: int) -> None:
        try:
            roster = MemoryRoster(rank, world, board)
            state = state_of(rank, world, **changes)
            holdfast.save(state, place, step=step, job=holdfast.Job(roster=roster, timeout=60), expected=None)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return place


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks that nobody may change."""
    return save_ranks(tmp_path_factory.mktemp("cli") / "step-00000007", step=7)


@pytest.fixture
def checkpoint(kept: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(kept, tmp_path / "copy"))


Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Run a command; an exception that is no exit fails the test with its traceback."""

    def call(*arguments: object) -> Result:
        result = CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="holdfast")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


@pytest.fixture
def run_json(run: Run) -> Callable[..., tuple[Any, int]]:
    """Run with --json; the whole of stdout must be one document."""

    def call(*arguments: object) -> tuple[Any, int]:
        result = run(*arguments, "--json")
        return json.loads(result.stdout), result.exit_code

    return call


def data_files(checkpoint: Path) -> list[Path]:
    """Its data files, by rank."""
    return sorted((checkpoint / "data").iterdir(), key=lambda path: path.name.split("-r")[1])


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Flip one bit; `at` counts from the end if negative."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)
