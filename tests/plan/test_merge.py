"""The merge of all ranks' columns: every disagreement is a sentence that names tensor and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._core.format.columns import Columns, pad
from holdfast._core.format.digest import digest_many
from holdfast._core.format.index_layout import encode
from holdfast._core.layout.box import Box, whole
from holdfast._core.layout.tensor import CODE_OF, OBJECT
from holdfast._core.plan.agreement import check_vanished
from holdfast._core.plan.merge import Merger
from holdfast.errors import CoverageError, ReplicaMismatch, Vanished
from tests.format.indexes import content, open_bytes
from tests.support.boxes import split, tiles


class Chunk(NamedTuple):
    """What one rank wrote: digests stand for the bytes."""

    name: str
    shape: tuple[int, ...]
    box: Box
    digests: tuple[int, ...] = (1,)
    dtype: str = "float32"
    kind: int = 0


class Seen(NamedTuple):
    """What one rank holds and another writes: one block's digest, or that of all (-1)."""

    name: str
    box: Box
    block: int
    digest: int


def part(rank: int, chunks: list[Chunk], seen: Sequence[Seen] = (), names: Sequence[Chunk] = ()) -> Columns:
    """One rank's embedded index; `names` are listed without a chunk."""
    by_name = {chunk.name: chunk for chunk in [*names, *chunks]}
    order = sorted(by_name)
    chunks = sorted(chunks, key=lambda chunk: (chunk.name, chunk.box))
    dims = max((len(chunk.shape) for chunk in by_name.values()), default=0) or 1
    counts = [sum(chunk.name == name for chunk in chunks) for name in order]
    return Columns(
        names=order,
        dtype=np.asarray([CODE_OF[by_name[n].dtype] for n in order], "u1"),
        kind=np.asarray([by_name[n].kind for n in order], "u1"),
        ndim=np.asarray([len(by_name[n].shape) for n in order], "u1"),
        shape=pad([by_name[n].shape for n in order], dims, 1),
        chunk_end=np.cumsum(counts, dtype="<i8"),
        offset=pad([c.box.offset for c in chunks], dims, 0),
        size=pad([c.box.shape for c in chunks], dims, 1),
        file=np.zeros(len(chunks), "<i4"),
        position=np.arange(len(chunks), dtype="<i8") * 4096,
        block=np.full(len(chunks), 64, "<i8"),
        digest_end=np.cumsum([len(c.digests) for c in chunks], dtype="<i8"),
        digests=np.asarray([d for c in chunks for d in c.digests], "<u8"),
        file_names=[f"data/x-r{rank:05d}.safetensors"],
        file_size=np.asarray([1 << 20], "<i8"),
        file_rank=np.asarray([rank], "<i4"),
        witness_tensor=np.asarray([order.index(s.name) for s in seen], "<i8"),
        witness_offset=pad([s.box.offset for s in seen], dims, 0),
        witness_size=pad([s.box.shape for s in seen], dims, 1),
        witness_block=np.asarray([s.block for s in seen], "<i8"),
        witness_digest=np.asarray([s.digest for s in seen], "<u8"),
    )


def merge(*parts: Columns) -> Columns:
    merger = Merger()
    for rank, columns in enumerate(parts):
        merger.add(rank, columns)
    return merger.finish()


def test_chunks_of_a_grid_stand_row_by_row() -> None:
    pieces = [b for half in split(whole((4, 8)), 1, 2) for b in split(half, 0, 2)]
    merged = merge(
        part(0, [Chunk("w", (4, 8), b) for b in pieces[:3]]), part(1, [Chunk("w", (4, 8), pieces[3])])
    )
    assert merged.offset.tolist() == [[0, 0], [0, 4], [2, 0], [2, 4]]
    assert merged.file.tolist() == [0, 0, 0, 1]


def rows(low: int, high: int, width: int = 8) -> Box:
    return Box((low, 0), (high - low, width))


def w(low: int, high: int, *digests: int) -> Chunk:
    return Chunk("w", (4, 8), rows(low, high), digests or (1,))


W = whole((4, 8))


def test_parts_become_one_index_sorted_by_name_and_box() -> None:
    merged = merge(
        part(0, [w(2, 4, 3), Chunk("z", (), whole(()), (9,))]),
        part(1, [w(0, 2, 5), Chunk("a", (2, 3, 4), whole((2, 3, 4)), (7, 8))]),
    )
    assert merged.names == ["a", "w", "z"]
    assert merged.dims == 3
    assert [merged.shape_of(at) for at in range(3)] == [(2, 3, 4), (4, 8), ()]
    assert merged.chunk_end.tolist() == [1, 3, 4]
    assert merged.offset.tolist() == [[0, 0, 0], [0, 0, 0], [0, 2, 0], [0, 0, 0]]
    assert merged.file_rank[merged.file].tolist() == [1, 1, 0, 0]
    assert merged.digests.tolist() == [7, 8, 5, 3, 9]
    assert merged.digest_end.tolist() == [2, 3, 4, 5]
    assert merged.position.tolist() == [0, 4096, 0, 4096]


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32))
def test_any_division_among_ranks_merges_to_the_same_chunks(ranks: int, tensors: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    parts: list[list[Chunk]] = [[] for _ in range(ranks)]
    every = []
    for at in range(tensors):
        shape = tuple(random.integers(1, 6, int(random.integers(0, 4))).tolist())
        boxes = [whole(shape)] if not shape else list(split(whole(shape), 0, int(random.integers(1, 5))))
        for box in boxes:
            chunk = Chunk(
                f"t{at}", shape, box, tuple(random.integers(0, 99, -(-box.volume * 4 // 64)).tolist())
            )
            parts[int(random.integers(ranks))].append(chunk)
            every.append(chunk)
    merged = merge(*(part(rank, chunks) for rank, chunks in enumerate(parts)))
    alone = merge(part(0, every))
    for name in ("names", "dtype", "ndim", "shape", "chunk_end", "offset", "size", "digests", "digest_end"):
        assert np.array_equal(getattr(merged, name), getattr(alone, name)), name
    for tensor in range(tensors):
        mine = merged.tensor_of_chunk() == tensor
        assert tiles(tuple(merged.shape[tensor].tolist()), merged.offset[mine], merged.size[mine])
    assert content(open_bytes(encode(merged, {})).select())[0] == merged.names


def test_a_gap_names_the_tensor_the_place_and_the_ranks() -> None:
    with pytest.raises(CoverageError) as caught:
        merge(part(0, [w(0, 1)]), part(1, [w(3, 4)]))
    error = caught.value
    assert str(error).startswith(
        "Tensor 'w' of shape [4, 8] is not covered: from index [1, 0] on no rank wrote it, "
        "ranks 0, 1 wrote the rest."
    )
    assert error.details == {"tensor": "w", "kind": "gap", "place": [1, 0], "ranks": [0, 1]}
    with pytest.raises(CoverageError, match=r"no rank wrote it, rank 0 wrote the rest\."):
        merge(part(0, [w(0, 1)]))


def test_a_gap_says_who_holds_copies() -> None:
    seen = Seen("w", W, -1, 5)
    with pytest.raises(CoverageError, match=r"no rank wrote any of it; ranks 1, 2 say they hold copies"):
        merge(part(0, []), part(1, [], [seen], [w(0, 4)]), part(2, [], [seen], [w(0, 4)]))


def test_a_0d_gap_and_a_name_without_data() -> None:
    with pytest.raises(CoverageError, match=r"Tensor 's' of shape \[\] is not covered: its one element"):
        merge(part(0, [], names=[Chunk("s", (), whole(()))]))
    assert merge(part(0, [], names=[Chunk("e", (0, 3), whole((0, 3)))])).names == ["e"]


def test_an_overlap_names_both_ranks() -> None:
    with pytest.raises(CoverageError) as caught:
        merge(part(0, [w(0, 3)]), part(1, []), part(2, [w(2, 4)]))
    assert "'w' of shape [4, 8] is covered twice: from index [2, 0] on ranks 0, 2 wrote it" in str(
        caught.value
    )
    assert caught.value.rank == 0
    assert caught.value.details["kind"] == "overlap"
    with pytest.raises(CoverageError, match=r"covered twice from index \[2, 0\] on by rank 0"):
        merge(part(0, [w(0, 3), w(2, 4)]))


def test_a_shard_outside_names_its_rank() -> None:
    with pytest.raises(
        CoverageError, match=r"'w'.*has a shard of rank 1 that lies outside it, at \[3, 0\]"
    ) as caught:
        merge(part(0, [w(0, 3)]), part(1, [w(3, 5)]))
    assert caught.value.rank == 1


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Chunk("w", (5, 8), rows(2, 5)), r"rank 0 holds float32\[4, 8\], rank 1 float32\[5, 8\]"),
        (Chunk("w", (4, 8, 1), whole((4, 8, 1))), r"rank 1 float32\[4, 8, 1\]"),
        (Chunk("w", (1, 4, 8), whole((1, 4, 8))), r"rank 1 float32\[1, 4, 8\]"),
        (Chunk("w", (4, 8), rows(2, 4), dtype="bfloat16"), r"rank 1 bfloat16\[4, 8\]"),
        (Chunk("w", (9,), whole((9,)), dtype="uint8", kind=OBJECT), "rank 1 an object of 9 bytes"),
    ],
)
def test_disagreeing_shapes_name_both_ranks(other: Chunk, words: str) -> None:
    with pytest.raises(ReplicaMismatch, match=f"Ranks disagree on 'w': .*{words}") as caught:
        merge(part(0, [w(0, 2)]), part(1, [other]))
    assert caught.value.details == {"tensor": "w", "ranks": [0, 1]}
    assert "holdfast.Shard" in caught.value.hint


def total(*digests: int) -> int:
    return digest_many(np.asarray(digests, np.uint64))


def test_replicas_that_agree_pass() -> None:
    full = Seen("w", W, -1, total(5, 6))
    one = Seen("w", W, 1, 6)
    listed = [w(0, 4)]
    merged = merge(part(0, [w(0, 4, 5, 6)]), part(1, [], [full], listed), part(2, [], [one], listed))
    assert merged.names == ["w"]
    assert len(merged.witness_tensor) == 0


@pytest.mark.parametrize(
    ("seen", "how"),
    [
        (Seen("w", W, -1, total(5, 7)), "full"),
        (Seen("w", W, -1, total(5)), "full, fewer blocks"),
        (Seen("w", W, 0, 6), "sample"),
        (Seen("w", W, 1, 5), "sample of the last block"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_replicas_that_differ_name_tensor_and_ranks(seen: Seen, how: str) -> None:
    good = Chunk("v", (2,), whole((2,)), (3,))
    with pytest.raises(ReplicaMismatch) as caught:
        merge(
            part(0, [good]),
            part(1, [w(0, 4, 5, 6)]),
            part(2, [], [seen], [w(0, 4)]),
            part(3, [], [seen], [w(0, 4)]),
        )
    assert "Under the one name 'w' rank 1 and ranks 2, 3 hold different bytes" in str(caught.value)
    assert caught.value.rank == 2
    assert caught.value.details == {"tensor": "w", "ranks": [1, 2, 3], "tensors": ["w"]}
    assert "holdfast.PerRank" in caught.value.hint


def test_several_that_differ_are_counted() -> None:
    chunks = [Chunk(f"t{at}", (2,), whole((2,)), (at,)) for at in range(6)]
    seen = [Seen(f"t{at}", whole((2,)), 0, 99) for at in range(1, 6)]
    with pytest.raises(
        ReplicaMismatch, match=r"'t1' rank 0 and rank 1 .*\(5 such names, also 't2', 't3', 't4'\)"
    ):
        merge(part(0, chunks), part(1, [], seen, chunks))


def test_a_witness_is_compared_with_its_own_piece_only() -> None:
    """Pieces of one tensor by different writers; each witness must find the right one."""
    left, right = rows(0, 2), rows(2, 4)
    merged = merge(
        part(0, [w(0, 2, 5)], [Seen("w", right, -1, total(6))]),
        part(1, [w(2, 4, 6)], [Seen("w", left, -1, total(5))]),
    )
    assert merged.chunk_end.tolist() == [2]
    with pytest.raises(ReplicaMismatch, match="'w' rank 1 and rank 0"):
        merge(
            part(0, [w(0, 2, 5)], [Seen("w", right, -1, total(5))]),
            part(1, [w(2, 4, 6)], [Seen("w", left, -1, total(5))]),
        )


def test_vanished_names_are_listed_with_who_wrote_them() -> None:
    writers = {"a.weight": [3], "b": []}
    with pytest.raises(Vanished) as caught:
        check_vanished(
            ["a.weights", "c"], ["a.weight", "b", "c"], "the checkpoint run/step-1", lambda n: writers[n]
        )
    text = str(caught.value)
    assert "2 names that the checkpoint run/step-1 has are not in this save" in text
    assert "'a.weight' (last written by rank 3); 'b'." in text
    assert "The nearest name that is there is 'a.weights'" in text
    assert "expected=None" in caught.value.hint
    assert caught.value.rank == 3
    assert caught.value.details == {"names": ["a.weight", "b"]}


def test_many_vanished_names_are_cut_and_one_is_singular() -> None:
    with pytest.raises(Vanished, match=r"^30 names that .*; and more\.") as caught:
        check_vanished([], [f"n{at:02d}" for at in range(30)], "expected=", lambda name: [])
    assert len(caught.value.details["names"]) == 30
    with pytest.raises(Vanished, match=r"^1 name that expected= has is not"):
        check_vanished(["b"], ["a"], "expected=", lambda name: [])
    check_vanished(["a", "b"], ["a"], "expected=", lambda name: [])


def test_a_merge_of_nothing() -> None:
    assert merge().names == []
    assert merge(part(0, []), part(1, [])).file_names == [
        "data/x-r00000.safetensors",
        "data/x-r00001.safetensors",
    ]
