"""Megatron-FSDP itself, on CPU: what hangs in stock code is saved and loaded by ours, without a
collective."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import holdfast
from holdfast.errors import BadInput
from holdfast.megatron_fsdp import handle_swiglu_in_state_dict
from tests.frameworks.megatron.models import Layout
from tests.frameworks.megatron_fsdp import megatron
from tests.support.processes import ProcessWorld

SAVED = Layout(ep=2)


@pytest.fixture(scope="module")
def world() -> Iterator[ProcessWorld]:
    """Ranks that tests share which make no groups of megatron-core's."""
    with ProcessWorld(4) as shared:
        yield shared


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("megatron-fsdp") / "c")
    with ProcessWorld(4) as world:
        results = world.run(megatron.save_both, path, SAVED, timeout=120)
    assert all(agree > 40 for agree, _ in results), results
    assert any(lacking for _, lacking in results), results  # shards that are empty never had a gradient
    return path


@pytest.mark.parametrize(
    ("ranks", "layout", "knows"),
    [
        pytest.param(4, SAVED, True, marks=pytest.mark.soak),
        pytest.param(4, SAVED, False, marks=pytest.mark.wide),
        pytest.param(4, Layout(tp=2, ep=2), True, marks=pytest.mark.soak),
        (2, Layout(), True),
    ],
)
def test_loaded_in_any_layout(saved: str, ranks: int, layout: Layout, knows: bool) -> None:
    with ProcessWorld(ranks) as own:
        assert min(own.run(megatron.load_and_compare, saved, layout, knows, timeout=120)) > 30


@pytest.mark.wide
def test_what_stock_code_saved_is_loaded(saved: str) -> None:
    """A checkpoint of format fsdp_dtensor, which torch DCP wrote, into another layout."""
    with ProcessWorld(4) as ranks:
        assert (
            min(ranks.run(megatron.load_and_compare, saved, Layout(tp=2, ep=2), True, ".stock", timeout=120))
            > 30
        )


@pytest.mark.wide
@pytest.mark.parametrize(
    "fraction", [pytest.param(0.0, marks=pytest.mark.soak), 0.5, pytest.param(1.0, marks=pytest.mark.soak)]
)
def test_training_with_an_offloaded_optimizer_goes_on(fraction: float, tmp_path: Path) -> None:
    """Megatron-LM issue 4910: its parameter groups have classes in them, which are not stored, and the state
    of an offloaded parameter is the local tensor alone. In its own layout bit for bit; in another, additions
    run in another order."""
    path = str(tmp_path / "c")
    with ProcessWorld(4) as world:
        losses = world.run(megatron.offloaded, path, SAVED, fraction, True, timeout=120)[0]
    with ProcessWorld(4) as world:
        assert world.run(megatron.offloaded, path, SAVED, fraction, False, timeout=120) == [losses] * 4
    with ProcessWorld(4) as world:
        for other in world.run(megatron.offloaded, path, Layout(tp=2, ep=2), fraction, False, timeout=120):
            assert other == pytest.approx(losses, rel=1e-4)


@pytest.mark.wide
def test_stock_preparation_of_the_same_states_hangs_or_fails() -> None:
    """Megatron-LM issue 4910: each rank gathers for the states that it has."""
    with ProcessWorld(4) as world:
        took = max(world.run(megatron.step_and_prepare, SAVED, timeout=120))
        world.start(megatron.stock_alone)
        try:
            said = {result.value for result in world.collect(5 + 10 * took)}
        except TimeoutError:
            said = {"hangs"}
    assert said != {"done"}


def test_a_state_that_one_rank_lacks_is_named_or_zeros(tmp_path: Path) -> None:
    with ProcessWorld(4) as world:
        results = world.run(megatron.lose_a_state, str(tmp_path / "c"), SAVED, timeout=120)
    said = {word for word, _ in results}
    assert len(said) == 1
    assert re.search(
        r"Tensor 'optimizer.state\.\S*linear_qkv.weight.exp_avg' of shape \[\d+, \d+\].*rank", said.pop()
    )
    assert any("linear_qkv.weight" in name for name in results[1][1])


def test_stock_metadata_is_wrong_where_orders_differ(world: ProcessWorld) -> None:
    """The right number of gathers, each of another tensor: no hang, no error, wrong offsets. Not where stock
    code sorts the names first, as 0.19 does."""
    sorts = world.run(megatron.stock_sorts)[0]
    right = world.run(megatron.stock_order, True)
    wrong = world.run(megatron.stock_order, False)
    assert [found["a"][0] for found in right] == [0, 3, 10, 10]
    assert [found["b"][0] for found in right] == [0, 1, 2, 3]
    assert (wrong == right) == sorts


@pytest.mark.parametrize(("tp", "seed"), [(1, 1), (1, 2), (2, 3), (2, 4)])
def test_a_gated_delta_net_is_split_where_its_parts_meet(
    world: ProcessWorld, tmp_path: Path, tp: int, seed: int
) -> None:
    path = str(tmp_path / "c")
    wanted = world.run(megatron.delta_net, path, tp, seed)[0]
    for prefix, suffix in (("model.", ""), ("optimizer.state.module.", ".exp_avg")):
        into = {f"{prefix}{name}{suffix}": torch.zeros_like(value) for name, value in wanted.items()}
        holdfast.load(into, path, job=holdfast.Job(no_dist=True))
        for name, value in wanted.items():
            assert torch.equal(into[f"{prefix}{name}{suffix}"], value), name


def test_what_can_not_be_split_is_refused() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("dp_cp",))
        shape = torch.Size((8, 2))
        value = DTensor.from_local(
            torch.zeros(3, 2), mesh, [Shard(0)], run_check=False, shape=shape, stride=(2, 1)
        )
        with pytest.raises(
            BadInput,
            match=r"'decoder.layers.0.mlp.linear_fc1.weight' of shape \(8, 2\) can't be split into w, v",
        ):
            handle_swiglu_in_state_dict(
                torch.nn.Module(), {"decoder.layers.0.mlp.linear_fc1.weight": value}, None
            )
    finally:
        dist.destroy_process_group()
