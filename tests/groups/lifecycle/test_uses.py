"""What groups are used for, by their names."""

from __future__ import annotations

import pytest

from holdfast._core.layout.grid import Grid
from holdfast._groups.lifecycle.plan import KINDS, plan_groups
from holdfast._groups.lifecycle.uses import EXPERTS, OPERATIONS, PIPELINES, TENSORS_OF_EXPERTS, uses

ALL_TO_ALL = ("all_reduce", "all_to_all")
PAIRS = ("all_reduce", "pairs")


@pytest.mark.parametrize(
    ("names", "used"),
    [
        (["tp"], ("all_reduce",)),
        (["ep"], ALL_TO_ALL),
        (["pp", "embedding"], PAIRS),
        (["edp"], ("all_reduce",)),
        (["embedding"], ("all_reduce",)),
        (["world", "dp", "ep"], ALL_TO_ALL),
        (["mp", "pp", "ep"], OPERATIONS),
        (["EXPERT_MODEL_PARALLEL_GROUP"], ALL_TO_ALL),
        (["EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"], ("all_reduce",)),
        (["PIPELINE_MODEL_PARALLEL_GROUP"], PAIRS),
        (["mesh_pp"], PAIRS),
        (["somebody's"], ("all_reduce",)),
        ([], ("all_reduce",)),
    ],
)
def test_operations_by_names(names: list[str], used: tuple[str, ...]) -> None:
    assert uses({"7": names, "8": ["dp"]}) == {"7": used, "8": ("all_reduce",)}


@pytest.mark.parametrize(
    ("grid", "to_experts"),
    [
        (Grid(16, tp=2, pp=2, ep=2), {"ep", "tp_ep"}),
        (Grid(16, tp=2, pp=2), set()),  # tp_ep has the ranks of tp then
        (Grid(8, ep=8), {"world"}),
    ],
)
def test_experts_of_a_layout(grid: Grid, to_experts: set[str]) -> None:
    used = uses({planned.names[0]: planned.names for planned in plan_groups(grid)})
    assert {name for name, operations in used.items() if "all_to_all" in operations} == to_experts


def test_names_are_those_of_open_groups_and_of_megatron() -> None:
    known = EXPERTS | TENSORS_OF_EXPERTS | PIPELINES
    assert {name for name in known if name.islower() and not name.startswith("mesh_")} <= set(KINDS)
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    with open(parallel_state.__file__, encoding="utf-8") as file:
        source = file.read()
    for name in known:
        if name.isupper():
            assert f'group_desc="{name}"' in source
