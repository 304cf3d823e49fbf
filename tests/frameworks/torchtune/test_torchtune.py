"""torchtune's checkpoint client after `holdfast.install()`, over a small Llama 2 that is sharded and trained as its
distributed recipe does."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast._frameworks.torch_dcp.torch_dist import export_torch_dist
from holdfast.errors import BadInput
from tests.support.processes import ProcessWorld
from tests.support.stand_ins import stand_in
from tests.support.third_parties import needs
from tests.support.waiting import SLACK

pytestmark = needs("torchtune", "omegaconf")
EPOCHS, WORDS = 3, 32
WITHOUT = ("torchao", "datasets", "sentencepiece", "tiktoken")
"""Quantization, data and tokenizers, which a save needs nothing from."""


class Run:
    """A model, its optimizer, and torchtune's client of checkpoints."""

    def __init__(self, folder: str) -> None:
        stand_in(WITHOUT)
        from omegaconf import OmegaConf
        from torchtune import training
        from torchtune.models.llama2 import llama2
        from torchtune.training.checkpointing import _checkpoint_client

        torch.manual_seed(3)
        self.model = llama2(WORDS, num_layers=2, num_heads=2, num_kv_heads=2, embed_dim=16, max_seq_len=8)
        self.base = Path(folder, "base")
        if dist.get_rank() == 0:
            self.base.mkdir(parents=True, exist_ok=True)
            torch.save(self.model.state_dict(), self.base / "base.pt")
        dist.barrier()
        training.shard_model(
            self.model,
            [lambda name, _: name.startswith("layers.") and name.count(".") == 1],
            cpu_offload=False,
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        of_client = {
            "checkpointer": {
                "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
                "checkpoint_dir": str(self.base),
                "checkpoint_files": ["base.pt"],
                "model_type": "LLAMA2",
                "output_dir": str(Path(folder, "out")),
            },
            "enable_async_checkpointing": True,
            "resume_from_checkpoint": True,
            "device": "cpu",
        }
        self.client = _checkpoint_client.CheckpointClient(OmegaConf.create(of_client))
        self.progress = _checkpoint_client.TrainingProgress

    def train(self, epoch: int) -> float:
        generator = torch.Generator().manual_seed(epoch)  # the same data on any number of ranks
        words = torch.randint(WORDS, (4, 8), generator=generator)
        loss = self.model(words).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def save(self, epoch: int) -> None:
        self.client.save_checkpoint(self.model, self.optimizer, self.progress(1, epoch, EPOCHS, 1), epoch)

    def finish(self) -> None:
        """Wait for the asynchronous save, as the next one does."""
        self.client._get_dcp_checkpointer()._checkpoint_future.result()

    def whole(self) -> dict[str, torch.Tensor]:
        """All weights and moments, unsharded."""
        found = {name: value.full_tensor() for name, value in self.model.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {
                f"{number}.{name}": value.full_tensor() if hasattr(value, "full_tensor") else value
                for name, value in state.items()
            }
        return found


def install(stall_timeout: float = 30) -> None:
    logging.disable(logging.WARNING)
    holdfast.install("torchtune", job=holdfast.Job(timeout=60, stall_timeout=stall_timeout))


def guarded_names() -> tuple[str, ...]:
    [found] = [one for one in holdfast.installed() if one.name == "torchtune"]
    assert found.missing == ()
    return found.guarded


def saves(rank: int, folder: str) -> tuple[tuple[str, ...], dict[str, torch.Tensor], list[float]]:
    """Train and save two epochs in the background; return what is guarded, what was saved, and later losses."""
    install()
    run = Run(folder)
    for epoch in range(2):
        run.train(epoch)
        run.save(epoch)
    saved = run.whole()
    run.finish()
    return guarded_names(), saved, [run.train(2)]


def loads(rank: int, folder: str, stock: bool = False) -> tuple[int, dict[str, torch.Tensor], list[float]]:
    """Resume as the recipe does: from the newest epoch that torchtune finds. stock: without Holdfast."""
    if not stock:
        install()
    run = Run(folder)
    found = run.client.load_distributed_checkpoint(run.model, run.optimizer)
    return found["epochs_run"], run.whole(), [run.train(2)]


def ends(rank: int, folder: str) -> dict[str, torch.Tensor]:
    """Save the last epoch, which torchtune gathers on rank 0 and writes itself."""
    install()
    run = Run(folder)
    run.train(0)
    run.save(EPOCHS - 1)
    return {name: value.full_tensor() for name, value in run.model.state_dict().items()}


def saves_with_a_writer_of_its_own(rank: int, folder: str) -> tuple[list[str], int]:
    """Put a writer with code of its own into torchtune; return what was logged, and the epoch that it loads."""
    install()
    run = Run(folder)
    from torch.distributed.checkpoint import FileSystemWriter
    from torchtune.training.checkpointing import _checkpointer

    class Writer(FileSystemWriter):
        def storage_meta(self) -> Any:
            return super().storage_meta()

    _checkpointer.FileSystemWriter = Writer
    logging.disable(logging.NOTSET)
    said: list[str] = []
    logging.getLogger("holdfast").addFilter(lambda record: said.append(record.getMessage()) is None)
    saver = run.client._get_dcp_checkpointer()
    for epoch in range(2):
        saver.save_checkpoint({"model": run.model.state_dict(), "epochs_run": epoch}, epoch)
    state = {"model": run.model.state_dict(), "epochs_run": -1}
    saver.load_checkpoint(state)
    return said, state["epochs_run"]


def saves_without(rank: int, folder: str, absent: int) -> tuple[str, float]:
    """One rank never comes to the save."""
    install(2)
    run = Run(folder)
    run.train(0)
    begun = time.monotonic()
    if rank == absent:
        return "elsewhere", 0.0
    try:
        run.save(0)
        run.finish()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun
    return "saved", time.monotonic() - begun


# -- the tests ----------------------------------------------------------------------------------


class Saved(NamedTuple):
    """What four ranks have saved, two epochs in the background."""

    folder: Path
    guarded: tuple[str, ...]
    values: dict[str, torch.Tensor]
    losses: list[float]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("torchtune")
    with ProcessWorld(4) as world:
        return Saved(folder, *world.run(saves, str(folder), timeout=100)[0])


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_each_epoch_is_a_checkpoint_of_holdfast(saved: Saved) -> None:
    assert len(saved.guarded) == 4
    for epoch in range(2):
        folder = saved.folder / "out" / f"dist_epoch_{epoch}"
        assert (folder / "index.safetensors").exists()
        assert not list(folder.glob("*.distcp"))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.wide)])
def test_any_number_of_ranks_goes_on_from_the_newest(ranks: int, saved: Saved) -> None:
    with ProcessWorld(ranks) as world:
        epochs, loaded, losses = world.run(loads, str(saved.folder), timeout=100)[0]
    assert epochs == 1
    assert same(loaded, saved.values)
    assert losses == (saved.losses if ranks == 4 else pytest.approx(saved.losses, rel=1e-5))


@pytest.mark.wide
def test_stock_goes_on_from_an_export(saved: Saved, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export_torch_dist(saved.folder / "out" / "dist_epoch_1", tmp_path / "out" / "dist_epoch_1")
    with ProcessWorld(4) as world:
        epochs, loaded, losses = world.run(loads, str(tmp_path), True, timeout=100)[0]
    assert (epochs, losses) == (1, saved.losses)
    assert same(loaded, saved.values)


def test_the_last_epoch_is_torchtunes_own_file(tmp_path: Path) -> None:
    with ProcessWorld(2) as world:
        weights = world.run(ends, str(tmp_path), timeout=100)[0]
    [file] = (tmp_path / "out").rglob("model-*.bin")
    assert same(torch.load(file), weights)


def test_a_writer_with_code_of_its_own_stays_and_a_line_says_so(tmp_path: Path) -> None:
    with ProcessWorld(2) as world:
        for said, epoch in world.run(saves_with_a_writer_of_its_own, str(tmp_path), timeout=100):
            assert epoch == 1
            assert len(said) == 2  # one for each folder
            for line in said:
                assert "torch.distributed.checkpoint.save is not replaced" in line
                assert "Writer" in line
    assert list((tmp_path / "out" / "dist_epoch_1").glob("*.distcp"))


@pytest.mark.wide
def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    with ProcessWorld(4) as world:
        found = world.run(saves_without, str(tmp_path), 2, timeout=100)
    for rank, (said, took) in enumerate(found):
        if rank != 2:
            assert "RankFailed" in said
            assert "rank 2" in said
            assert took < 2 + SLACK


def save_to_a_url(rank: int, folder: str) -> str:
    stand_in(WITHOUT)
    from torchtune.training.checkpointing import DistributedCheckpointer

    os.chdir(folder)
    holdfast.install("torchtune", session=False)
    try:
        to_bucket = DistributedCheckpointer("base", "s3://bucket/run")
        to_bucket.save_checkpoint({"w": torch.zeros(2)}, 0, save_async=False)
    except BadInput as error:
        return str(error)
    finally:
        holdfast.uninstall()
    return ""


def test_its_own_checkpointer_is_given_no_url(tmp_path: Path) -> None:
    with ProcessWorld(1) as world:
        assert "a local folder named 's3:'" in world.run(save_to_a_url, str(tmp_path))[0]
    assert list(tmp_path.iterdir()) == []
