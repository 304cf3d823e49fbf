"""Functions of frameworks, as they are published, called after `install()`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import torch

from holdfast._tools.checkpoints.diff import compare
from tests.frameworks.megatron.cpu import use_cpu
from tests.frameworks.megatron.jobs import training
from tests.frameworks.megatron.models import Layout, Recipe
from tests.support.processes import ProcessWorld
from tests.support.third_parties import needs

SMALL = Recipe(layers=2)


def file_of(package: str, path: str) -> Any:
    """A module of an installed package by its file: importing the package itself would want all it depends
    on."""
    place = importlib.metadata.distribution(package).locate_file(path)
    spec = importlib.util.spec_from_file_location(Path(path).stem, str(place))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def verl_saves_and_loads(rank: int, layout: Layout, folder: str, load_from: str | None) -> list[float]:
    use_cpu()
    import holdfast

    holdfast.install(job=holdfast.Job(timeout=60, stall_timeout=30), warm_up=False, session=False)
    try:
        verl = file_of("verl", "verl/utils/megatron/dist_checkpointing.py")
        with training(layout, SMALL, seed=3) as run:
            metadata = run.metadata()
            if load_from is None:
                run.step()
            else:
                model = run.model_state()
                state = {
                    **model,
                    "optimizer": run.optimizer.sharded_state_dict(model, True, metadata=metadata),
                }
                loaded = verl.load_dist_checkpointing(state, load_from)
                run.load_model(loaded)
                run.optimizer.load_state_dict(loaded["optimizer"])
            model = run.model_state()
            state = {
                **model,
                "optimizer": run.optimizer.sharded_state_dict(model, metadata=metadata),
                "rng": torch.get_rng_state(),
            }
            assert verl.save_dist_checkpointing(state, folder, content_metadata=metadata) is None
            run.iteration = 1
            return [run.step() for _ in range(2)]
    finally:
        holdfast.uninstall()


@needs("verl")
def test_verl(tmp_path: Path) -> None:
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    with ProcessWorld(4) as world:
        losses = world.run(verl_saves_and_loads, Layout(tp=2, ep=2), str(first), None, timeout=120)
    with ProcessWorld(4) as world:
        resumed = world.run(verl_saves_and_loads, Layout(tp=2, ep=2), str(again), str(first), timeout=120)
    assert resumed == losses
    with ProcessWorld(4) as world:
        world.run(verl_saves_and_loads, Layout(pp=2, ep=2), str(other), str(first), timeout=120)
    for folder in (again, other):
        report = compare(first, folder)
        assert [item.name for item in (*report.content, *report.changed) if item.name != "common_state"] == []
        assert not report.only_a
        assert not report.only_b
