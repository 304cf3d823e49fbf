"""Megatron-FSDP itself, on CPU: what hangs in stock code is saved and loaded by ours, without a collective."""

from __future__ import annotations

import pytest

from holdfast.testing.processes import ProcessWorld
from tests.fsdp import megatron
from tests.megatron.models import Layout

SAVED = Layout(ep=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("megatron-fsdp") / "c")
    with ProcessWorld(4) as world:
        results = world.run(megatron.save_both, path, SAVED, timeout=120)
    assert all(agree > 40 for agree, _ in results), results
    assert any(lacking for _, lacking in results), results  # shards that are empty never had a gradient
    return path


@pytest.mark.parametrize(
    ("world", "layout", "knows"),
    [(4, SAVED, True), (4, SAVED, False), (4, Layout(tp=2, ep=2), True), (2, Layout(), True)],
)
def test_loaded_in_any_layout(saved: str, world: int, layout: Layout, knows: bool) -> None:
    with ProcessWorld(world) as ranks:
        assert min(ranks.run(megatron.load_and_compare, saved, layout, knows, timeout=120)) > 30


def test_stock_preparation_of_the_same_states_hangs_or_fails() -> None:
    """Megatron-LM issue 4910: each rank gathers for the states that it has."""
    with ProcessWorld(4) as world:
        world.start(megatron.stock_alone, SAVED)
        try:
            said = {result.value for result in world.collect(20)}
        except TimeoutError:
            said = {"hangs"}
    assert said != {"done"}
