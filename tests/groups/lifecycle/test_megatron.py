"""Megatron's own groups, made by its own initialize_model_parallel on sixteen real ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core")

from tests.groups.lifecycle import jobs, operation_jobs
from tests.support.processes import ProcessWorld

LAYOUTS = {
    "EP": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
    },
    "CP": {
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "num_distributed_optimizer_instances": 2,
    },
}


@pytest.mark.wide
@pytest.mark.parametrize("which", ["EP", pytest.param("CP", marks=pytest.mark.wide)])
def test_every_group_that_megatron_makes_is_warmed_up(which: str) -> None:
    with ProcessWorld(16) as world:
        found = world.run(jobs.megatron_groups, LAYOUTS[which], which == "CP", timeout=120)
    for rank, (listed, shared, warmed, hazards) in enumerate(found):
        assert listed > shared > 8  # Megatron makes groups of one, too
        assert len(warmed) == shared + 1  # and the default group
        assert all(rank in ranks for ranks in warmed)
        assert "groups of one" in hazards
        assert "never warmed up" not in hazards
    moe = {tuple(ranks) for _, _, warmed, _ in found for ranks in warmed}
    if which == "EP":
        assert (0, 1, 2, 3) in moe  # the experts' all-to-all, which ms-swift's own warm-up leaves out


@pytest.mark.wide
def test_groups_of_experts_and_pipelines_are_warmed_up_for_what_megatron_does_with_them() -> None:
    layout = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    }
    with ProcessWorld(8) as world:
        found = world.run(operation_jobs.of_megatron, layout, timeout=120)
    for names, report, counts, by_group in found:
        issued = {group.name: tuple(one.operation for one in group.operations) for group in report.groups}
        assert issued[names["ep"]] == ("all_reduce", "all_to_all")
        assert issued[names["tp_ep"]] == ("all_reduce", "all_to_all")
        assert issued[names["pp"]] == ("all_reduce", "pairs")
        others = set(issued) - {names["ep"], names["tp_ep"], names["pp"]}
        assert {names["edp"], names["tp"]} <= others
        assert {issued[name] for name in others} == {("all_reduce",)}
        # Torch's own profiler: sent in a batch, then one by one over the pipeline's and over the default
        # group.
        assert counts == {"all_reduce": len(issued), "all_to_all": 2, "send": 3, "recv": 3}
        for name in (names["ep"], names["tp_ep"]):  # and its flight recorder
            assert by_group[name] == {"gloo:all_reduce": 1, "gloo:all_to_all": 1}
    with ProcessWorld(8) as world:
        for counts in world.run(operation_jobs.of_megatron_hook, layout, timeout=120):
            assert counts == found[0][2]
