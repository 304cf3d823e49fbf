"""Muon beside the distributed optimizer, Megatron-LM 0.19's default pair: a chain of megatron-core's
LayerWiseDistributedOptimizer, a subclass of ChainedOptimizer that describes itself, and a
DistributedOptimizer."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from holdfast._tools.checkpoints.diff import compare
from holdfast.errors import HoldfastError
from tests.frameworks.megatron.jobs import JOB, children_allowed, load_into, state_of, storable, training
from tests.frameworks.megatron.models import Layout, Recipe, Training
from tests.support.processes import ProcessWorld
from tests.support.third_parties import lacks_muon

pytestmark = [
    pytest.mark.skipif(bool(lacks_muon()), reason=lacks_muon()),
    pytest.mark.timeout(1500),
]

KINDS = ("fully_reshardable", "dp_reshardable")
MOE, DENSE = (Recipe(layers=2, bf16=True, muon=True, dense=dense) for dense in (False, True))
LAYOUTS = {MOE: Layout(tp=2, ep=2), DENSE: Layout(tp=2)}
STEPS, RANKS = 2, 4


def described(run: Training, is_loading: bool, metadata: dict[str, Any]) -> dict[str, Any]:
    """State as a framework describes it, through megatron-core's own methods."""
    model = run.model_state()
    optimizer = run.optimizer.sharded_state_dict(model, is_loading, metadata=metadata)
    return {**model, "optimizer": optimizer, "iteration": run.iteration, "checkpoint_version": 3.0}


def saves(rank: int, layout: Layout, recipe: Recipe, root: str) -> list[float]:
    """The same state saved by `holdfast.megatron`, by stock and after `install()`; the losses after it."""
    from megatron.core import dist_checkpointing

    import holdfast
    from holdfast import megatron

    with training(layout, recipe) as run:
        for _ in range(STEPS):
            run.step()
        names = [type(part).__name__ for part in run.optimizer.chained_optimizers]
        assert names == ["LayerWiseDistributedOptimizer", "DistributedOptimizer"]
        megatron.save(state_of(run), f"{root}/ours", content_metadata=run.metadata(), job=JOB)
        for kind in KINDS:
            metadata = run.metadata(distrib_optim_sharding_type=kind)
            if rank == 0:
                os.makedirs(f"{root}/stock-{kind}")
            dist.barrier()
            with children_allowed():
                dist_checkpointing.save(
                    described(run, False, metadata),
                    f"{root}/stock-{kind}",
                    content_metadata=storable(metadata),
                )
        holdfast.install(job=JOB, warm_up=False, session=False)
        try:
            for kind in KINDS:
                metadata = run.metadata(distrib_optim_sharding_type=kind)
                dist_checkpointing.save(
                    described(run, False, metadata), f"{root}/installed-{kind}", content_metadata=metadata
                )
        finally:
            holdfast.uninstall()
        return [run.step() for _ in range(STEPS)]


def loads(rank: int, layout: Layout, recipe: Recipe, folder: str, again: str, installed: bool) -> list[float]:
    """The losses after a load, and what was loaded, saved again."""
    from megatron.core import dist_checkpointing

    import holdfast
    from holdfast import megatron

    with training(layout, recipe, seed=5) as run:
        if installed:
            run.step()  # stock's description wants one where Transformer Engine is absent
            holdfast.install(job=JOB, warm_up=False, session=False)
            try:
                metadata = dist_checkpointing.load_content_metadata(folder)
                loaded = dist_checkpointing.load(described(run, True, metadata), folder)
                run.load_model(loaded)
                run.optimizer.load_state_dict(loaded["optimizer"])
                run.iteration = loaded["iteration"]
            finally:
                holdfast.uninstall()
        else:
            load_into(run, folder)
        megatron.save(state_of(run), again, content_metadata=run.metadata(), job=JOB)
        dist.barrier()
        return [run.step() for _ in range(STEPS)]


def groups_of_adam_alone(rank: int, layout: Layout, recipe: Recipe, folder: str) -> str:
    """What a load says where the saved state has Muon's parameter groups alone."""
    from holdfast import megatron

    with training(layout, recipe, seed=5) as run:
        loaded = megatron.load(state_of(run, is_loading=True), folder, job=JOB)["optimizer"]
        loaded[1]["optimizer"]["param_groups"] = loaded[0]["optimizer"]["param_groups"]
        try:
            megatron.load_optimizer_state_dict(run.optimizer, loaded)
        except HoldfastError as error:
            return str(error)
        return "loaded"


Saved = Callable[[Recipe], tuple[Path, list[list[float]]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    @functools.cache
    def save(recipe: Recipe) -> tuple[Path, list[list[float]]]:
        root = tmp_path_factory.mktemp("muon")
        with ProcessWorld(RANKS) as world:
            return root, world.run(saves, LAYOUTS[recipe], recipe, str(root), timeout=400)

    return save


@pytest.mark.parametrize("recipe", [MOE, DENSE], ids=lambda recipe: recipe.name)
def test_whatever_saved_it_it_loads_and_goes_on(recipe: Recipe, saved: Saved, tmp_path: Path) -> None:
    root, losses = saved(recipe)
    layout, ours = LAYOUTS[recipe], root / "ours"
    for kind in KINDS:
        assert compare(ours, root / f"installed-{kind}").same
    folders = [("ours", False), ("stock-fully_reshardable", True)]
    if recipe == MOE:
        folders += [("stock-dp_reshardable", True), ("installed-dp_reshardable", True)]
    with ProcessWorld(RANKS) as world:
        for name, installed in folders:
            again = tmp_path / f"{name}-again"
            found = world.run(loads, layout, recipe, str(root / name), str(again), installed, timeout=400)
            # Of Adam's state in buckets, stock gives all parameters one tensor for the step, and PyTorch's
            # Adam adds to it once per parameter: the second step is another one.
            some = 1 if name == "stock-dp_reshardable" else STEPS
            assert [one[:some] for one in found] == [one[:some] for one in losses], name
            report = compare(ours, again)
            # Stock has the parameter groups of buckets in an order of its own.
            objects = ["common_state"] if name == "stock-dp_reshardable" else []
            assert [part.name for part in (*report.changed, *report.content)] == objects, name
            assert not (*report.only_a, *report.only_b)
            assert report.equal > 20


def test_another_kinds_groups_are_refused(saved: Saved) -> None:
    ours = str(saved(DENSE)[0] / "ours")
    with ProcessWorld(RANKS) as world:
        for said in world.run(groups_of_adam_alone, LAYOUTS[DENSE], DENSE, ours, timeout=400):
            assert said.startswith("The checkpoint has no parameter group of AdamW: none has betas and eps.")
