"""The adapter against stock megatron-core, and each of its promises by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast._core.store.run_folder import latest
from holdfast._frameworks.torch_dcp.torch_dist import export_torch_dist, import_torch_dist
from holdfast._tools.checkpoints.diff import compare
from holdfast._tools.checkpoints.inspect import Run, describe
from holdfast.errors import BadInput, NotCommitted
from tests.frameworks.megatron.jobs import (
    broken_factory,
    installed,
    installed_loads_buckets,
    iterations,
    load_as_buckets,
    load_save_train,
    other_vocabulary,
    queue_of_requests,
    save_by_some,
    save_slowly,
    save_without_memory,
    stock_buckets_save,
    stock_load_and_save,
    stock_save_both,
    stock_save_of_a_chain,
    strict_modes,
)
from tests.frameworks.megatron.models import Layout, Recipe
from tests.support.processes import ProcessWorld
from tests.support.waiting import AT_ONCE

SMALL = Recipe(layers=2)
HOME = Layout(tp=2, ep=2)


@pytest.fixture(scope="module")
def world() -> Iterator[ProcessWorld]:
    """Eight ranks that tests share which make no groups of megatron-core's."""
    with ProcessWorld(8) as shared:
        yield shared


@pytest.fixture
def four() -> Iterator[ProcessWorld]:
    with ProcessWorld(4) as own:
        yield own


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[tuple[list[str], list[str]]]]:
    ours, stock = (tmp_path_factory.mktemp("both") / name for name in ("ours", "stock"))
    with ProcessWorld(4) as world:
        counts = world.run(stock_save_both, HOME, SMALL, str(ours), str(stock), timeout=120)
    return ours, stock, counts


def tensors_that_differ(a: Path, b: Path) -> list[str]:
    report = compare(a, b)
    assert report.equal > 30
    changed = [item.name for item in (*report.changed, *report.content)]
    names = (*report.only_a, *report.only_b, *changed)
    # Objects are encoded in another way: None and plain values as JSON, not as a torch archive.
    return [name for name in names if name != "common_state" and "/shard_" not in name]


def test_the_same_tensors_as_stock(both: tuple[Path, Path, object], tmp_path: Path) -> None:
    ours, stock, _ = both
    import_torch_dist(stock, tmp_path / "imported", step=2)
    assert tensors_that_differ(ours, tmp_path / "imported") == []


def test_no_collective(both: tuple[Path, Path, list[tuple[list[str], list[str]]]]) -> None:
    for mine, theirs in both[2]:
        assert mine == []
        assert len(theirs) > 3  # the counter does count


def test_a_stock_checkpoint_loads_in_another_layout(
    both: tuple[Path, Path, object], four: ProcessWorld, tmp_path: Path
) -> None:
    ours, stock, _ = both
    four.run(load_save_train, Layout(pp=2, ep=2), SMALL, str(stock), str(tmp_path / "again"), 0, timeout=120)
    assert tensors_that_differ(ours, tmp_path / "again") == []


@pytest.mark.wide
def test_stock_loads_what_is_exported(
    both: tuple[Path, Path, object], four: ProcessWorld, tmp_path: Path
) -> None:
    ours, _, _ = both
    export_torch_dist(ours, tmp_path / "exported")
    found = four.run(
        stock_load_and_save, HOME, SMALL, str(tmp_path / "exported"), str(tmp_path / "again"), timeout=120
    )
    assert set(found) == {"fully_reshardable"}
    assert tensors_that_differ(ours, tmp_path / "again") == []


@pytest.mark.wide
def test_a_framework_resumes_from_what_it_saved_as_buckets(tmp_path: Path) -> None:
    ours, stock, again = (tmp_path / name for name in ("ours", "stock", "again"))
    mixed = Recipe(layers=2, bf16=True)  # stock can't load the buckets of a model that is fp32 itself
    with ProcessWorld(4) as world:
        world.run(stock_buckets_save, HOME, mixed, str(ours), str(stock), timeout=120)
    with ProcessWorld(4) as world:
        found = world.run(installed_loads_buckets, HOME, mixed, str(stock), str(again), timeout=120)
    assert set(found) == {"dp_reshardable"}
    assert tensors_that_differ(ours, again) == []


@pytest.mark.parametrize(
    ("kind", "alike", "recipe"),
    [
        ("dp_reshardable", False, SMALL),
        pytest.param("dp_reshardable", True, SMALL, marks=pytest.mark.wide),
        pytest.param("fully_reshardable", True, SMALL, marks=pytest.mark.wide),
        pytest.param(
            "dp_reshardable", True, Recipe(layers=2, bf16=True, offload=1.0), marks=pytest.mark.wide
        ),
    ],
    ids=lambda part: part.name if isinstance(part, Recipe) else str(part),
)
def test_install_is_the_whole_switch(
    kind: str, alike: bool, recipe: Recipe, four: ProcessWorld, tmp_path: Path
) -> None:
    """Also for who gives one format to save and load alike, as a test of Megatron-LM does; and with an
    offloaded optimizer."""
    four.run(installed, HOME, recipe, str(tmp_path / "iter_0000001"), kind, alike, timeout=120)


def test_ranks_that_are_no_participants_never_call(tmp_path: Path) -> None:
    """Eight ranks train, four do inference and never call; then one of the eight is absent."""
    ranks = (0, 1, 2, 3, 6, 7, 10, 11)
    with ProcessWorld(12) as world:
        found = world.run(save_by_some, ranks, str(tmp_path / "a"), None)
        assert found == ["saved" if rank in ranks else "never called" for rank in range(12)]
        found = world.run(save_by_some, ranks, str(tmp_path / "b"), 6)
    assert [said for rank, said in enumerate(found) if rank in ranks and rank != 6] == ["RankFailed 6"] * 7
    with pytest.raises(NotCommitted):
        compare(tmp_path / "a", tmp_path / "b")


def test_a_rank_that_is_slow_but_moves_trips_no_timer(world: ProcessWorld, tmp_path: Path) -> None:
    took = world.run(save_slowly, str(tmp_path / "a"), 3, 6, timeout=120)
    assert min(took) > 6  # and it may stand still for 4
    with pytest.raises(BadInput, match="'a' in it is one"):
        latest(tmp_path)
    assert compare(tmp_path / "a", tmp_path / "a").equal == 7  # 6 tensors and the common state


def test_megatrons_queue_of_requests_without_a_collective(world: ProcessWorld, tmp_path: Path) -> None:
    for seen, collectives in world.run(queue_of_requests, str(tmp_path)):
        assert collectives == []
        assert seen == [step for number in range(3) for step in (number, f"finalized {number}", [number])] + [
            0
        ]


@pytest.mark.wide
def test_a_run_folder_as_megatron_lays_it_out(world: ProcessWorld, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for found in world.run(iterations, str(run), timeout=60):
        ten, twenty, thirty = (f"iter_{number:07d}" for number in (10, 20, 30))
        assert found == [
            None,
            (None, [], []),
            ("10", [10], [ten]),
            ("20", [10, 20], [ten, twenty]),
            ("30", [20, 30], [twenty, thirty]),
            True,  # a lock can't be saved, and the error names it
            ("30", [20, 30], [twenty, thirty]),  # and what failed leaves no folder
            (30.0, [30.0]),
            (20.0, [20.0]),
            20.0,  # the newest is damaged: the one before it
        ]
    assert latest(run) == str(run / "iter_0000030")
    report = describe(run)
    assert isinstance(report, Run)
    assert [(step.step, step.committed) for step in report.steps] == [(20, True), (30, True)]


def test_strict_modes(world: ProcessWorld, tmp_path: Path) -> None:
    found = world.run(strict_modes, str(tmp_path / "a"))
    for rank, said in enumerate(found):
        lacks = ["c"] if rank == 3 else []
        assert said["common"] == {"args": {"lr": 0.1}, "content_metadata": {"version": 2}}
        assert said["return_all"] == [["b"], lacks]
        assert said["return_unexpected"] == [[], lacks]
        assert said["ignore_all"] == []
        assert said["log_all"] == []
        assert "1 are in the checkpoint and no rank asks for them: 'b'" in said["raise_all"]
        assert "does not hold 1 of the names in the state: 'c'" in said["assume_ok_unexpected"]
        assert said["metadata"] == {
            "a": (16, 3),
            "b": (16, 3),
            **{f"rng/shard_{number}_8": (8,) for number in range(8)},
        }
        assert said["plain"] == {"a": (16, 3), "b": (16, 3)}


@pytest.mark.parametrize("strict", ["assume_ok_unexpected", "return_all"])
def test_what_one_rank_cant_take_apart_fails_on_all(strict: str, world: ProcessWorld, tmp_path: Path) -> None:
    for said, took in world.run(broken_factory, str(tmp_path / "a"), strict):
        assert "failed on rank 3" in said
        assert "ArithmeticError: gate and up don't divide" in said
        assert took < AT_ONCE


def test_another_vocabulary_and_dtype(world: ProcessWorld, tmp_path: Path) -> None:
    stored = [float(row + 10 * rank) for rank in range(8) for row in range(8)]
    found = world.run(other_vocabulary, str(tmp_path / "a"))
    assert [value for smaller, _ in found for value in smaller] == stored[:56]
    assert [value for _, larger in found for value in larger] == stored + [0.0] * 16


@pytest.mark.wide
def test_a_chain_that_stock_has_numbered_loads_with_its_optimizers_state(tmp_path: Path) -> None:
    layout = Layout(ep=2)
    with ProcessWorld(2) as world:
        stock = world.run(stock_save_of_a_chain, layout, SMALL, str(tmp_path / "stock"), timeout=120)
    with ProcessWorld(2) as world:
        how = (layout, SMALL, str(tmp_path / "stock"), str(tmp_path / "again"))
        assert world.run(load_save_train, *how, timeout=120) == stock


def test_an_optimizer_that_is_asked_for_by_buckets_is_told_what_to_give(tmp_path: Path) -> None:
    with ProcessWorld(2) as world:
        for said in world.run(load_as_buckets, Layout(), SMALL, str(tmp_path / "step"), timeout=120):
            assert "is asked for as megatron-core's dp_reshardable" in said
            assert "load_content_metadata(folder)" in said


@pytest.mark.parametrize("described_before", [False, True])
def test_a_state_whose_memory_was_released_is_named(described_before: bool, tmp_path: Path) -> None:
    with ProcessWorld(2) as world:
        for said in world.run(save_without_memory, str(tmp_path / "step"), described_before, timeout=120):
            assert "'optimizer.state.exp_avg." in said
            assert "has no memory of its own, it was freed" in said
            assert "Give the tensor while its storage is there" in said
    assert not (tmp_path / "step" / "index.safetensors").exists()
