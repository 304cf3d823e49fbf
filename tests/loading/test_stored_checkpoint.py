"""`holdfast.open`: a checkpoint as a value, whatever wrote it."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import holdfast
from holdfast._core.format.index import Index
from holdfast.errors import BadInput, CorruptCheckpoint, MissingTensors, NotCommitted
from holdfast.testing import MemoryStore
from tests.frameworks.huggingface.models import TINY, publish, weights

ALONE = holdfast.Job(no_dist=True)
W = torch.arange(24 * 40, dtype=torch.float32).reshape(24, 40)
STATE = {
    "model": {"w": W, "half": W[:4].bfloat16(), "one": torch.tensor(3.5), "none": torch.zeros(0, 4)},
    "lr": 0.5,
}


@pytest.fixture(params=["holdfast", "torch DCP", "a store"])
def opened(
    request: pytest.FixtureRequest, tmp_path: Path
) -> holdfast._core.loading.stored_checkpoint.StoredCheckpoint:
    if request.param == "torch DCP":
        torch_dcp.save(STATE, checkpoint_id=tmp_path / "it", no_dist=True)
        return holdfast.open(tmp_path / "it")
    where = MemoryStore() if request.param == "a store" else tmp_path / "it"
    holdfast.save(STATE, where, step=7, notes={"run": "a"}, job=ALONE)
    return holdfast.open(where)


INDICES = [
    np.s_[...],
    np.s_[3:5],
    np.s_[:, 7],
    np.s_[..., -1],
    np.s_[5],
    np.s_[-24, 39],
    np.s_[np.int64(2), 1:-1],
    np.s_[::5, 3:20:4],
    np.s_[1, ..., 2],
    np.s_[20:90],
    np.s_[9:3],
    (),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_an_index_reads_what_it_reads_of_a_tensor(
    opened: holdfast._core.loading.stored_checkpoint.StoredCheckpoint, index: object
) -> None:
    stored = opened["model.w"]
    assert torch.equal(stored[index], W[index])  # type: ignore[index]


def test_names_shapes_and_values(opened: holdfast._core.loading.stored_checkpoint.StoredCheckpoint) -> None:
    assert sorted(opened) == ["lr", "model.half", "model.none", "model.one", "model.w"]
    assert len(opened) == 5
    assert "model.w" in opened
    assert "w" not in opened
    stored = opened["model.w"]
    assert (stored.shape, stored.dtype, stored.nbytes, len(stored)) == ((24, 40), torch.float32, 3840, 24)
    assert repr(stored) == "StoredTensor('model.w', float32[24, 40])"
    assert np.array_equal(np.asarray(stored), W.numpy())
    assert opened["lr"] == 0.5
    assert opened["model.one"][...] == 3.5
    assert torch.equal(opened["model.half"][1:], W[1:4].bfloat16())
    assert opened["model.none"][...].shape == (0, 4)


def test_a_module_takes_what_is_below_a_prefix(tmp_path: Path) -> None:
    old, new = torch.nn.Linear(3, 5), torch.nn.Linear(3, 5)
    holdfast.save({"model": old, "step": 3}, tmp_path / "it", job=ALONE)
    with holdfast.open(tmp_path / "it") as checkpoint:
        new.load_state_dict(checkpoint.read("model"))
        lowered = checkpoint.read("model", dtype=torch.float16)
        assert checkpoint.read().keys() == {"model.weight", "model.bias", "step"}
    assert torch.equal(new.weight, old.weight)
    assert torch.equal(lowered["bias"], old.bias.half())
    with pytest.raises(MissingTensors, match="no name below 'modle'"):
        checkpoint.read("modle")


@pytest.mark.parametrize("as_object", [True, False], ids=["the module", "its state dict"])
def test_a_module_takes_an_extra_state_that_has_parts(tmp_path: Path, as_object: bool) -> None:
    class Scaled(torch.nn.Linear):
        extra: Any = None

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    def make() -> tuple[torch.nn.Module, Scaled, Scaled]:
        outer = Scaled(2, 2)
        outer.add_module("inner", inner := Scaled(2, 2))
        return torch.nn.ModuleDict({"outer": outer}), outer, inner

    old, outer, inner = make()
    outer.extra = {"scale": torch.ones(2), "of": {"rows": 3}}
    inner.extra = [torch.zeros(2), "text"]
    saved = old if as_object else old.state_dict()
    holdfast.save({"model": saved, "root": outer}, tmp_path / "it", job=ALONE)
    for prefix in ("model", "model.outer", "root"):
        new, new_outer, new_inner = make()
        target = new if prefix == "model" else new_outer
        target.load_state_dict(holdfast.open(tmp_path / "it").read(prefix))
        assert new_outer.extra["of"] == {"rows": 3}
        assert new_inner.extra[1] == "text"
        assert new_outer.extra["scale"].tolist() == [1, 1]
        assert new_inner.extra[0].tolist() == [0, 0]


def test_a_published_model_has_its_own_names(tmp_path: Path) -> None:
    publish(TINY["qwen3_moe"], tmp_path)
    expected, found = weights(tmp_path), holdfast.open(tmp_path)
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name][...], value) for name, value in expected.items())
    name, value = next((name, value) for name, value in expected.items() if value.dim() == 2)
    assert torch.equal(found[name][1:3, ::2], value[1:3, ::2])


def test_step_and_notes(tmp_path: Path) -> None:
    holdfast.save(STATE, tmp_path / "it", step=7, notes={"run": "a"}, job=ALONE)
    found = holdfast.open(tmp_path / "it")
    assert (found.step, found.notes, found.path) == (7, {"run": "a"}, str(tmp_path / "it"))


def test_a_slice_reads_little(tmp_path: Path) -> None:
    holdfast.save({"w": torch.zeros(4096, 1024)}, tmp_path / "it", job=ALONE)
    before = bytes_read()
    assert holdfast.open(tmp_path / "it")["w"][1000:1004].shape == (4, 1024)
    assert bytes_read() - before < 1 << 19  # of 16 MiB


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def test_damage_is_found_only_where_it_is_read(tmp_path: Path) -> None:
    holdfast.save({"w": torch.ones(4096, 1024)}, tmp_path / "it", job=ALONE)
    [data] = (tmp_path / "it" / "data").glob("*.safetensors")
    with data.open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"damage")
    stored = holdfast.open(tmp_path / "it")["w"]
    assert torch.equal(stored[3000:], torch.ones(1096, 1024))
    with pytest.raises(CorruptCheckpoint, match="part of 'w'"):
        stored[200:300]


WRONG: list[
    tuple[Callable[[holdfast._core.loading.stored_checkpoint.StoredTensor], object], type[Exception], str]
] = [
    (lambda w: w[24], IndexError, r"has the shape \[24, 40\]"),
    (lambda w: w[1, 2, 3], BadInput, "2 dimensions"),
    (lambda w: w[..., ...], BadInput, "whole numbers|dimensions"),
    (lambda w: w["a"], BadInput, "whole numbers, slices"),
    (lambda w: w[True], BadInput, "whole numbers, slices"),
    (lambda w: w[[1, 2]], BadInput, "whole numbers, slices"),
    (lambda w: w[None], BadInput, "whole numbers, slices"),
    (lambda w: w[torch.ones(2)], BadInput, "whole numbers, slices"),
    (lambda w: w[::-1], BadInput, "a step of -1"),
]


@pytest.mark.parametrize(("call", "error", "said"), WRONG)
def test_what_can_not_be_read_is_said(
    call: Callable[[holdfast._core.loading.stored_checkpoint.StoredTensor], object],
    error: type[Exception],
    said: str,
    tmp_path: Path,
) -> None:
    holdfast.save(STATE, tmp_path / "it", job=ALONE)
    with pytest.raises(error, match=said):
        call(holdfast.open(tmp_path / "it")["model.w"])


def test_names_and_folders_that_are_not_there(tmp_path: Path) -> None:
    holdfast.save(STATE, tmp_path / "it", job=ALONE)
    with pytest.raises(KeyError, match=r"nearest: 'model\.half'"):
        holdfast.open(tmp_path / "it")["model.hafl"]
    with pytest.raises(NotCommitted):
        holdfast.open(tmp_path / "nothing")
    wrong: list[Any] = [torch.complex32, "bfloat16", 1, {"model.w": torch.float16}]
    for dtype in wrong:
        with pytest.raises(BadInput, match=r"must be a torch\.dtype of floating-point numbers"):
            holdfast.open(tmp_path / "it").read(dtype=dtype)
        with pytest.raises(BadInput, match=r"must be a torch\.dtype of floating-point numbers"):
            holdfast.load(tmp_path / "it", cast=dtype)


def test_nothing_stays_open(tmp_path: Path) -> None:
    holdfast.save(STATE, tmp_path / "it", job=ALONE)

    def descriptors() -> list[str]:
        links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
        return [
            os.readlink(link) for link in links if link.is_symlink() and str(tmp_path) in os.readlink(link)
        ]

    found = holdfast.open(tmp_path / "it")
    assert found["model.one"][...] == 3.5
    found.close()
    found.close()
    assert descriptors() == []
    holdfast.open(tmp_path / "it").read()
    gc.collect()
    assert descriptors() == []


@pytest.mark.parametrize("lazy", [False, True])
def test_objects_are_read_at_once(lazy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each selection reads and verifies pages of the index, and each read opens a file: 4 ms an object."""
    state = {str(number): {"step": number, "betas": (0.9, number)} for number in range(50)}
    holdfast.save(state, tmp_path / "it", job=ALONE)
    calls, select = list[None](), Index.select

    def counted(self: Index, *args: Any) -> Any:
        calls.append(None)
        return select(self, *args)

    monkeypatch.setattr(Index, "select", counted)
    assert holdfast.load(tmp_path / "it", lazy=lazy) == state
    assert 0 < len(calls) <= 4
