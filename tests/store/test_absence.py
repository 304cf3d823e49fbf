"""Why a path holds no checkpoint: a sentence for each case, from every call and command."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import holdfast
from holdfast import huggingface
from holdfast._tools.checkpoints.inspect import describe
from holdfast._tools.checkpoints.prune import prune
from holdfast._tools.checkpoints.verify import verify
from holdfast.errors import BadInput, HoldfastError, NotCommitted, StorageError
from holdfast.testing import MemoryStore

STATE = {"w": torch.zeros(3)}


def load(path: Any) -> None:
    holdfast.load({"w": torch.zeros(3)}, path, job=holdfast.Job(no_dist=True))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run from which old steps were removed."""
    with holdfast.Checkpoints(
        tmp_path / "run", keep=2, asynchronous=False, job=holdfast.Job(no_dist=True)
    ) as checkpoints:
        for step in range(1, 5):
            checkpoints.save(step, STATE)
    return tmp_path / "run"


def refused(path: Path) -> HoldfastError:
    with pytest.raises(NotCommitted, match="holds no committed checkpoint") as caught:
        load(path)
    assert str(path) in caught.value.message
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert "it does not exist" in refused(tmp_path / "nothing").message


def test_a_place_that_is_not_there_by_its_url() -> None:
    with pytest.raises(NotCommitted, match=r"Is the URL right\?$"):
        holdfast.load({"a": 1}, MemoryStore())


def test_a_step_that_was_removed(run: Path) -> None:
    error = refused(run / "step-00000001")
    assert f"it does not exist; the newest committed steps in {run} are 4, 3." in error.message
    assert "keep=" in error.hint
    with pytest.raises(NotCommitted, match="are 4, 3"):
        holdfast.Checkpoints(run, job=holdfast.Job(no_dist=True)).restore(STATE, 1)


FOREIGN = {
    "adapter_model.safetensors": "it is an adapter of PEFT's (LoRA) without the model",
    "adapter_config.json": "it is an adapter of PEFT's (LoRA) without the model",
    "pytorch_model.bin": "whose weights are pickled (pytorch_model.bin)",
    "pytorch_model-00001-of-00002.bin": "whose weights are pickled (pytorch_model.bin)",
    "pytorch_model.bin.index.json": "whose weights are pickled (pytorch_model.bin)",
    "q4_k_m.gguf": "its weights are in GGUF",
    "model-00001-of-00002.safetensors": "neither model.safetensors nor model.safetensors.index.json",
    "generation_config.json": "the configuration of a published model without its weights",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_of_hugging_face_that_is_not_read(name: str, tmp_path: Path) -> None:
    for file in ("config.json", name):
        (tmp_path / file).write_text("{}")
    error = refused(tmp_path)
    assert FOREIGN[name] in error.message
    assert error.hint
    with pytest.raises(BadInput, match="no folder of a published model") as caught:
        huggingface.import_(tmp_path, tmp_path / "out", job=holdfast.Job(no_dist=True))
    assert FOREIGN[name] in caught.value.message


def test_a_repository_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots" / "abc123").mkdir(parents=True)
    error = refused(tmp_path)
    assert "in the cache of the Hugging Face hub, with 1 revision." in error.message
    assert f"Give the folder of a revision: {tmp_path}/snapshots/abc123." in error.hint
    with pytest.raises(BadInput, match="in the cache of the Hugging Face hub, with 1 revision"):
        huggingface.import_(tmp_path, tmp_path / "out", job=holdfast.Job(no_dist=True))


def test_a_published_model_where_only_our_own_checkpoints_will_do(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(NotCommitted, match="it is a published model, not a checkpoint of Holdfast"):
        verify(tmp_path)


def test_a_run_folder(run: Path) -> None:
    error = refused(run)
    assert f"it is a run folder, whose newest committed step is {run}/step-00000004" in error.message
    for step in (3, 4):
        os.unlink(run / f"step-0000000{step}" / "index.safetensors")
    assert "a run folder, and none of its steps is committed" in refused(run).message


def test_a_local_folder_of_a_run(tmp_path: Path) -> None:
    with holdfast.Checkpoints(
        tmp_path / "run", local=tmp_path / "nvme", job=holdfast.Job(no_dist=True)
    ) as run:
        run.save(3, STATE)
    [copy] = (tmp_path / "nvme").glob("run-*/step-*")
    error = refused(tmp_path / "nvme")
    assert f"holds {copy.parent.name!r} (the local folder of a run)" in error.message
    error = refused(copy.parent)
    assert error.message.endswith(f"with this host's copies of steps: {copy.name}.")
    assert f"`holdfast inspect {copy}` shows one" in error.hint
    describe(copy)


def test_a_checkpoint_of_torch_dcp(tmp_path: Path) -> None:
    """Which load as they are; but not all that reads an index can read them."""
    torch_dcp.save(STATE, checkpoint_id=tmp_path / "dcp")
    load(tmp_path / "dcp")
    with pytest.raises(NotCommitted, match="one of torch DCP or megatron-core, not of Holdfast") as caught:
        verify(tmp_path / "dcp")
    assert f"`holdfast import torch_dist {tmp_path}/dcp OUT`" in caught.value.hint


def test_a_checkpoint_of_deepspeed_is_imported(tmp_path: Path) -> None:
    step = tmp_path / "global_step5"
    step.mkdir()
    (step / "mp_rank_00_model_states.pt").write_bytes(b"x")
    (tmp_path / "latest").write_text("global_step5")
    for place in (tmp_path, step):
        error = refused(place)
        assert "it is one of DeepSpeed (ZeRO), not of Holdfast" in error.message
        assert f"`holdfast import zero {place} OUT`" in error.hint


def test_folders_that_hold_checkpoints_are_named(run: Path, tmp_path: Path) -> None:
    """An FSDP checkpoint of transformers' Trainer, whose parts are ours; a folder of runs."""
    alone = holdfast.Job(no_dist=True)
    trainer = tmp_path / "out" / "checkpoint-8"
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        holdfast.save(STATE, trainer / name, job=alone)
    (trainer / "trainer_state.json").write_text("{}")
    for act in (load, describe, verify, holdfast.open):
        with pytest.raises(
            NotCommitted, match=r"holds 'optimizer_0', 'pytorch_model_fsdp_0' \(checkpoints"
        ) as caught:
            act(trainer)
        assert caught.value.hint == f"Give such a folder: {trainer}/optimizer_0."
    assert "holds 'checkpoint-8' (a checkpoint of a trainer)" in refused(tmp_path / "out").message
    os.rename(tmp_path / "out", tmp_path / "other")
    assert "holds 'run' (a run folder)" in refused(tmp_path).message
    assert "holds 'run' (a run folder)" in prune(tmp_path).note
    assert prune(run).note == ""


def test_a_save_that_failed(tmp_path: Path) -> None:
    holdfast.save(STATE, tmp_path / "a", job=holdfast.Job(no_dist=True))
    os.unlink(tmp_path / "a" / "index.safetensors")
    error = refused(tmp_path / "a")
    assert "there are data files of Holdfast, but no index.safetensors" in error.message
    assert "reindex" in error.hint


PROJECTS = {
    "data of its own": ["data/train.csv", "data/raw/x.bin", "train.py"],
    "an empty data folder": ["data/", "train.py"],
    "data in safetensors": ["data/latents-00001.safetensors", "data/fetch-images.py"],
    "code named as an adapter": ["adapter_utils.py"],
}


@pytest.mark.parametrize("what", PROJECTS)
def test_a_folder_that_somebody_else_has_named_so(what: str, tmp_path: Path) -> None:
    """No save, and no fetch, has failed there, and it is no adapter."""
    project = tmp_path / "project"
    for name in PROJECTS[what]:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).mkdir(parents=True) if name.endswith("/") else (project / name).write_text("x")
    for act in (load, describe, verify, holdfast.open):
        with pytest.raises(NotCommitted, match=r"project holds no committed checkpoint: there is no index"):
            act(project)
    assert holdfast.latest(project) is None
    assert "there is no index.safetensors" in prune(project).note


def test_a_configuration_alone_may_be_that_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "may be the configuration of a published model without its weights" in refused(tmp_path).message


def test_an_empty_folder(tmp_path: Path) -> None:
    assert "it is an empty folder" in refused(tmp_path).message
    (tmp_path / "notes.txt").write_text("x")
    assert "there is no index.safetensors" in refused(tmp_path).message


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "it is a file, not a folder" in refused(tmp_path / "file").message
    for act in (verify, describe):
        with pytest.raises(NotCommitted, match="it is a file, not a folder"):
            act(tmp_path / "file")
    with pytest.raises(BadInput, match="is a file, not a folder"):
        prune(tmp_path / "file")
    for place in (tmp_path / "file", tmp_path / "file" / "step-1"):
        with pytest.raises(StorageError, match=r"file is a file, not a folder"):
            holdfast.save(STATE, place, job=holdfast.Job(no_dist=True))


ASKED: list[Callable[[Any], object]] = [
    lambda path: holdfast.save(STATE, path, job=holdfast.Job(no_dist=True)),
    load,
    lambda path: holdfast.Checkpoints(path, job=holdfast.Job(no_dist=True)),
    holdfast.latest,
    lambda path: holdfast.async_save(STATE, path, job=holdfast.Job(no_dist=True)),
]


@pytest.mark.parametrize("ask", ASKED, ids=["save", "load", "Checkpoints", "latest", "async_save"])
def test_what_can_not_be_a_path_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable[[Any], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    for path, words in (
        ("", "The path is empty"),
        ("a\0b", r"'a\\x00b' is not a path: it has a null character"),
        (os.fsdecode(b"caf\xe9"), r"caf\\udce9' is not valid UTF-8"),
        ("~nobody-of-that-name/x", "~nobody-of-that-name is no user's home folder"),
        (Path("s3://bucket/run"), "'s3:/bucket/run' would be a local folder named 's3:'"),
        (" gs://bucket/run", "would be a local folder named 'gs:'"),
        ("s3:bucket/run", "'s3:bucket/run' would be a local folder named 's3:bucket'"),
    ):
        with pytest.raises(BadInput, match=words):
            ask(path)
    assert os.listdir(tmp_path) == []


def test_a_folder_may_have_a_colon_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "s3:" / "run", "x:y/run", "a/s3:/run"):
        holdfast.save(STATE, path, job=holdfast.Job(no_dist=True))
        assert (tmp_path / path / "index.safetensors").exists()


def test_bytes_and_what_is_no_path_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="b'run' is bytes"):
        holdfast.latest(b"run")  # type: ignore[arg-type]
    for ask in ASKED:
        with pytest.raises(BadInput, match=r"of type int; give a str.*save\(state, path\)"):
            ask(7)


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    with holdfast.Checkpoints("~/run", asynchronous=False, job=holdfast.Job(no_dist=True)) as run:
        run.save(1, STATE)
    assert holdfast.latest("~/run") == str(tmp_path / "home" / "run" / "step-00000001")
    load("~/run/step-00000001")
    load("file://~/run/step-00000001")
    holdfast.save(STATE, "./~", job=holdfast.Job(no_dist=True))  # who means a folder of that name says so
    assert os.listdir(tmp_path / "here") == ["~"]


def test_a_current_folder_that_is_gone_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(BadInput, match="the current folder of this process is gone"):
        holdfast.latest("run")
    monkeypatch.chdir(tmp_path)
