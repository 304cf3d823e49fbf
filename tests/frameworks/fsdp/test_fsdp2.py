"""FSDP2 with expert parallelism: trained, saved, resumed on other meshes; optimizers by names, without a step
or a gather."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import holdfast
from holdfast.errors import CoverageError
from tests.frameworks.fsdp import moe, published_jobs
from tests.frameworks.fsdp.moe import Layout
from tests.support.processes import ProcessWorld
from tests.support.wide import wide
from tests.system.checks import errors_of, same_everywhere

STEPS = 4
SAVED = Layout(8, ep=2)


@pytest.fixture(scope="module")
def eight() -> Iterator[ProcessWorld]:
    with ProcessWorld(8) as world:
        yield world


@pytest.fixture(scope="module")
def saved(eight: ProcessWorld, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[float]]]:
    path = str(tmp_path_factory.mktemp("fsdp2") / "c")
    return path, eight.run(moe.train_and_save, path, SAVED, STEPS)


def test_the_same_mesh_goes_on_as_if_nothing_had_been(
    eight: ProcessWorld, saved: tuple[str, list[list[float]]]
) -> None:
    path, losses = saved
    assert eight.run(moe.resume, path, SAVED, STEPS) == losses
    assert (
        len({tuple(mine) for mine in losses}) == 4
    )  # ranks of one expert-parallel group see the same tokens


@pytest.mark.parametrize(
    "layout",
    [Layout(8, ep=2, replicas=2), *wide((Layout(8, ep=4), Layout(8, ep=8)))],
)
def test_other_meshes_of_as_many_ranks(
    eight: ProcessWorld, saved: tuple[str, list[list[float]]], layout: Layout
) -> None:
    eight.run(moe.resume, saved[0], layout, STEPS)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(3),
        *wide((Layout(1), Layout(2, ep=2), Layout(4, ep=2), Layout(4, replicas=2), Layout(6, ep=2))),
    ],
)
def test_other_numbers_of_ranks(saved: tuple[str, list[list[float]]], layout: Layout) -> None:
    with ProcessWorld(layout.world) as world:
        world.run(moe.resume, saved[0], layout, STEPS)


@pytest.fixture(scope="module")
def saved_itself(
    eight: ProcessWorld, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[list[float]]]:
    path = str(tmp_path_factory.mktemp("itself") / "c")
    return path, eight.run(moe.train_and_save_itself, path, SAVED, STEPS)


@pytest.mark.wide
def test_an_optimizer_as_it_is_goes_on(
    eight: ProcessWorld, saved_itself: tuple[str, list[list[float]]]
) -> None:
    """In the state as it is, in a fresh model that has taken no step: on the same mesh as if nothing had
    been, and on another."""
    path, losses = saved_itself
    assert eight.run(moe.resume_by_a_load_alone, path, SAVED, STEPS, True) == losses
    eight.run(moe.resume_by_a_load_alone, path, Layout(8, ep=4, replicas=2), STEPS, True)
    with ProcessWorld(3) as world:
        world.run(moe.resume_by_a_load_alone, path, Layout(3), STEPS, True)


@pytest.mark.wide
def test_a_load_alone_resumes_what_get_state_dict_gives(
    eight: ProcessWorld, saved: tuple[str, list[list[float]]]
) -> None:
    """Nobody calls set_state_dict."""
    path, losses = saved
    assert eight.run(moe.resume_by_a_load_alone, path, SAVED, STEPS, False) == losses


def test_states_that_are_not_shaped_as_their_parameter(eight: ProcessWorld, tmp_path: Path) -> None:
    for words in eight.run(moe.states_of_other_shapes, str(tmp_path / "c")):
        assert "an optimizer state 'rows' of shape (7, 1) for a DTensor of shape (7, 6)" in words
        assert "let it take a step before the load" in words


def test_a_state_that_one_rank_lacks_is_named(eight: ProcessWorld, tmp_path: Path) -> None:
    eight.start(moe.lose_a_state, str(tmp_path / "c"), SAVED, "skip", 2)
    error = same_everywhere(errors_of(eight.collect(60)), 8)
    assert isinstance(error, CoverageError)
    assert (
        f"Tensor 'optim.state.{moe.LOST}.exp_avg' of shape [8, 14, 10] is not covered: from index ["
        in str(error)
    )
    assert "ranks 0, 1, 3, 4, 5, 6, 7 wrote the rest" in str(error)
    assert not list((tmp_path / "c").glob("index*"))


def test_a_state_that_one_rank_lacks_is_zeros_if_asked(eight: ProcessWorld, tmp_path: Path) -> None:
    eight.run(moe.lose_a_state, str(tmp_path / "c"), SAVED, "zeros", 2)


@pytest.mark.wide
def test_after_an_evaluation(eight: ProcessWorld, tmp_path: Path) -> None:
    eight.run(moe.save_after_an_evaluation, str(tmp_path / "c"), SAVED)


def test_a_models_own_state_dict(eight: ProcessWorld, tmp_path: Path) -> None:
    eight.run(moe.without_functions, str(tmp_path / "c"))


@pytest.mark.wide
def test_what_torch_and_dcp_saved_is_loaded(eight: ProcessWorld, tmp_path: Path) -> None:
    eight.run(moe.switch_from_torch, str(tmp_path / "c"), SAVED)


def test_a_float32_trainer_is_compared_with_a_bfloat16_folder(eight: ProcessWorld, tmp_path: Path) -> None:
    """Rounded on each rank, of DTensors, their copies, and tied weights."""
    file = tmp_path / "model.safetensors"
    told = eight.run(moe.fingerprints_beside_a_bfloat16_folder, str(file))
    live = told[0]
    assert all(one == live for one in told)
    found = holdfast.same(live, tmp_path)
    assert found.same
    assert found.converted == dict.fromkeys(live, "bfloat16")
    assert str(found) == "the same: 6 tensors; compared as bfloat16: 6 tensors"
    tensors = load_file(file)
    for name in ("up.weight", "head.weight"):
        other = {**tensors, name: tensors[name].clone()}
        other[name].view(torch.int16)[-1, -1] ^= 1
        (tmp_path / name).mkdir()
        save_file(other, tmp_path / name / "model.safetensors")
        assert [one.name for one in holdfast.same(live, tmp_path / name).different] == [name]


def test_sharded_weights_have_fingerprints_under_published_names(eight: ProcessWorld) -> None:
    """As whole weights in one process have them; beside optimizer state, also with a prefix of the names."""
    alone = holdfast.fingerprint(
        published_jobs.whole(), published=published_jobs.CONFIG, job=holdfast.Job(no_dist=True)
    )
    assert len(alone) == 3 + 3 * published_jobs.EXPERTS
    for found in eight.run(published_jobs.published_fingerprints):
        assert found == [alone] * 4
    for message in eight.run(published_jobs.open_offsets):
        assert "known to all ranks together only" in message
