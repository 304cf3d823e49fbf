"""Methods of the user's that issue collectives are called in one order on all ranks, whatever the order of
their dicts is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast._core.state.flatten import flatten
from tests.support.processes import ProcessWorld


class Gathering:
    """Its methods meet the other ranks, and say which of its kind has met them: a rank in another one would
    be wrong, or hang."""

    def __init__(self, name: str, calls: list[str], inner: Any = None) -> None:
        self.name, self.calls, self.inner = name, calls, inner

    def meet(self, method: str) -> None:
        self.calls.append(f"{self.name}.{method}")
        mine = torch.tensor([len(self.name) * 100 + sum(map(ord, self.name))])
        if self.name.endswith("sum"):
            dist.all_reduce(mine)
            assert int(mine) % dist.get_world_size() == 0
        else:
            there = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(there, mine)
            assert all(torch.equal(found, mine) for found in there)

    def state_dict(self) -> dict[str, Any]:
        self.meet("state_dict")
        return {"value": 1} if self.inner is None else {"value": 1, "inner": self.inner}

    def load_state_dict(self, state: Any) -> None:
        self.meet("load_state_dict")


def in_another_order(rank: int, path: str) -> list[str]:
    """torch's test_different_ordered_state_dict_keys, with collectives in both methods, and deeper down."""
    calls: list[str] = []
    state = {
        "a": Gathering("a", calls),
        "b": {"y": Gathering("b.y sum", calls), "x": [Gathering("b.x", calls), torch.ones(1)], "n": 1},
        "c": Gathering("c sum", calls, {"p": Gathering("c.p", calls), "o": Gathering("c.o sum", calls)}),
        "d": torch.ones(2),
    }
    if rank:
        inner = state["c"].inner  # type: ignore[attr-defined]
        state["c"].inner = dict(reversed(inner.items()))  # type: ignore[attr-defined]
        state["b"] = dict(reversed(state["b"].items()))  # type: ignore[attr-defined]
        state = dict(reversed(state.items()))
    holdfast.save(state, path, job=holdfast.Job(timeout=60, stall_timeout=20))
    holdfast.load(state, path, job=holdfast.Job(timeout=60, stall_timeout=20))
    return calls


@pytest.fixture(scope="module")
def two() -> Iterator[ProcessWorld]:
    with ProcessWorld(2) as world:
        yield world


def test_dicts_in_another_order_on_each_rank(two: ProcessWorld, tmp_path: Path) -> None:
    one, other = two.run(in_another_order, str(tmp_path))
    assert one == other
    asked = ["a", "b.x", "b.y sum", "c sum", "c.o sum", "c.p"]
    told = ["a", "b.x", "b.y sum", "c.o sum", "c.p", "c sum"]
    assert one == [
        *(f"{name}.state_dict" for name in asked * 2),
        *(f"{name}.load_state_dict" for name in told),
    ]


def test_leaves_are_in_the_order_of_the_state_all_the_same() -> None:
    state = {"z": {"b": 1, "a": [torch.ones(1)]}, "y": torch.ones(1), "x": {"m": {}}, 3: 4, "10": 5}
    assert [leaf.name for leaf in flatten(state, 0).leaves] == ["z.b", "z.a.0", "y", "x.m", "3", "10"]
