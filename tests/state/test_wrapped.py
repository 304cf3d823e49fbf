"""DTensors whose local tensors are made of others, as 8-bit optimizer states and quantized weights under FSDP2
are: saved and loaded on other numbers of ranks, equal bit for bit; or one sentence says why not."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast._tools.checkpoints.inspect import describe
from tests.state import wrapped_jobs as jobs
from tests.support.processes import ProcessWorld

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="the Makefile installs it"
)


@pytest.fixture(scope="module")
def two() -> Iterator[ProcessWorld]:
    with ProcessWorld(2) as world:
        yield world


@pytest.fixture(scope="module")
def three() -> Iterator[ProcessWorld]:
    with ProcessWorld(3) as world:
        yield world


def equal(some: Any, others: Any) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


@needs_torchao
@pytest.mark.parametrize(
    ("kind", "layout"), [("AdamW8bit", "nested"), ("AdamW4bit", "flat"), ("AdamWFp8", "itself")]
)
def test_quantized_states_are_loaded_on_other_ranks(
    two: ProcessWorld, three: ProcessWorld, kind: str, layout: str, tmp_path: Path
) -> None:
    """70 rows: the last rank has fewer."""
    path = str(tmp_path / "it")
    saved, later = two.run(jobs.save, kind, (70, 256), layout, path, timeout=120)[0]
    shapes = {f.name.partition("optim.")[2]: f.shape for f in describe(Path(path)).shown}  # type: ignore[union-attr]
    scale = next(shape for name, shape in shapes.items() if name.endswith("exp_avg.scale"))
    assert scale == (70 * 256 // {"AdamW4bit": 128}.get(kind, 256),)
    for world in (two, three):
        for kinds, loaded, after in world.run(jobs.load, kind, (70, 256), layout, path, timeout=120):
            assert kinds[0].startswith("OptimState")
            assert equal(loaded, saved)
            if world is two:  # on others, gradients are added up in another order
                assert equal(after, later)


@needs_torchao
def test_a_part_that_is_plain_on_some_ranks_is_told(
    two: ProcessWorld, three: ProcessWorld, tmp_path: Path
) -> None:
    """torchao leaves parts with fewer than 4096 elements plain."""
    common = ("AdamW8bit", (20, 512), "nested")
    two.run(jobs.save, *common, str(tmp_path / "two"), timeout=120)
    three.run(jobs.save, *common, str(tmp_path / "three"), timeout=120)
    for said in three.run(jobs.load, *common, str(tmp_path / "two"), timeout=120):
        assert "It holds 'optim.state.weight.exp_avg' in parts, 'optim.state.weight.exp_avg.codes'" in said
        assert "quantized there, not here" in said
    for said in two.run(jobs.load, *common, str(tmp_path / "three"), timeout=120):
        assert "It holds 'optim.state.weight.exp_avg', which is not quantized there and is here" in said
    for said in two.run(jobs.save, "AdamW8bit", (15, 512), "nested", str(tmp_path / "mixed"), timeout=120):
        assert "CoverageError" not in said
        assert "Tensor 'optim.state.weight.exp_avg' of shape [15, 512] is not covered" in said
        assert "it is quantized there, not here" in said


def test_rows_with_scales_and_replicas(two: ProcessWorld, three: ProcessWorld, tmp_path: Path) -> None:
    path = str(tmp_path / "it")
    assert two.run(jobs.weights, path, True) == [[True] * 4] * 2
    found = {f.name: (f.dtype, f.shape) for f in describe(Path(path)).shown}  # type: ignore[union-attr]
    assert found == {
        "r.a": ("float32", (2, 3)),
        "r.b": ("float32", (2, 3)),
        "w.one": ("float32", ()),
        "w.q": ("int8", (10, 6)),
        "w.scale": ("float32", (10,)),
    }
    for world, ranks in ((two, 2), (three, 3)):
        assert world.run(jobs.weights, path, False) == [[True] * 4] * ranks


def test_what_does_not_show_how_it_is_cut_is_refused(two: ProcessWorld, tmp_path: Path) -> None:
    for freed, columns, closed in two.run(jobs.refused, str(tmp_path / "it")):
        assert "'odd' (torch.Tensor, shape (2, 6)) has no memory of its own, it was freed" in freed
        assert "does not cut it evenly along the first axis" in columns
        assert "its slices do not show which part of its 'a' belongs to which rows" in closed
