"""`TrainState`: random states, positions in the data, counters and scaler, on the same and other ranks."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast._core.format.plain_objects import TORCH
from holdfast.errors import BadInput, HoldfastError, MissingTensors
from tests.run import train_state_jobs as jobs
from tests.support.processes import ProcessWorld

ALONE = holdfast.Job(no_dist=True)


@pytest.fixture(scope="module")
def two() -> Iterator[ProcessWorld]:
    with ProcessWorld(2) as world:
        yield world


@pytest.fixture(scope="module")
def three() -> Iterator[ProcessWorld]:
    with ProcessWorld(3) as world:
        yield world


def test_each_rank_goes_on_with_its_numbers_and_its_data(two: ProcessWorld, tmp_path: Path) -> None:
    after = two.run(jobs.save, str(tmp_path), True)
    assert after[0][0] != after[1][0]
    assert [item for _, item in after] == [1, 101]
    assert two.run(jobs.resume, str(tmp_path), True) == [(*each, (7, 2, 1024.0)) for each in after]


def test_new_ranks_draw_their_own_and_those_that_were_there_go_on(
    two: ProcessWorld, three: ProcessWorld, tmp_path: Path
) -> None:
    after = [drawn for drawn, _ in two.run(jobs.save, str(tmp_path), False)]
    more: list[Any] = three.run(jobs.resume, str(tmp_path), False)
    assert [drawn for drawn, _, _ in more[:2]] == after
    assert {counts for _, _, counts in more} == {(7, 2, 1024.0)}
    assert all(new != old for drawn in after for new, old in zip(more[2][0], drawn, strict=True))
    jobs.seed(1002)
    assert more[2][0] != jobs.draw(), "it kept the random states of its start"
    assert three.run(jobs.resume, str(tmp_path), False) == more, "the same at each start"


def test_those_of_ranks_that_are_gone_are_dropped(
    two: ProcessWorld, three: ProcessWorld, tmp_path: Path
) -> None:
    after = [drawn for drawn, _ in three.run(jobs.save, str(tmp_path), False)]
    fewer: list[Any] = two.run(jobs.resume, str(tmp_path), False)
    assert [drawn for drawn, _, _ in fewer] == after[:2]


def test_positions_of_another_number_of_ranks_are_refused_on_all(
    two: ProcessWorld, three: ProcessWorld, tmp_path: Path
) -> None:
    for before, now, said in ((two, three, ("0-1", "0-2")), (three, two, ("0-2", "0-1"))):
        run = tmp_path / said[0]
        before.run(jobs.save, str(run), True)
        for error in now.run(jobs.resume, str(run), True):
            assert error.startswith("LoadFailed")
            assert f"those of ranks {said[0]}, and ranks {said[1]} load them" in error
        assert all(len(fine) == 3 for fine in now.run(jobs.resume, str(run), False)), "without the loader"
        anew: list[Any] = now.run(jobs.resume, str(run), True, ["train.loader"])
        assert [(item, counts) for _, item, counts in anew] == [
            (100 * rank, (7, 2, 1024.0)) for rank in range(len(anew))
        ]


def test_a_rule_makes_positions_for_another_number_of_ranks(
    two: ProcessWorld, three: ProcessWorld, tmp_path: Path
) -> None:
    for before, now, count in ((two, three, 2), (three, two, 3)):
        run = str(tmp_path / str(count))
        before.run(jobs.save, run, True)
        found: list[Any] = now.run(jobs.merged, run)
        read = [100 * rank for rank in range(count)]
        assert found == [([100 * rank, *read], 7) for rank in range(len(found))]
        same: list[Any] = before.run(jobs.merged, run)
        assert same == [([100 * rank], 7) for rank in range(count)], "on the same ranks no rule is asked"


@pytest.mark.parametrize("how", ["holdfast", "dcp", "direct"])
def test_it_is_stateful_wherever_a_state_is_saved(tmp_path: Path, how: str) -> None:
    train, loader = jobs.make(0, True)
    train.step = 3
    loader.next()
    state = {"train": train}
    direct = train.state_dict()
    if how == "holdfast":
        holdfast.save(state, tmp_path, job=ALONE)
    elif how == "dcp":
        holdfast.dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    expected = jobs.draw()
    other, position = jobs.make(0, True)
    if how == "holdfast":
        holdfast.load({"train": other}, tmp_path, job=ALONE)
    elif how == "dcp":
        holdfast.dcp.load({"train": other}, checkpoint_id=tmp_path, no_dist=True)
    else:
        other.load_state_dict(direct)
    assert jobs.draw() == expected
    assert (other.step, position.read) == (3, [0])


def test_another_generator_of_numpy(tmp_path: Path) -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.Philox(1))
        holdfast.save({"train": holdfast.TrainState()}, tmp_path, job=ALONE)
        expected = np.random.rand(5).tolist()
        np.random.set_bit_generator(np.random.Philox(2))
        holdfast.load({"train": holdfast.TrainState()}, tmp_path, job=ALONE)
        assert np.random.rand(5).tolist() == expected
    finally:
        np.random.set_bit_generator(before)


def test_a_checkpoint_without_positions_is_not_taken_for_one_with_them(tmp_path: Path) -> None:
    holdfast.save({"train": jobs.make(0, False)[0]}, tmp_path, job=ALONE)
    with pytest.raises(MissingTensors, match="loader"):
        holdfast.load({"train": jobs.make(0, True)[0]}, tmp_path, job=ALONE)


@pytest.mark.gpu
def test_the_random_states_of_the_device(tmp_path: Path) -> None:
    holdfast.save({"train": holdfast.TrainState()}, tmp_path, job=ALONE)
    expected = torch.rand(3, device="cuda").tolist()
    holdfast.load({"train": holdfast.TrainState()}, tmp_path, job=ALONE)
    assert torch.rand(3, device="cuda").tolist() == expected


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["EVIL"],)


def test_a_position_executes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVIL", str(tmp_path / "made"))
    train, _ = jobs.make(0, True)
    state = train.state_dict()
    torch.save({"position": Evil()}, tmp_path / "evil.pt")
    for data in (TORCH + pickle.dumps(Evil()), TORCH + (tmp_path / "evil.pt").read_bytes()):
        state["loader"]["state"].value = data
        with pytest.raises(HoldfastError):
            train.load_state_dict(state)
    assert not (tmp_path / "made").exists()


def test_bad_values_are_one_sentence() -> None:
    with pytest.raises(BadInput, match="A DataLoader has no state_dict and load_state_dict"):
        holdfast.TrainState(torch.utils.data.DataLoader([1]))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="A Random has no state_dict"):
        holdfast.TrainState(scaler=random.Random())  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"seed must be a whole number, not 1\.5"):
        holdfast.TrainState(seed=1.5)  # type: ignore[arg-type]
