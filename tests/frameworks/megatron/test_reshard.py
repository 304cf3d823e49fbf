"""Real MoE models of megatron-core, saved in one layout and loaded in others: every tensor equal, bit for
bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from holdfast._tools.checkpoints.diff import compare
from tests.frameworks.megatron.jobs import load_save_train, train_and_save
from tests.frameworks.megatron.models import Layout, Recipe
from tests.support.processes import ProcessWorld
from tests.support.wide import wide

QWEN = Recipe()
DEEPSEEK = Recipe(per_layer=True, shared_expert=True, tied=True, bf16=True, latent=True)
OFFLOADED = Recipe(bf16=True, offload=0.5)
HOME = Layout(tp=2, ep=2)
CASES = [
    (QWEN, 4, Layout(tp=2, ep=2, etp=2)),
    *wide([(DEEPSEEK, 8, Layout(tp=2, pp=2, ep=2)), (OFFLOADED, 4, Layout(pp=2, ep=2))]),
    pytest.param(QWEN, 4, Layout(cp=2, ep=4), marks=pytest.mark.soak),
    pytest.param(QWEN, 4, Layout(pp=2, vpp=2, ep=2), marks=pytest.mark.soak),
    *(
        pytest.param(recipe, 8, layout, marks=pytest.mark.soak)
        for recipe, layout in (
            (QWEN, Layout()),
            (QWEN, Layout(ep=8)),
            (QWEN, Layout(cp=2, ep=4)),
            (QWEN, Layout(pp=2, vpp=2, ep=2)),
            (QWEN, Layout(tp=2, ep=2, etp=2)),
            (QWEN, Layout(pp=4, ep=2)),
            (QWEN, Layout(tp=4)),
            (QWEN, Layout(tp=2, pp=2, ep=2)),
            (DEEPSEEK, Layout()),
            (DEEPSEEK, Layout(pp=2, vpp=2, ep=4)),
            (OFFLOADED, Layout(pp=2, ep=4)),
        )
    ),
]
"""What is loaded by how many ranks, in which layout; eight have saved it."""
OBJECTS = ("common_state",)
"""Its parameter groups are listed per optimizer, and layouts without expert parallelism have only one."""


Saved = Callable[[Recipe], tuple[Path, list[float]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    @functools.cache
    def save(recipe: Recipe) -> tuple[Path, list[float]]:
        folder = tmp_path_factory.mktemp("mcore") / "iter_0000003"
        with ProcessWorld(8) as world:
            return folder, world.run(train_and_save, HOME, recipe, str(folder), timeout=120)[0]

    return save


@pytest.mark.parametrize(
    ("recipe", "ranks", "layout"),
    CASES,
    ids=lambda part: part.name if isinstance(part, Recipe) else str(part),
)
def test_any_layout_to_any(recipe: Recipe, ranks: int, layout: Layout, saved: Saved, tmp_path: Path) -> None:
    folder, losses = saved(recipe)
    more = 2 if layout.cp == 1 else 0
    with ProcessWorld(ranks) as world:
        found = world.run(
            load_save_train, layout, recipe, str(folder), str(tmp_path / "again"), more, timeout=120
        )
    report = compare(folder, tmp_path / "again")
    assert not report.only_a
    assert not report.only_b
    assert not report.changed
    assert [part for part in report.content if part.name not in OBJECTS] == []
    assert report.equal > 50
    # The first step sees the very same weights; the second also what other orders of addition made of them.
    np.testing.assert_allclose(found[0][:1], losses[3:4][:more], rtol=1e-2 if recipe.bf16 else 1e-5)
    np.testing.assert_allclose(found[0][1:], losses[4:][:more], rtol=1e-2 if recipe.bf16 else 1e-3)


@pytest.mark.parametrize(
    "recipe",
    [*(pytest.param(recipe, marks=pytest.mark.soak) for recipe in (QWEN, DEEPSEEK)), *wide([OFFLOADED])],
    ids=lambda recipe: recipe.name,
)
def test_the_same_layout_goes_on_bit_for_bit(
    recipe: Recipe, saved: Saved, mcore_world: ProcessWorld, tmp_path: Path
) -> None:
    folder, losses = saved(recipe)
    found = mcore_world.run(load_save_train, HOME, recipe, str(folder), str(tmp_path / "again"), timeout=120)
    assert compare(folder, tmp_path / "again").same
    assert found[0] == losses[3:]
