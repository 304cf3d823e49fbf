"""A load under a live graph: autograd refuses to go on with values that are no longer there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

import holdfast
from holdfast.errors import CorruptCheckpoint
from tests.state.test_subclasses import TwoTensor

GONE = "has been modified by an inplace operation"


@pytest.fixture
def saved(tmp_path: Path) -> str:
    holdfast.save(
        {"w": torch.full((4, 3), 5.0), "b": torch.full((3, 4), 5.0).T},
        tmp_path,
        job=holdfast.Job(no_dist=True),
    )
    return str(tmp_path)


def test_the_backward_pass_of_a_graph_that_a_load_has_changed_is_refused(saved: str) -> None:
    w = nn.Parameter(torch.ones(4, 3))
    loss = (w * w).sum()
    holdfast.load({"w": w}, saved, job=holdfast.Job(no_dist=True))
    with pytest.raises(RuntimeError, match=GONE):
        loss.backward()
    (w * w).sum().backward()  # a graph of the values that are there now
    assert w.grad is not None
    assert torch.equal(w.grad, torch.full((4, 3), 10.0))


@pytest.mark.parametrize("by", ["itself", "state_dict", "get_state_dict", "a part"])
def test_however_the_parameters_are_given(by: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    holdfast.save({"m": model}, tmp_path, job=holdfast.Job(no_dist=True))
    loss = model(model(torch.ones(2, 3))).sum()
    if by == "itself":
        state: dict[str, object] = {"m": model}
    elif by == "state_dict":
        state = {"m": model.state_dict()}
    elif by == "get_state_dict":
        state = {"m": holdfast.get_state_dict(model)[0]}
    else:
        state = {"m": {"weight": holdfast.Shard(model.weight.detach()[1:2], (3, 3), (1, 0))}}
    holdfast.load(state, tmp_path, job=holdfast.Job(no_dist=True))
    with pytest.raises(RuntimeError, match=GONE):
        loss.backward()


def test_what_is_not_loaded_is_left_alone(saved: str) -> None:
    w, other = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3))
    loss = (other * other).sum()
    holdfast.load({"w": w, "b": other}, saved, job=holdfast.Job(no_dist=True), include=["w"])
    loss.backward()


def test_a_load_that_fails_half_way_is_told_to_autograd(saved: str) -> None:
    """What a failed load leaves of the old values is not known."""
    w = nn.Parameter(torch.ones(4, 3))
    loss = (w * w).sum()
    (data,) = Path(saved, "data").iterdir()
    content = bytearray(data.read_bytes())
    at = content.index(torch.full((12,), 5.0).numpy().tobytes())
    content[at] ^= 1
    data.write_bytes(content)
    with pytest.raises(CorruptCheckpoint):
        holdfast.load({"w": w}, saved, job=holdfast.Job(no_dist=True))
    with pytest.raises(RuntimeError, match=GONE):
        loss.backward()


@pytest.mark.parametrize("direct", [True, False])
def test_inference_tensors_are_filled(direct: bool, saved: str) -> None:
    """They are in no graph, and torch lets nobody change them outside of inference mode; a load does."""
    with torch.inference_mode():
        w, b = torch.zeros(4, 3), torch.zeros(3, 4).T
    holdfast.load({"w": w} if direct else {"b": b}, saved, job=holdfast.Job(no_dist=True))
    assert torch.equal(w if direct else b, torch.full((4, 3), 5.0))
    with torch.inference_mode():
        plain = torch.zeros(4, 3)
        holdfast.load({"w": plain}, saved, job=holdfast.Job(no_dist=True))
    assert torch.equal(plain, torch.full((4, 3), 5.0))


def test_wrappers_are_told_too(tmp_path: Path) -> None:
    holdfast.save({"w": TwoTensor(torch.ones(3), torch.ones(3))}, tmp_path, job=holdfast.Job(no_dist=True))
    w = TwoTensor(torch.zeros(3), torch.zeros(3)).requires_grad_()
    loss = (w * w).sum()
    holdfast.load({"w": w}, tmp_path, job=holdfast.Job(no_dist=True))
    with pytest.raises(RuntimeError, match=GONE):
        loss.backward()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_dtensors_are_told_too(saved: str) -> None:
    """They count apart from their local tensors."""
    mesh = init_device_mesh("cpu", (1,))
    w = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    for given in (w, w.detach()):
        loss = (w * w).sum()
        holdfast.load({"w": given}, saved, job=holdfast.Job(no_dist=True))
        with pytest.raises(RuntimeError, match=GONE):
            loss.backward()
    assert isinstance(w, DTensor)
    local = w.to_local()
    loss = (local * local).sum()
    holdfast.load({"w": w}, saved, job=holdfast.Job(no_dist=True))
    with pytest.raises(RuntimeError, match="has been modified in"):
        loss.backward()
