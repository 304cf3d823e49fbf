"""FSDP2 states of other dtypes, names and shapes than they were saved with, and tied ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed.checkpoint as torch_dcp

from tests.frameworks.fsdp import values_jobs as jobs
from tests.frameworks.huggingface.models import TINY, publish
from tests.support.processes import ProcessWorld


@pytest.fixture(scope="module")
def four() -> Iterator[ProcessWorld]:
    with ProcessWorld(4) as world:
        yield world


@pytest.fixture(scope="module")
def three() -> Iterator[ProcessWorld]:
    with ProcessWorld(3) as world:
        yield world


@pytest.fixture(scope="module")
def saved(four: ProcessWorld, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("values") / "it")
    four.run(jobs.save, path, False)
    return path


def test_shards_are_converted_under_other_names(saved: str, four: ProcessWorld, three: ProcessWorld) -> None:
    for world in (four, three):
        world.run(jobs.load_cast_and_renamed, saved)


def test_shards_of_another_shape_are_left_as_they_are(
    saved: str, four: ProcessWorld, three: ProcessWorld
) -> None:
    for world in (four, three):
        world.run(jobs.load_with_another_head, saved)


@pytest.mark.parametrize("replicas", [1, 2])
def test_tied_shards_are_stored_once(
    replicas: int, four: ProcessWorld, three: ProcessWorld, tmp_path: Path
) -> None:
    four.run(jobs.save, str(tmp_path / "it"), True, replicas)
    three.run(jobs.load_tied, str(tmp_path / "it"), True)
    three.run(jobs.load_tied, str(tmp_path / "it"), False)


@pytest.mark.wide
def test_a_published_model_is_loaded_into_shards(three: ProcessWorld, tmp_path: Path) -> None:
    publish(TINY["qwen3"], tmp_path)
    three.run(jobs.published, str(tmp_path), "qwen3", timeout=120)


@pytest.mark.skipif(
    not hasattr(torch_dcp, "HuggingFaceStorageWriter"), reason="this torch has no such writer"
)
def test_torchs_consolidated_files_are_read_by_other_ranks(four: ProcessWorld, tmp_path: Path) -> None:
    for said in four.run(jobs.consolidate, str(tmp_path), timeout=90):
        [sentence] = said  # of the save; the load needs no collective
        assert "takes no storage_writer= (HuggingFaceStorageWriter)" in sentence
    assert {path.name for path in tmp_path.glob("model*.safetensors")} == {
        f"model-0000{number}-of-00002.safetensors" for number in (1, 2)
    }
