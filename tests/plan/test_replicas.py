"""The replica rule: every piece has exactly one writer, evenly, whoever evaluates it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._core.layout.box import Box, whole
from holdfast._core.plan.replicas import cut, first_writer, piece, shares
from holdfast._core.plan.shard_table import contiguous_at
from tests.support.boxes import tiles

MiB = 1 << 20


@st.composite
def shards(draw: st.DrawFn) -> Box:
    dims = draw(st.integers(0, 3))
    return Box(
        tuple(draw(st.integers(0, 50)) for _ in range(dims)),
        tuple(draw(st.integers(1, 3000) if draw(st.booleans()) else st.just(1)) for _ in range(dims)),
    )


@settings(max_examples=300)
@given(
    st.text(max_size=5),
    shards(),
    st.integers(1, 70) | st.sampled_from([127, 128, 200]),
    st.integers(1, 4096),
    st.sampled_from([1, 2, 4, 8]),
)
def test_pieces_tile_and_each_has_one_writer(name: str, box: Box, count: int, split: int, item: int) -> None:
    nbytes = box.volume * item
    axis, parts = cut(box, nbytes, count, split)
    every = [piece(box, axis, parts, number) for number in range(parts)]
    assert 1 <= parts <= count
    inside = [p.relative_to(box.offset) for p in every]
    offsets = np.asarray([p.offset for p in inside], np.int64).reshape(parts, -1)
    sizes = np.asarray([p.shape for p in inside], np.int64).reshape(parts, -1)
    assert tiles(box.shape, offsets, sizes)
    assert all(contiguous_at(box.shape, p) is not None for p in inside)  # one write each
    for witness_all in (False, True):
        views = [
            list(shares(name, box, nbytes, (index, count), split, witness_all)) for index in range(count)
        ]
        written = [part for view in views for part, writes in view if writes]
        seen = [part for view in views for part, writes in view if not writes]
        assert sorted(written) == sorted(every)  # each by one, whoever is asked
        assert all(sum(writes for _, writes in view) <= 1 for view in views)
        assert all(len({part for part, _ in view}) == len(view) for view in views)
        assert sorted(seen) == sorted(every * ((count - 1) if witness_all else min(count - 1, 1)))
        first = views[first_writer(name, box, count)]
        assert (every[0], True) in first


def test_a_large_shard_is_split_evenly_and_a_small_one_not_at_all() -> None:
    box = whole((4096, 1024))
    axis, parts = cut(box, box.volume * 4, 7, MiB)
    sizes = [piece(box, axis, parts, number).volume * 4 for number in range(parts)]
    assert len(sizes) == 7
    assert max(sizes) - min(sizes) <= 4096
    assert cut(box, box.volume * 4, 7, box.volume * 4)[1] == 1
    assert piece(box, 0, 1, 0) == box
    assert cut(whole(()), 8, 4, 1) == (0, 1)
    assert cut(whole((1, 1, 9)), 36, 4, 1) == (2, 4)
    assert cut(whole((3, 1000)), 12_000, 8, 1) == (0, 3)


def writers(name: str, box: Box, nbytes: int, ranks: int) -> list[tuple[int, Box]]:
    """(rank, piece) of all that is written, as each rank says of itself."""
    return [
        (rank, part)
        for rank in range(ranks)
        for part, writes in shares(name, box, nbytes, (rank, ranks), MiB, False)
        if writes
    ]


@pytest.mark.parametrize("ranks", [4, 7, 16])
def test_a_dense_qwen3_is_spread_evenly(ranks: int) -> None:
    """Names and shapes of a Qwen3-8B-like model, bf16, replicated over data-parallel ranks."""
    tensors = {"embed": (151936, 4096), "head": (151936, 4096), "norm": (4096,)}
    for layer in range(36):
        at = f"model.layers.{layer}."
        tensors |= {
            at + "q": (4096, 4096), at + "k": (1024, 4096), at + "v": (1024, 4096), at + "o": (4096, 4096),
            at + "gate": (12288, 4096), at + "up": (12288, 4096), at + "down": (4096, 12288),
            at + "n1": (4096,), at + "n2": (4096,), at + "qn": (128,), at + "kn": (128,),
        }  # fmt: skip
    written = np.zeros(ranks, np.int64)
    count = np.zeros(ranks, np.int64)
    for name, shape in tensors.items():
        box = whole(shape)
        for writer, part in writers(name, box, box.volume * 2, ranks):
            written[writer] += part.volume * 2
            count[writer] += 1
    assert written.sum() == sum(2 * int(np.prod(shape)) for shape in tensors.values())
    assert written.max() / written.mean() < 1.03
    assert count.max() / count.mean() < 1.15


def test_many_small_shards_are_spread_at_random_but_evenly() -> None:
    """Per-expert tensors below the split size: a rank's share is a sum of many small ones."""
    ranks = 8
    written = np.zeros(ranks, np.int64)
    for layer in range(48):
        for expert in range(128):
            box = whole((768, 256))
            ((writer, _),) = writers(f"layers.{layer}.experts.{expert}.w", box, box.volume * 2, ranks)
            written[writer] += 1
    assert written.sum() == 48 * 128
    assert written.max() / written.mean() < 1.08


def test_few_of_many_replicas_write_and_their_neighbours_are_witnesses() -> None:
    """A load opens a file for each writer; and who writes, and who looks, are spread over all hosts."""
    ranks, wrote, seen = 5000, set(), set()
    for rank in range(ranks):
        for number in range(20):
            box = whole((8192, 1024))
            for _, writes in shares(f"layers.{number}.w", box, box.volume * 4, (rank, ranks), MiB, False):
                (wrote if writes else seen).add(rank)
    assert wrote == set(range(0, 64 * 78, 78))
    assert seen == {rank + 1 for rank in wrote}


def test_the_rule_is_fixed() -> None:
    """Other versions of Holdfast in one job must choose alike: these values never change."""
    assert [first_writer(f"layers.{i}.w", whole((4, 4)), 8) for i in range(8)] == [1, 3, 2, 2, 4, 2, 7, 1]
