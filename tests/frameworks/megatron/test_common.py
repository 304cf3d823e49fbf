"""Common state that differs between ranks: said as megatron-core says it, without its broadcast, and never a
failed save."""

from __future__ import annotations

import argparse
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tests.frameworks.megatron.preload  # noqa: F401 (imports megatron-core without its warnings)
from holdfast._core.protocol.job import Job
from holdfast._frameworks.megatron.common import compare, digests
from holdfast.errors import HoldfastError
from tests.frameworks.megatron.cpu import use_cpu
from tests.support.processes import ProcessWorld

JOB = Job(timeout=60, stall_timeout=30)


class Heard(logging.Handler):
    """What a logger says."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []
        self._logger = logging.getLogger(name)

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())

    def __enter__(self) -> list[str]:
        self._logger.addHandler(self)
        return self.said

    def __exit__(self, *error: object) -> None:
        self._logger.removeHandler(self)


def common_of(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "iteration": 7,
        "args": argparse.Namespace(lr=0.1, rank=rank if rank == 4 else 0),
        "scheduler": {"lr": 0.1, "betas": [0.9, 0.999 if rank != 5 else 0.95]},
        "table": np.arange(4) if rank != 2 else np.arange(4) + 1,
        "rng": torch.full((4,), 1.0 if rank != 3 else 2.0),
        "local_rank": rank % 4,
    }
    if rank == 0:
        found["scheduler"]["only_here"] = None
    if rank in (5, 6):
        found["only_there"] = {"a": 1}
    return found


def without_local_rank(common: dict[str, Any]) -> dict[str, Any]:
    del common["local_rank"]  # what is stored must not change
    common["scheduler"].pop("only_here", None)
    return common


def save_common(rank: int, folder: str) -> dict[str, list[str]]:
    """What ranks log in saves of the same state; `stock` is megatron-core's own check."""
    use_cpu()
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.validation import _validate_common_state_dict

    from holdfast import megatron

    def save(name: str, **how: Any) -> list[str]:
        state = {
            "w": ShardedTensor.from_rank_offsets("w", torch.full((2,), float(rank)), (0, rank, 8)),
            **common_of(rank),
        }
        with Heard("holdfast") as said:
            request = megatron.save(state, f"{folder}/{name}", **how, job=JOB)
            for finalize in request.finalize_fns if request is not None else ():
                finalize()
        assert "local_rank" in state
        return said

    with Heard("megatron.core.dist_checkpointing.validation") as stock:
        _validate_common_state_dict(common_of(rank))
    return {
        "stock": stock,
        "default": save("default"),
        "async": save("async", async_sharded_save=True),
        "hook": save("hook", preprocess_common_before_consistancy_check=without_local_rank),
        "off": save("off", validate_access_integrity=False),
    }


def test_the_ranks_that_megatron_core_names_are_named_with_a_key(
    mcore_world: ProcessWorld, tmp_path: Path
) -> None:
    from holdfast import megatron

    found = mcore_world.run(save_common, str(tmp_path), timeout=120)
    ours = found[0]["default"]
    assert all(said["default"] == said["async"] == said["hook"] == [] for said in found[1:])
    assert found[0]["async"] == ours
    by_rank = {}
    for sentence in ours:
        ranks, key = re.fullmatch(
            r"Ranks? ([\d, ]+) common state dict differs from rank 0 common state dict. "
            r"First differing key: (.*)",
            sentence,
        ).groups()  # type: ignore[union-attr]
        by_rank |= dict.fromkeys(map(int, ranks.split(", ")), key)
    # megatron-core says so on each rank; nothing may be said of a rank of which it says nothing.
    assert set(by_rank) == {rank for rank, said in enumerate(found) if said["stock"]}
    for rank, key in by_rank.items():
        assert f"({key}," in found[rank]["stock"][0]

    assert found[0]["hook"] == [
        f"{ranks} common state dict differs from rank 0 common state dict. First differing key: '{key}'"
        for ranks, key in (
            ("Rank 2", "table"),
            ("Rank 3", "rng"),
            ("Rank 4", "args"),
            ("Ranks 5, 6", "only_there"),
        )
    ]
    assert found[0]["off"] == []
    for name in ("default", "async", "hook", "off"):
        stored = megatron.load_common_state_dict(tmp_path / name)
        assert set(stored) == set(common_of(0))
        assert "only_here" in stored["scheduler"]


def raising(rank: int, folder: str) -> str:
    use_cpu()
    from megatron.core.dist_checkpointing import ShardedTensor

    from holdfast import megatron

    def check(common: Any) -> Any:
        if rank == 3:
            raise KeyError("optimizer")
        return common

    state = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, rank, 8)), "iteration": 1}
    try:
        megatron.save(state, folder, preprocess_common_before_consistancy_check=check, job=JOB)
    except HoldfastError as error:
        return str(error)
    return "saved"


def test_a_function_that_raises_on_one_rank_fails_the_save_on_all(
    mcore_world: ProcessWorld, tmp_path: Path
) -> None:
    for said in mcore_world.run(raising, str(tmp_path / "a")):
        assert "failed on rank 3" in said
        assert "KeyError: 'optimizer'" in said


# -- the parts, alone -----------------------------------------------------------------------


def compared(states: dict[int, Any]) -> list[str]:
    """The warnings of the lowest rank."""
    with Heard("holdfast") as said:
        compare({rank: digests(state) for rank, state in states.items()})
    return said


class Opaque:
    """What it says of itself names its place in memory."""


def test_values_that_are_equal_are_the_same() -> None:
    one = {"a": 1, "b": [1.0, {"c": {"x", "y", "z"}}], "d": float("nan"), 5: (b"x", None), "e": Opaque()}
    other = {5: (b"x", None), "e": Opaque(), "d": float("nan"), "b": [1.0, {"c": {"z", "y", "x"}}], "a": 1}
    one["t"], other["t"] = (torch.eye(3)[::2].t().t(), torch.eye(3)[::2].contiguous())
    assert compared({0: one, 1: other}) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        ("1", 1),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)),
        (torch.tensor(0.0), torch.tensor(1.0)),
        (np.zeros(5000), np.eye(1, 5000)[0]),
        (list(range(5000)), [*range(4999), -1]),
        (argparse.Namespace(a=1), argparse.Namespace(a=2)),
        ({"x": 1}, [1]),
        (Opaque(), 1),
        (torch.float32, torch.float16),
    ],
)
def test_values_that_differ_are_found(one: Any, other: Any) -> None:
    assert compared({4: {"key": one}, 6: {"key": other}}) == [
        "Rank 6 common state dict differs from rank 4 common state dict. First differing key: 'key'"
    ]


def test_what_cannot_be_compared_fails_nothing() -> None:
    on_meta = {"a": torch.zeros(2, device="meta"), "b": 1}
    assert compared({0: on_meta, 1: on_meta}) == []
    assert "'b'" in compared({0: on_meta, 1: {**on_meta, "b": 2}})[0]


def test_many_ranks_that_differ_alike_are_one_line() -> None:
    assert compared({rank: {"differs": rank} for rank in range(60)}) == [
        "Ranks 1, 2, 3, 4, 5, 6, 7, 8, ... common state dict differs from rank 0 common state dict. "
        "First differing key: 'differs'"
    ]
