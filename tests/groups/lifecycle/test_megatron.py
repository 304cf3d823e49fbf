"""Megatron's own groups, made by its own initialize_model_parallel on sixteen real ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core")

from tests.groups.lifecycle import jobs
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


@pytest.mark.parametrize("which", list(LAYOUTS))
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
