"""What is asserted of every failure: who is named, by when, and what is left on disk."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path

from holdfast._core.protocol.job import Job
from holdfast.errors import HoldfastError
from tests.support.processes import ProcessWorld, Result
from tests.support.waiting import AT_ONCE, SLACK

PATIENT = Job(timeout=60.0, stall_timeout=30.0)
"""For failures that are seen at once, and not by a timeout."""


def errors_of(results: Iterable[Result]) -> list[HoldfastError]:
    """The error of every live rank; anything else is a failure of the test."""
    found = []
    for result in results:
        if result.died is not None:
            continue
        assert isinstance(result.error, HoldfastError), f"rank {result.rank}: {result.value!r} {result.trace}"
        found.append(result.error)
    return found


def names_rank(world: ProcessWorld, error: HoldfastError, rank: int, *words: str, dead: bool = True) -> None:
    """The error names the rank, and where and when it was last seen."""
    text = str(error)
    assert error.rank == rank, text
    assert f"rank {rank}" in text, text
    for word in words:
        assert word in text, text
    if dead:
        infos = [info for info in error.missing if info.rank == rank]
        assert len(infos) == 1, text
        assert infos[0].host == socket.gethostname()
        assert infos[0].pid == world.pid(rank)
        assert str(infos[0].pid) in text
        assert infos[0].phase
        assert infos[0].phase in text
        assert infos[0].seconds_since_seen is not None


def same_everywhere(errors: list[HoldfastError], count: int) -> HoldfastError:
    """All live ranks raised the same error."""
    assert len(errors) == count, [str(error) for error in errors]
    assert len({(type(error), error.message) for error in errors}) == 1, [str(error) for error in errors]
    return errors[0]


def in_time(errors: list[HoldfastError], limit: float) -> None:
    """Every call came back by then."""
    for error in errors:
        assert error.details["returned_after"] <= limit + SLACK, error.details


def at_once(errors: list[HoldfastError]) -> None:
    """No call waited for a timeout of `PATIENT`."""
    for error in errors:
        assert error.details["returned_after"] < AT_ONCE, error.details


def no_checkpoint(path: str) -> None:
    """The folder, if there is one, holds nothing that counts as a checkpoint."""
    assert not os.path.exists(os.path.join(path, "index.safetensors"))


def no_data(path: str, but_of: Iterable[int] = ()) -> None:
    """Live ranks took their files away; only ranks that died may have left some."""
    allowed = {f"r{rank:05d}" for rank in but_of}
    left = (
        [name for name in os.listdir(Path(path) / "data") if name.split("-")[1][:6] not in allowed]
        if (Path(path) / "data").exists()
        else []
    )
    assert not left, left
