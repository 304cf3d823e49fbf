"""Optimizers that count steps in their parameter groups (Transformer Engine, Apex), where ranks have empty
groups."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from holdfast._core.existing.reindex import reindex
from holdfast._tools.checkpoints.diff import compare
from holdfast.errors import BadInput
from tests.frameworks.megatron.jobs import JOB, load_into, state_of, training
from tests.frameworks.megatron.models import Layout, Recipe, Training
from tests.support.processes import ProcessWorld

DENSE_FIRST = {"moe_layer_freq": [0, 0, 0, 1, 1, 1]}
FUSED = Recipe(per_layer=True, layers=6, fused=True, extra=DENSE_FIRST)
PRECISE = Recipe(per_layer=True, layers=6, bf16=True, fused=True, precise=True, extra=DENSE_FIRST)
PLAIN = Recipe(per_layer=True, layers=6, extra=DENSE_FIRST)
HOME = Layout(pp=2, ep=2)
RANKS = 4
"""Of which the first two have the dense layers, and so no experts."""
EXPERTS_FIRST = Recipe(per_layer=True, layers=6, fused=True, extra={"moe_layer_freq": [1, 1, 1, 0, 0, 0]})

Groups = list[tuple[bool, Any]]


def groups_of(run: Training) -> Groups:
    """(has it parameters on this rank?, its step) for each parameter group of all optimizers."""
    return [
        (bool(group["params"]), group.get("step"))
        for optimizer in run.optimizer.chained_optimizers
        for group in optimizer.optimizer.param_groups
    ]


def train_and_save(rank: int, layout: Layout, recipe: Recipe, folder: str) -> tuple[list[float], Groups]:
    from holdfast import megatron

    with training(layout, recipe) as run:
        for _ in range(3):
            run.step()
        before = groups_of(run)
        megatron.save(state_of(run), folder, job=JOB)
        assert groups_of(run) == before
        return [run.step() for _ in range(2)], before


def load_save_train(
    rank: int, layout: Layout, recipe: Recipe, folder: str, again: str
) -> tuple[list[float], Groups]:
    from holdfast import megatron

    with training(layout, recipe, seed=2) as run:
        load_into(run, folder)
        groups = groups_of(run)
        megatron.save(state_of(run), again, job=JOB)
        dist.barrier()
        losses = [run.step() for _ in range(2)]
        megatron.save(state_of(run), f"{again}-later", job=JOB)
        return losses, groups


Saved = tuple[Path, list[tuple[list[float], Groups]]]
CASES = [
    (FUSED, Layout(ep=4)),
    pytest.param(PRECISE, HOME, marks=pytest.mark.wide),
    *(pytest.param(recipe, HOME, marks=pytest.mark.soak) for recipe in (FUSED, PLAIN, EXPERTS_FIRST)),
    *(pytest.param(recipe, Layout(tp=2, pp=2), marks=pytest.mark.soak) for recipe in (FUSED, PRECISE)),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Recipe], Saved]:
    @functools.cache
    def save(recipe: Recipe) -> Saved:
        folder = tmp_path_factory.mktemp("fused") / "iter_0000003"
        with ProcessWorld(RANKS) as world:
            return folder, world.run(train_and_save, HOME, recipe, str(folder), timeout=120)

    return save


Resumed = tuple[Path, list[tuple[list[float], Groups]]]


@pytest.fixture(scope="module")
def resumed(
    saved: Callable[[Recipe], Saved], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Recipe, Layout], Resumed]:
    @functools.cache
    def resume(recipe: Recipe, layout: Layout) -> Resumed:
        again = tmp_path_factory.mktemp("resumed") / "again"
        how = (layout, recipe, str(saved(recipe)[0]), str(again))
        with ProcessWorld(RANKS) as world:
            return again, world.run(load_save_train, *how, timeout=120)

    return resume


@pytest.fixture
def world() -> Iterator[ProcessWorld]:
    with ProcessWorld(RANKS) as own:
        yield own


@pytest.mark.parametrize(
    ("recipe", "layout"), CASES, ids=lambda part: str(part) if isinstance(part, Layout) else part.name
)
def test_experts_that_a_rank_lacks_keep_their_step(
    recipe: Recipe,
    layout: Layout,
    saved: Callable[[Recipe], Saved],
    resumed: Callable[[Recipe, Layout], Resumed],
) -> None:
    (folder, before), (again, found) = saved(recipe), resumed(recipe, layout)
    report = compare(folder, again)
    assert (report.only_a, report.only_b, report.changed) == ((), (), ())
    assert [part.name for part in report.content if part.name != "common_state"] == []
    for (losses, groups), (losses_before, groups_before) in zip(found, before, strict=True):
        if recipe.fused:
            assert groups == [(has, 3 if has else None) for has, _ in groups]
        if layout == HOME:
            assert losses == losses_before
            assert groups == groups_before or not recipe.fused
        else:
            np.testing.assert_allclose(losses, losses_before, rtol=1e-2 if recipe.bf16 else 1e-3)
    if layout == HOME:
        assert report.same
        assert {has for _, groups in before for has, _ in groups} == {True, False}


def test_steps_are_counted_on_after_a_load(
    resumed: Callable[[Recipe, Layout], Resumed], world: ProcessWorld
) -> None:
    """Groups that are empty on a rank don't count; what they were loaded with would be saved again."""
    again, _ = resumed(FUSED, HOME)
    for groups in world.run(load_only, FUSED, f"{again}-later", timeout=120):
        assert groups == [(has, 5 if has else None) for has, _ in groups]


def save_at_once(rank: int, recipe: Recipe, folder: str) -> list[float]:
    from holdfast import megatron

    with training(HOME, recipe) as run:
        before = groups_of(run)
        megatron.save(state_of(run), folder, job=JOB)
        assert not recipe.fused or groups_of(run) == before
        return [run.step() for _ in range(2)]


@pytest.mark.wide
def test_an_optimizer_that_has_not_stepped_yet(world: ProcessWorld, tmp_path: Path) -> None:
    for recipe in (FUSED, PRECISE):
        folder = tmp_path / recipe.name
        losses = world.run(save_at_once, recipe, str(folder), timeout=120)
        found = world.run(load_save_train, HOME, recipe, str(folder), f"{folder}-again", timeout=120)
        assert [loss for loss, _ in found] == losses
        assert {step for _, groups in found for _, step in groups} == {None}


def set_by_hand(rank: int, folder: str) -> None:
    """Megatron-LM's test_optimizer_common_state_dict: the dense groups have a step, those of experts none on
    any rank."""
    from megatron.core.dist_checkpointing.dict_utils import diff

    from holdfast import megatron

    def start(seed: int) -> Any:
        run = Training(HOME, FUSED, seed)
        for optimizer in run.optimizer.chained_optimizers:
            for group in optimizer.optimizer.param_groups:
                for param in group["params"]:
                    optimizer.optimizer.state[param] = {
                        name: torch.rand_like(param) for name in ("exp_avg", "exp_avg_sq")
                    }
        return run

    with training(HOME, FUSED, seed=2):
        first = start(2)
        dense = first.optimizer.chained_optimizers[0].optimizer.param_groups
        for number, group in enumerate(dense):
            if rank > 0 or number == 0:
                group["step"] = 1234
        megatron.save(state_of(first), folder, job=JOB)
        second = start(3)
        load_into(second, folder)
        for group in dense:
            group["step"] = 1234
        differences = diff(first.optimizer.state_dict(), second.optimizer.state_dict())
        assert not any(differences), differences


def test_no_step_appears_in_a_group_that_had_none(world: ProcessWorld, tmp_path: Path) -> None:
    world.run(set_by_hand, str(tmp_path / "a"), timeout=120)


def save_steps(rank: int, folder: str, of_experts: int) -> None:
    """As rank 0 once wrote them: a step in the groups of the experts, which are empty there."""
    from holdfast import megatron

    with training(HOME, FUSED) as run:
        for _ in range(3):
            run.step()
        state = state_of(run)
        if rank == 0:
            for group in state["optimizer"][1]["optimizer"]["param_groups"]:
                group["step"] = of_experts
        megatron.save(state, folder, job=JOB)


def load_only(rank: int, recipe: Recipe, folder: str) -> str | Groups:
    with training(HOME, recipe, seed=2) as run:
        try:
            load_into(run, folder)
        except BadInput as error:
            return error.message
        return groups_of(run)


@pytest.mark.wide
def test_a_zero_that_was_written_for_empty_groups_counts_for_nothing(
    world: ProcessWorld, tmp_path: Path
) -> None:
    """The index of such a checkpoint has no note of steps, either."""
    folder = tmp_path / "iter_0000003"
    world.run(save_steps, str(folder), 0, timeout=120)
    (folder / "index.safetensors").unlink()
    reindex(folder)
    assert "optimizer_steps" not in json.dumps(notes_of(folder))
    for groups in world.run(load_only, FUSED, str(folder), timeout=120):
        assert groups == [(has, 3 if has else None) for has, _ in groups]


@pytest.mark.wide
def test_steps_that_differ_are_refused_on_all_ranks(world: ProcessWorld, tmp_path: Path) -> None:
    world.run(save_steps, str(tmp_path / "a"), 7, timeout=120)
    said = world.run(load_only, FUSED, str(tmp_path / "a"), timeout=120)
    assert set(said) == {"The parameter groups in the checkpoint have different steps: 3; 7."}


def notes_of(folder: Path) -> Any:
    from holdfast._core.io.index_file import open_index
    from holdfast._core.store.local import open_store

    with open_index(open_store(str(folder))) as index:
        return index.about["notes"]
