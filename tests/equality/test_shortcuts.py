"""Sums that are taken together, or by columns, are those that are taken one by one, row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast._core.format.fingerprint import box_sums, sums_by_columns, sums_of_each, text_of
from holdfast._core.layout.box import Box, whole
from tests.support.threads import on_ranks

SIZES = st.sampled_from([1, 2, 4, 8])
LINE = 4096 * 8
"""Bytes along the last axis that have weights of their own."""


@given(SIZES, st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7)), max_size=3), st.integers(1, 9))
def test_several_tensors_have_the_sums_of_each(size: int, sides: list[tuple[int, int]], many: int) -> None:
    box = Box(tuple(low for low, _ in sides), tuple(side for _, side in sides))
    data = np.random.default_rng(many).integers(0, 256, (many, box.volume * size), np.uint8)
    each = [box_sums(one.tobytes(), size, box) for one in data]
    assert (sums_of_each(data, size, box) == each).all()


@given(SIZES, st.integers(1, 40), st.integers(1, 300), st.integers(0, 9), st.integers(-40, 70), st.booleans())
def test_columns_have_the_sums_of_rows(
    size: int, height: int, width: int, row: int, column: int, at_line: bool
) -> None:
    column = LINE // size + column if at_line else abs(column)
    box = Box((3, row, column), (1, height, width))
    columns = np.random.default_rng(width).integers(0, 256, (width, height * size), np.uint8).view(f"u{size}")
    assert (sums_by_columns(columns, box) == box_sums(np.ascontiguousarray(columns.T), size, box)).all()


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float32, torch.complex64]
)
def test_a_state_has_the_same_fingerprints_in_any_memory(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(1)
    state = {
        **{f"small {i}": torch.randn(17, generator=random).to(dtype) for i in range(5)},
        **{f"empty {i}": torch.empty(0, 3, dtype=dtype) for i in range(3)},
        **{f"scalar {i}": torch.randn((), generator=random).to(dtype) for i in range(3)},
        "matrix": torch.randn(33, 70, generator=random).to(dtype),
        "stack": torch.randn(3, 20, 300, generator=random).to(dtype),
    }
    turned = {name: one.mT.contiguous().mT if one.ndim > 1 else one for name, one in state.items()}
    spaced = {name: torch.stack([one, one], -1)[..., 0] for name, one in state.items()}
    one_by_one = {name: holdfast.fingerprint({name: one})[name] for name, one in state.items()}
    for other in (state, turned, spaced):
        assert holdfast.fingerprint(other) == one_by_one
    shard = holdfast.Shard(turned["matrix"][:, 3:], (40, 73), (5, 6))
    plain = holdfast.Shard(state["matrix"][:, 3:].contiguous(), (40, 73), (5, 6))
    rest = {"w": [holdfast.Shard(torch.zeros(5, 73, dtype=dtype), (40, 73), (0, 0))]}
    rest["w"] += [holdfast.Shard(torch.zeros(35, 6, dtype=dtype), (40, 73), (5, 0))]
    rest["w"] += [holdfast.Shard(torch.zeros(2, 67, dtype=dtype), (40, 73), (38, 6))]
    found = [holdfast.fingerprint({"w": [*rest["w"], one]}) for one in (shard, plain)]
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_tensors_are_rounded_together_as_one_by_one(dtype: torch.dtype) -> None:
    """Each has a fate of its own in a less exact dtype, and none is told of its neighbours."""
    usual = torch.linspace(0.1, 2, 200, dtype=dtype)
    halves = torch.arange(200, dtype=dtype) / 2
    odd = torch.tensor([3.0, float("nan"), 1e20, 1e-20], dtype=dtype)
    state = {
        "usual": usual,
        "exact": halves,
        "exact but for the last": torch.cat([halves[1:], usual[1:2]]),
        **{f"with {value}": torch.cat([usual[1:], value[None]]) for value in odd},
    }
    found = holdfast.fingerprint(state)
    assert found == {name: holdfast.fingerprint({name: one})[name] for name, one in state.items()}
    told = {name: one.rounded["float16"] for name, one in found.items()}
    assert [name for name, one in told.items() if not one.inexact] == ["exact"]
    assert [name for name, one in told.items() if one.has_nan] == ["with nan"]
    assert {name: one.lost for name, one in told.items() if one.lost} == {
        f"with {odd[2]}": ("become infinite",),
        f"with {odd[3]}": ("become zero",),
    }


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
OTHERS = (torch.int8, torch.bool, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64)
SPECIAL = (
    *(float("nan"), float("inf"), -0.0, 0.0, 1e39, 65519.0, 65520.0, 3.4e38),
    *(2.0**-24, 2.0**-25, 2.0**-126, 2.0**-133, 2.0**-135, 1e-46),
)


def by_definition(tensor: torch.Tensor) -> Any:
    """One tensor at a time, from all of its bytes."""

    def value(one: torch.Tensor) -> str:
        one = one.clone(memory_format=torch.contiguous_format)
        data = one.reshape(-1).view(torch.uint8).numpy() if one.numel() else np.empty(0, np.uint8)
        return text_of(box_sums(data, one.itemsize, whole(tuple(one.shape))))

    rounded, nan = {}, tensor.isnan()
    for dtype in FLOATS if tensor.dtype in FLOATS[:2] else ():
        if dtype.itemsize < tensor.itemsize:
            made = tensor.to(dtype).masked_fill(nan, float("nan"))
            unlike = (made.to(tensor.dtype) != tensor) & ~nan
            lost = {"become infinite": made.isinf(), "become zero": made == 0}
            words = tuple(word for word, mask in lost.items() if (mask & unlike).any())
            rounded[str(dtype)[6:]] = (value(made), bool(unlike.any()), words, bool(nan.any()))
    return value(tensor), rounded


MEMORY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row-major": torch.Tensor.contiguous,
    "a parameter": lambda one: torch.nn.Parameter(one, requires_grad=one.dtype in FLOATS),
    "transposed": lambda one: one.mT.contiguous().mT if one.ndim > 1 else one,
    "spaced": lambda one: torch.stack([one, one], -1)[..., 0] if one.itemsize > 1 else one,
    "of another": lambda one: torch.cat([one, one])[: len(one)],
}


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(2 * FLOATS + OTHERS),
    st.lists(st.sampled_from([0, 1, 2, 7, 64, 65, 300]), min_size=1, max_size=3),
    st.lists(st.sampled_from(sorted(MEMORY)), min_size=1, max_size=6),
    st.integers(0, 4),
    st.sampled_from(["whole", "cut", "copies"]),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_tensors_that_are_alike_have_the_fingerprints_of_the_definition(
    dtype: torch.dtype,
    shape: list[int],
    memory: list[str],
    special: int,
    layout: str,
    ranks: int,
    seed: int,
) -> None:
    random, state = torch.Generator().manual_seed(seed), {}
    for number, place in enumerate(memory):
        one = torch.randn(shape, generator=random, dtype=torch.float64)
        one = one.half().bfloat16().double() if number % 2 else one  # exact in each dtype
        for _ in range(special if dtype in FLOATS and one.numel() else 0):
            at, which = (
                int(torch.randint(many, (), generator=random)) for many in (one.numel(), len(SPECIAL))
            )
            one.view(-1)[at] = SPECIAL[which]
        state[f"w{number}"] = MEMORY[place](one.to(dtype))

    def job(roster: Any) -> Any:
        first, stop = (shape[0] * at // ranks for at in (roster.rank, roster.rank + 1))
        mine: dict[str, object] = dict(state)
        if layout == "cut":
            offset = (first, *[0] * (len(shape) - 1))
            mine = {
                name: holdfast.Shard(one[first:stop], tuple(shape), offset) for name, one in state.items()
            }
        elif layout == "copies":
            replica = (roster.rank, ranks)
            mine = {
                name: holdfast.Shard(one, tuple(shape), (0,) * len(shape), replica)
                for name, one in state.items()
            }
        return holdfast.fingerprint(mine, job=holdfast.Job(roster=roster, timeout=30))

    for found in on_ranks(ranks, job):
        assert list(found) == sorted(state)
        for name, one in found.items():
            rounded = {
                key: (own.value, own.inexact, own.lost, own.has_nan) for key, own in one.rounded.items()
            }
            assert (one.value, rounded) == by_definition(state[name].detach()), name
            assert (one.dtype, one.shape) == (str(dtype)[6:], tuple(shape))
