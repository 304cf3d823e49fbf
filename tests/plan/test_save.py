"""What a rank writes: all ranks' plans together write each byte once; panels tile and align."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._core.base.options import Options
from holdfast._core.format.digest import block_sizes
from holdfast._core.layout.box import Box, whole
from holdfast._core.layout.tensor import TensorSpec
from holdfast._core.plan.replicas import shares
from holdfast._core.plan.save import PANEL_CHUNK, PANEL_ROW, plan_save
from holdfast._core.plan.shard_table import ShardTable, contiguous_at, describe
from holdfast.errors import BadInput
from tests.plan.shard_tables import NoMemory, boxes_of, holding
from tests.support.boxes import tiles

CUT = Options(columns=("*",))
DTYPES = {"uint8": 1, "bfloat16": 2, "float32": 4, "complex128": 16}
shapes = st.lists(st.sampled_from([0, 1, 2, 3, 7, 8, 64, 256, 1000, 1024, 4096]), max_size=3).filter(
    lambda shape: np.prod(shape) <= 1 << 23
)


@settings(max_examples=150)
@given(
    st.lists(shapes, min_size=1, max_size=5),
    st.integers(1, 9),
    st.sampled_from(list(DTYPES)),
    st.sampled_from([(), ("*",), ("t1",)]),
)
def test_all_replicas_together_write_each_element_once(
    several: list[list[int]], count: int, dtype: str, columns: tuple[str, ...]
) -> None:
    table = holding(*((f"t{at}", tuple(shape), None) for at, shape in enumerate(several)), dtype=dtype)
    options = Options(split_bytes=1 << 16, columns=columns)
    plans = [plan_save(table, [(index, count)] * len(table), options) for index in range(count)]
    for row, shape in enumerate(several):
        found = [boxes_of(plan.chunks, row) for plan in plans]
        offsets, sizes = (np.concatenate([pair[k] for pair in found]) for k in (0, 1))
        padded = (1,) * (plans[0].dims - len(shape)) + tuple(shape)
        assert tiles(padded, offsets, sizes)
    for plan in plans:
        assert (plan.chunks.nbytes == plan.chunks.size.prod(axis=1) * DTYPES[dtype]).all()
        assert (plan.chunks.nbytes > 0).all()


@settings(max_examples=60)
@given(
    shapes.filter(lambda s: bool(np.prod(s))),
    st.integers(2, 6),
    st.booleans(),
    st.sampled_from(["auto", "full", "sample", "off"]),
)
def test_witnesses_are_exactly_what_others_write(
    shape: list[int], count: int, plain: bool, check: str
) -> None:
    table = holding(("t", tuple(shape), None), plain=plain)
    options = Options(split_bytes=1 << 16, check_replicas=check)
    plans = [plan_save(table, [(index, count)], options) for index in range(count)]

    def rows(planned: object) -> list[tuple[tuple[int, ...], ...]]:
        return sorted(
            zip(map(tuple, planned.offset.tolist()), map(tuple, planned.size.tolist()), strict=True)
        )  # type: ignore[attr-defined]

    written = sorted(row for plan in plans for row in rows(plan.chunks))
    seen = sorted(row for plan in plans for row in rows(plan.witnesses))
    if check == "off":
        assert not seen
    elif check == "full" or (check == "auto" and plain):
        assert seen == sorted(written * (count - 1))
    else:
        assert seen == written
    for plan in plans:
        assert set(rows(plan.witnesses)).isdisjoint(rows(plan.chunks))
        assert (plan.witness_full == (check == "full" or (check == "auto" and plain))).all()


@pytest.mark.parametrize("count", [2, 3, 6, 150])
@pytest.mark.parametrize("check", ["auto", "full"])
def test_many_rows_at_once_follow_the_rule_for_one(count: int, check: str) -> None:
    """`plan_save` has the rule of `shares` a second time, for small rows: both must say the same."""
    table = holding(*((f"expert.{number}", (8, 4), None) for number in range(40)))
    options = Options(check_replicas=check)
    for index in range(count):
        plan = plan_save(table, [(index, count)] * len(table), options)
        for row, (spec, box) in enumerate(zip(table.specs, table.boxes, strict=True)):
            said = list(shares(spec.name, box, 128, (index, count), options.split_bytes, check == "full"))
            for planned, writes in ((plan.chunks, True), (plan.witnesses, False)):
                mine = planned.row == row
                got = [
                    Box(tuple(offset), tuple(size))
                    for offset, size in zip(
                        planned.offset[mine].tolist(), planned.size[mine].tolist(), strict=True
                    )
                ]
                assert got == [part for part, writing in said if writing == writes]


def test_column_panels_are_eight_where_rows_are_wide_enough() -> None:
    """Each panel is a tensor-parallel slice; its rows are no shorter than PANEL_ROW bytes."""
    for width, expected in ((4096, 8), (512, 8), (256, 4), (128, 2), (64, 1), (1004, 4), (1001, 1)):
        table = holding(("w", (8192, width), None))
        plan = plan_save(table, [(0, 1)], CUT).chunks
        assert len(plan.row) == expected, width
        assert tiles((8192, width), plan.offset, plan.size)
        if expected > 1:
            assert (plan.size[:, -1] * 4 >= PANEL_ROW).all()
            assert len(set(plan.size[:, -1].tolist())) == 1
            assert (plan.size[:, 0] == 8192).all()


@pytest.mark.parametrize("shape", [(PANEL_CHUNK,), (1, PANEL_CHUNK), (1, 1, PANEL_CHUNK), (16, 1024)])
def test_vectors_and_small_matrices_stay_whole(shape: tuple[int, ...]) -> None:
    assert len(plan_save(holding(("w", shape, None)), [(0, 1)], CUT).chunks.row) == 1


def test_only_the_matrices_that_are_named_are_cut() -> None:
    table = holding(("a.fc2", (4096, 4096), None), ("a.fc1", (4096, 4096), None))
    assert len(plan_save(table, [(0, 1)] * 2, Options()).chunks.row) == 2
    assert plan_save(table, [(0, 1)] * 2, Options(columns=("*.fc2",))).chunks.row.tolist() == [0] * 8 + [1]


def test_stacked_experts_are_cut_along_their_last_axis() -> None:
    table = holding(("w", (128, 768, 2048), Box((64, 0, 0), (64, 768, 2048))))
    plan = plan_save(table, [(0, 1)], CUT).chunks
    assert len(plan.row) == 8
    assert tiles((64, 768, 2048), plan.offset - [64, 0, 0], plan.size)


def test_writer_and_witness_cut_alike() -> None:
    """A witness is compared with the chunk of the very same box, panels included."""
    table = holding(("w", (2048, 2048), None))
    writer, other = (
        plan_save(table, [(index, 2)], Options(split_bytes=1 << 30, columns=("w",))) for index in (0, 1)
    )
    if not len(writer.chunks.row):
        writer, other = other, writer
    assert len(writer.chunks.row) == 8
    assert sorted(other.witnesses.offset.tolist()) == sorted(writer.chunks.offset.tolist())
    assert other.witnesses.block.tolist() == writer.chunks.block.tolist()


@settings(max_examples=60)
@given(st.lists(st.tuples(shapes, st.sampled_from(list(DTYPES))), min_size=1, max_size=6))
def test_widest_elements_come_first_so_that_all_is_aligned(rows: list[tuple[list[int], str]]) -> None:
    table = ShardTable()
    for at, (shape, dtype) in enumerate(rows):
        one = holding((f"t{at}", tuple(shape), None), dtype=dtype)
        table.add(one.specs[0], one.boxes[0], None, False, NoMemory())
    plan = plan_save(table, [(0, 1)] * len(table), Options()).chunks
    starts = np.cumsum(plan.nbytes) - plan.nbytes
    for start, row in zip(starts.tolist(), plan.row.tolist(), strict=True):
        assert start % DTYPES[rows[row][1]] == 0
    for block, nbytes, size in zip(
        plan.block.tolist(), plan.nbytes.tolist(), plan.size.tolist(), strict=True
    ):
        first = next((s for s in size if s > 1), 1)
        assert block == block_sizes(np.asarray([nbytes]), np.asarray([nbytes // first]))[0]


def test_a_plan_of_nothing() -> None:
    plan = plan_save(ShardTable(), [], Options())
    assert not len(plan.chunks.row)
    assert not len(plan.witnesses.row)
    empty = plan_save(holding(("e", (0, 4), None)), [(0, 3)], Options())
    assert not len(empty.chunks.row)


def test_a_holding_that_contradicts_itself_is_refused() -> None:
    table = holding(("a", (4, 4), Box((0, 0), (2, 4))), ("a", (4, 5), Box((2, 0), (2, 4))), rank=3)
    with pytest.raises(
        BadInput, match=r"Rank 3 holds two tensors under the name 'a': float32\[4, 4\] and float32\[4, 5\]"
    ):
        table.check()
    table = holding(("a", (4, 4), Box((2, 0), (3, 4))))
    with pytest.raises(BadInput, match=r"offset \(2, 0\) and shape \(3, 4\) of 'a'.*global shape \(4, 4\)"):
        table.check()
    holding(("a", (4, 4), Box((0, 0), (2, 4))), ("a", (4, 4), Box((2, 0), (2, 4)))).check()


@settings(max_examples=200)
@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_contiguous_at_is_true_exactly_where_elements_follow_each_other(
    shape: list[int], data: st.DataObject
) -> None:
    offset = tuple(data.draw(st.integers(0, s - 1)) for s in shape)
    box = Box(offset, tuple(data.draw(st.integers(1, s - o)) for s, o in zip(shape, offset, strict=True)))
    flat = np.arange(int(np.prod(shape))).reshape(shape)[box.slices()].ravel()
    expected = int(flat[0]) if (np.diff(flat) == 1).all() else None
    assert contiguous_at(tuple(shape), box) == expected


def test_describe() -> None:
    assert describe(TensorSpec("a", 2, (3, 4))) == "bfloat16[3, 4]"
    assert describe(TensorSpec("a", 0, (3,), 1)) == "an object"
    assert whole((3,)).volume == 3
