"""Digest blocks: one rule, in a scalar and a vector form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._core.format.digest import (
    MAX_BLOCK,
    MIN_BLOCK,
    block_counts,
    block_sizes,
    digest,
    digest_many,
    hex_digest,
)

sizes = st.one_of(
    st.integers(0, 1 << 20),
    st.integers(0, 1 << 40),
    st.sampled_from([count * MIN_BLOCK + more for count in (1, 2, 4, 8) for more in (-1, 0, 1)]),
)
row_sizes = st.one_of(
    st.integers(0, 1 << 12), st.integers(0, 1 << 24), st.sampled_from([MAX_BLOCK, MAX_BLOCK + 1])
)


def block_size(nbytes: int, row: int) -> int:
    return int(block_sizes(np.asarray([nbytes]), np.asarray([row]))[0])


@settings(max_examples=200)
@given(sizes, row_sizes)
def test_a_block_is_within_bounds_and_whole_rows(nbytes: int, row: int) -> None:
    block = block_size(nbytes, row)
    assert block >= 1
    if nbytes < 2 * MIN_BLOCK:
        assert block == max(nbytes, 1)
        return
    assert MIN_BLOCK <= block < 2 * MAX_BLOCK
    if 0 < row <= MAX_BLOCK:
        assert block % row == 0
    count = int(block_counts(np.asarray([nbytes]), np.asarray([block]))[0])
    assert (count - 1) * block < nbytes <= count * block


@pytest.mark.parametrize(
    ("rows", "row"), [(4096, 1024), (768, 8192), (2048, 3072), (1536, 4096), (14336, 8192)]
)
def test_eighths_of_a_matrix_lie_on_block_boundaries(rows: int, row: int) -> None:
    assert rows * row // 8 % block_size(rows * row, row) == 0


def test_an_empty_chunk_has_no_block() -> None:
    nothing = np.asarray([0])
    assert block_counts(nothing, block_sizes(nothing, nothing)).tolist() == [0]


def test_known_values() -> None:
    """xxh3-64 as any other implementation gives it."""
    assert hex_digest(digest(b"")) == "2d06800538d394c2"
    assert hex_digest(digest(b"a")) == "e6c632b61e964e1f"
    two = np.asarray([1, 2**64 - 1], np.uint64)
    assert digest_many(two) == digest(two.astype("<u8").tobytes())
    assert digest_many(two) == digest_many(two.astype(">u8"))
    assert digest_many(two) != digest_many(two[::-1])
