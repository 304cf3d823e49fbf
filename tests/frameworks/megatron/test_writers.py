"""Which rank writes what of a model: each element exactly once, in every layout, whatever megatron-core
describes."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tests.frameworks.megatron.preload  # noqa: F401 (imports megatron-core without its warnings)
from holdfast._tools.checkpoints.diff import compare
from tests.frameworks.megatron.cpu import use_cpu
from tests.frameworks.megatron.jobs import load_save_train, train_and_save
from tests.frameworks.megatron.models import Layout, Recipe, build, config_of, describe, parallel
from tests.support.boxes import tiles
from tests.support.processes import ProcessWorld
from tests.support.wide import wide

BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
DP2, DP4_EP2 = Layout(tp=2, pp=2), Layout(tp=2, ep=2)


def qwen(layers: int) -> Recipe:
    return Recipe(layers=layers, extra=BIAS)


def deepseek(layers: int) -> Recipe:
    return Recipe(
        layers=layers, per_layer=True, shared_expert=True, tied=True, bf16=True, latent=True, extra=BIAS
    )


def test_a_router_with_an_expert_bias_is_saved_and_loaded_in_another_layout(tmp_path: Path) -> None:
    """Its bias is a buffer, and has copies on all data-parallel ranks."""
    first, again, recipe = tmp_path / "iter_0000001", tmp_path / "iter_0000002", deepseek(4)
    with ProcessWorld(8) as world:
        world.run(train_and_save, DP4_EP2, recipe, str(first), 1, 0, timeout=120)
    with ProcessWorld(8) as world:
        world.run(load_save_train, DP2, recipe, str(first), str(again), 0, timeout=120)
    report = compare(first, again)
    assert (report.only_a, report.only_b, report.changed) == ((), (), ())
    assert [part.name for part in report.content if part.name != "common_state"] == []
    found = biases(first)
    assert len(found) == 3
    assert any(bias.any() for bias in found)  # training has moved it


def biases(folder: Path) -> list[torch.Tensor]:
    from holdfast import megatron
    from holdfast._core.protocol.job import Job

    found = megatron.load_plain_tensors(folder, job=Job(no_dist=True))
    return [value for key, value in found.items() if key.endswith("router.expert_bias")]


class Written(NamedTuple):
    """A part of a tensor that a rank would write."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]


def written(rank: int, state: Any, everyone: tuple[int, ...] | None = None) -> list[Written]:
    """What this rank would write of a sharded state dict, small pieces shared as large ones are."""
    from holdfast._core.base.options import Options
    from holdfast._core.plan.save import plan_save
    from holdfast._core.state.flatten import build_shard_table
    from holdfast._frameworks.megatron import mcore
    from holdfast._frameworks.megatron.shards import WrittenCopies, to_save

    mcore.apply_factories(state)
    everyone = everyone or tuple(range(dist.get_world_size()))
    sharded, _ = mcore.extract_sharded_base(state)
    leaves = to_save(mcore.nested_values(sharded), {}, WrittenCopies(rank, everyone))
    held, _ = build_shard_table([leaf for leaf in leaves if not leaf.private], rank, everyone)
    assert None not in held.replicas
    plan = plan_save(held, [replica or (0, 1) for replica in held.replicas], Options(split_bytes=512))
    found = []
    for row, offset, size in zip(plan.chunks.row, plan.chunks.offset, plan.chunks.size, strict=True):
        spec = held.specs[row]
        cut = len(offset) - len(spec.shape)
        found.append(Written(spec.name, tuple(spec.shape), tuple(offset[cut:]), tuple(size[cut:])))
    return found


def of_models(rank: int, layout: Layout, recipes: tuple[Recipe, ...]) -> list[tuple[list[Written], ...]]:
    """For each model what is written of it as it is, and of it without parameters, as averaged weights are
    given."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    use_cpu()

    def detach(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: detach(item) for key, item in value.items()}
        if isinstance(value, ShardedTensor | ShardedTensorFactory):
            value.data = value.data.detach().clone()
        return value

    with parallel(layout):
        models = [build(config_of(layout, recipe), layout, recipe) for recipe in recipes]
        return [
            (written(rank, describe(chunks)), written(rank, detach(describe(chunks)))) for chunks in models
        ]


GATED = Recipe(layers=2, shared_expert=True, extra={**BIAS, "moe_shared_expert_gate": True})
PREDICTS = Recipe(layers=2, per_layer=True, extra={**BIAS, "mtp_num_layers": 1})
ALL = (qwen(2), deepseek(4), GATED, PREDICTS)
CASES = {
    DP2: ALL,
    DP4_EP2: ALL,
    Layout(): ALL,
    Layout(cp=2, ep=4): ALL,
    Layout(tp=2, ep=2, etp=2): ALL,
    Layout(pp=2, vpp=2, ep=2): (deepseek(4),),
}
IN_SUITE = (Layout(tp=2, ep=2, etp=2),)


@pytest.mark.parametrize("layout", wide(CASES, suite=IN_SUITE), ids=str)
def test_each_element_of_a_model_is_written_once(layout: Layout, mcore_world: ProcessWorld) -> None:
    said = mcore_world.run(of_models, layout, CASES[layout], timeout=120)
    for number, recipe in enumerate(CASES[layout]):
        kept, detached = ([ranks[number][way] for ranks in said] for way in range(2))
        assert_covered(kept, recipe.name)
        assert_covered(detached, f"{recipe.name}, detached")
        busy = [sum(np.prod(part.size) for part in parts) for parts in kept]
        assert min(busy) > 0, f"a rank writes nothing of {recipe.name}: {busy}"
        names = {part.name for parts in kept for part in parts}
        assert names == {part.name for parts in detached for part in parts}
        assert any("expert_bias" in name for name in names)


def assert_covered(ranks: list[list[Written]], where: str) -> None:
    """All parts together are each tensor once."""
    parts: dict[tuple[str, tuple[int, ...]], list[Written]] = defaultdict(list)
    for own in ranks:
        for part in own:
            parts[part.name, part.shape].append(part)
    for (name, shape), found in parts.items():
        offsets, sizes = (np.array([part[at] for part in found], np.int64) for at in (2, 3))
        assert tiles(shape, offsets.reshape(len(found), -1), sizes.reshape(len(found), -1)), (where, name)


def of_fsdp2(rank: int) -> list[Written]:
    """What megatron-core describes of a module whose parameters FSDP2 cuts over the data-parallel ranks."""
    from megatron.core import parallel_state as ps
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with parallel(Layout()):
        module = torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.LayerNorm(16))
        module.register_buffer("count", torch.zeros(5))
        fully_shard(module, mesh=init_device_mesh("cpu", (8,)))
        for parameter in module.parameters():
            parameter.is_torch_fsdp2_param = True  # as TorchFullyShardedDataParallel does since 0.19
        groups = {
            "tp_group": ps.get_tensor_model_parallel_group(),
            "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True),
        }
        state = module.state_dict(keep_vars=True)
        axes = {"0.weight": 0, "0.bias": 0}
        return written(rank, make_sharded_tensors_for_checkpoint(state, "model.", axes, **groups))


def test_slices_of_fsdp2_are_written_by_the_ranks_that_have_them() -> None:
    with ProcessWorld(8) as world:
        said = world.run(of_fsdp2)
    assert_covered(said, "FSDP2")
    assert {part.name for part in said[7]} == {
        f"model.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")
    }
    assert {part.name for part in said[0]} == {part.name for part in said[7]} | {"model.count"}


def of_users(rank: int, everyone: tuple[int, ...]) -> list[Written]:
    """Tensors that a user describes: on the main rank alone, cut over all ranks, or copied with all ranks'
    numbers."""
    use_cpu()
    from megatron.core.dist_checkpointing import ShardedTensor

    def shard(name: str, replica: Any, *cuts: tuple[int, int, int], data: Any = None) -> Any:
        data = torch.zeros(16, 64) if data is None else data
        return ShardedTensor.from_rank_offsets(name, data, *cuts, replica_id=replica)

    with parallel(Layout()):
        state = {
            "cut": shard("cut", (0, 0, 0), (0, everyone.index(rank), len(everyone))),
            "copied": shard("copied", (0, 0, rank)),
            "weight": shard("weight", (0, 0, rank), data=torch.nn.Parameter(torch.zeros(16, 64))),
            "plain": shard("plain", everyone.index(rank)),
            "numbered": shard("numbered", (0, 0, (rank - 3) % 8)),
        }
        if rank == everyone[0]:
            state["alone"] = shard("alone", (0, 0, 0))
        return written(rank, state, everyone)


@pytest.mark.parametrize("everyone", [tuple(range(8)), tuple(range(1, 8))], ids=["all", "but the first"])
def test_tensors_of_users_are_written_once(everyone: tuple[int, ...], tmp_path: Path) -> None:
    with ProcessWorld(8) as world:
        world.start(of_users, everyone, ranks=everyone)
        world.start(absent, ranks=set(range(8)) - set(everyone))
        said = [result.get() for result in world.collect(60)]
    assert_covered(said, "tensors of users")
    names = ("cut", "copied", "weight", "plain", "numbered", "alone")
    writers = {
        name: {rank for rank, parts in enumerate(said) if name in {part.name for part in parts}}
        for name in names
    }
    assert writers == {
        "cut": set(everyone),
        "copied": {everyone[0]},
        "weight": set(everyone),
        "plain": {everyone[0]},
        "numbered": {3},
        "alone": {everyone[0]},
    }


def absent(rank: int) -> list[Written]:
    """A rank of Megatron's groups that takes no part in the save."""
    use_cpu()
    with parallel(Layout()):
        return []


def cut_over_a_part(rank: int) -> tuple[tuple[int, ...], ...]:
    """Groups as megatron-core 0.19 has them, whose `find` tells whether weights are cut over a part of the
    data-parallel group."""
    from megatron.core import parallel_state

    from holdfast._frameworks.megatron import mcore

    whole = dist.group.WORLD
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]

    def find(cuts: bool, with_context_parallel: bool = False, with_gtp_remat: bool = True) -> Any:
        return whole if with_gtp_remat or not cuts else halves[rank % 2]

    use_cpu()
    with parallel(Layout()):
        found = []
        for cuts in (False, True):
            with patch.object(parallel_state, "get_data_parallel_group", partial(find, cuts)):
                found.append(mcore.groups()[0])
        return tuple(found)


def test_copies_that_are_numbered_over_two_groups_do_not_share_the_writing() -> None:
    with ProcessWorld(4) as world:
        assert world.run(cut_over_a_part) == [((0, 1, 2, 3), ())] * 4
