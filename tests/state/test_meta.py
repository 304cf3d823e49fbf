"""Tensors on the meta device: a load gives them memory, and fills it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

import holdfast
from holdfast._core.state.meta import materialize
from holdfast.errors import BadInput, CorruptCheckpoint, MissingTensors
from tests.state.sharded_jobs import with_boxes
from tests.state.test_subclasses import TwoTensor


class Tied(nn.Module):
    """A head tied to its embedding, a buffer, and a value that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(3)
        self.kept = nn.Parameter(torch.zeros(2, device="cpu"))

    def get_extra_state(self) -> int:
        return getattr(self, "extra", 0)

    def set_extra_state(self, state: int) -> None:
        self.extra = state


def trained() -> Tied:
    torch.manual_seed(1)
    model = Tied()
    model.extra = 7
    model.norm(torch.randn(5, 3))
    return model


def on_meta() -> Tied:
    with torch.device("meta"):
        return Tied()


def the_same(model: nn.Module, other: nn.Module) -> None:
    there = other.state_dict()
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, there[name]), name
        else:
            assert value == there[name]


@pytest.mark.parametrize("by", ["itself", "get_state_dict", "get_state_dict and set_state_dict"])
def test_a_model_on_the_meta_device_is_filled(by: str, tmp_path: Path) -> None:
    model, other = trained(), on_meta()
    holdfast.save({"m": model}, tmp_path, job=holdfast.Job(no_dist=True))
    kept, norm = other.kept, other.norm.weight
    assert norm.is_meta
    if by == "itself":
        holdfast.load({"m": other}, tmp_path, job=holdfast.Job(no_dist=True))
    else:
        state = {"m": holdfast.get_state_dict(other)[0]}
        holdfast.load(state, tmp_path, job=holdfast.Job(no_dist=True))
        assert not state["m"]["norm.weight"].is_meta
        if "set" in by:
            holdfast.set_state_dict(other, model_state_dict=state["m"], optim_state_dict={})
    the_same(model, other)
    assert other.head.weight is other.embedding.weight
    assert other.kept is kept  # it had memory, and an optimizer may know it
    assert other.norm.weight.requires_grad
    other.head(other.norm(other.embedding(torch.tensor([1, 2])))).sum().backward()


def test_they_are_replaced_in_their_dict(tmp_path: Path) -> None:
    saved = {"a": {"w": torch.arange(6.0).view(2, 3)}, "l": [torch.ones(2), 5], "s": torch.ones(3)}
    holdfast.save(saved, tmp_path, job=holdfast.Job(no_dist=True))
    shard = holdfast.Shard(torch.empty(1, device="meta"), (3,), (1,))
    state: dict[str, Any] = {
        "a": {"w": torch.empty(2, 3, device="meta")},
        "l": [torch.empty(2, device="meta"), 0],
        "s": shard,
    }
    holdfast.load(state, tmp_path, job=holdfast.Job(no_dist=True))
    assert torch.equal(state["a"]["w"], saved["a"]["w"])
    assert torch.equal(state["l"][0], torch.ones(2))
    assert state["s"] is shard
    assert torch.equal(shard.tensor, torch.ones(1))
    assert state["a"]["w"].device.type == "cpu"


def test_what_is_missing_stays_on_the_meta_device(tmp_path: Path) -> None:
    holdfast.save({"a": torch.ones(2)}, tmp_path, job=holdfast.Job(no_dist=True))
    shard = holdfast.Shard(torch.empty(1, device="meta"), (2,), (0,))
    state: dict[str, Any] = {
        "a": torch.empty(2, device="meta"),
        "b": torch.empty(2, device="meta"),
        "c": shard,
    }
    with pytest.raises(MissingTensors, match="'b'; 'c'"):
        holdfast.load(state, tmp_path, job=holdfast.Job(no_dist=True))
    assert state["a"].is_meta
    assert holdfast.load(state, tmp_path, job=holdfast.Job(no_dist=True), strict=False).missing == ("b", "c")
    assert state["b"].is_meta
    assert state["c"] is shard
    assert shard.tensor.is_meta
    assert torch.equal(state["a"], torch.ones(2))


def test_a_load_that_fails_leaves_them_there(tmp_path: Path) -> None:
    holdfast.save({"a": torch.full((4,), 3.0)}, tmp_path, job=holdfast.Job(no_dist=True))
    (data,) = (tmp_path / "data").iterdir()
    content = bytearray(data.read_bytes())
    content[content.index(torch.full((4,), 3.0).numpy().tobytes())] ^= 1
    data.write_bytes(content)
    state = {"a": torch.empty(4, device="meta")}
    with pytest.raises(CorruptCheckpoint):
        holdfast.load(state, tmp_path, job=holdfast.Job(no_dist=True))
    assert state["a"].is_meta


def test_where_no_tensor_can_be_put_they_are_refused(tmp_path: Path) -> None:
    holdfast.save(
        {"t": (torch.ones(2), torch.ones(2)), "w.a": 1, "w.b": 2}, tmp_path, job=holdfast.Job(no_dist=True)
    )
    found = {"t": (torch.empty(2, device="meta"), torch.zeros(2))}
    holdfast.load(found, tmp_path, job=holdfast.Job(no_dist=True))
    assert all(torch.equal(one, torch.ones(2)) for one in found["t"]), "another tuple took its place"
    halves = [torch.empty(2, device="meta") for _ in range(2)]
    with pytest.raises(BadInput, match=r"'w.a' is on the meta device, and stands where no other"):
        holdfast.load({"w": TwoTensor(*halves)}, tmp_path, job=holdfast.Job(no_dist=True))
    with pytest.raises(BadInput, match="TwoTensor on the meta device; materialise it first"):
        materialize("w", TwoTensor(*halves))
    with pytest.raises(BadInput, match="'a' is on the meta device and has no data"):
        holdfast.save({"a": halves[0]}, tmp_path / "new", job=holdfast.Job(no_dist=True))


def test_optimizer_states_of_parameters_on_the_meta_device(tmp_path: Path) -> None:
    """They come with memory, too."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    holdfast.save(
        {"optim": holdfast.get_state_dict(model, optimizer)[1]}, tmp_path, job=holdfast.Job(no_dist=True)
    )
    other = nn.Linear(3, 2, device="meta")
    state = {"optim": holdfast.get_state_dict(other, torch.optim.AdamW(other.parameters()))[1]}
    holdfast.load(state, tmp_path, job=holdfast.Job(no_dist=True))
    found = state["optim"]["state"]["weight"]["exp_avg"]
    assert torch.equal(found, optimizer.state[model.weight]["exp_avg"])


def test_dtensors_and_boxes_on_the_meta_device(tmp_path: Path) -> None:
    """Unevenly cut ones, too; a tensor that takes another's place says where it lies, as that one did."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = torch.arange(15.0).view(5, 3)
        holdfast.save({"d": distribute_tensor(whole, mesh, [Shard(0)]), "b": whole}, tmp_path / "c")
        local = torch.empty(5, 3, device="meta")
        state: dict[str, Any] = {
            "d": DTensor.from_local(local, mesh, [Shard(0)], run_check=False),
            "b": with_boxes(torch.empty(2, 3, device="meta"), [((3, 0), (0, 0), (2, 3))], (5, 3)),
        }
        holdfast.load(state, tmp_path / "c")
        assert isinstance(state["d"], DTensor)
        assert torch.equal(state["d"].to_local(), whole)
        assert torch.equal(state["b"], whole[3:])
        assert state["b"].global_shape == (5, 3)
    finally:
        dist.destroy_process_group()


def test_an_optimizer_of_parameters_that_a_load_replaces_is_refused(tmp_path: Path) -> None:
    """It would train the old ones."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    holdfast.save({"model": model, "optimizer": optimizer}, tmp_path / "c")
    for arguments in ({"include": ["model"]}, {"exclude": ["optimizer"]}, {}):
        with torch.device("meta"):
            again = torch.nn.Linear(3, 2)
        state = {"model": again, "optimizer": torch.optim.AdamW(again.parameters())}
        if not arguments:
            with pytest.raises(BadInput, match="is the state of a parameter on the meta device"):
                holdfast.load(state, tmp_path / "c")
            continue
        holdfast.load(state, tmp_path / "c", **arguments)
        assert torch.equal(again.weight, model.weight)


def test_a_default_device_without_memory_changes_no_save_and_no_load(tmp_path: Path) -> None:
    """As with a GPU as the default device: what is read from storage is read into host memory all the same."""
    model = trained()
    optimizer = torch.optim.AdamW(model.parameters())
    model.head(model.embedding(torch.tensor([1]))).sum().backward()
    optimizer.step()
    train = holdfast.TrainState(seed=3)
    tied, again = torch.ones(3), torch.zeros(3)
    state = {
        "model": model,
        "optimizer": optimizer,
        "train": train,
        "count": torch.tensor(5),
        "number": torch.tensor(2.5),
        "sparse": torch.eye(2).to_sparse(),
        "tied": [tied, tied],
        "equal": [torch.ones(3), torch.ones(3)],
    }
    other = Tied()
    fresh = torch.optim.AdamW(other.parameters())
    filled: dict[str, Any] = {
        "model": other,
        "optimizer": fresh,
        "train": holdfast.TrainState(seed=4),
        "count": torch.tensor(0, dtype=torch.int32),
        "number": 0.0,
        "sparse": torch.zeros(2, 2).to_sparse(),
        "tied": [torch.zeros(3), torch.zeros(3)],
        "equal": [again, again],
    }
    with torch.device("meta"):
        with holdfast.Checkpoints(tmp_path / "run", job=holdfast.Job(no_dist=True)) as checkpoints:
            checkpoints.save(1, state).result()
            checkpoints.restore(filled)
        folder = tmp_path / "run" / "step-00000001"
        values, lazy = holdfast.load(folder), holdfast.load(folder, lazy=True)
        row = holdfast.open(folder)["model.head.weight"][1:2]
        part = lazy["model"]["head"]["weight"][2:]
    the_same(other, model)
    for parameter, mine in zip(model.parameters(), other.parameters(), strict=True):
        for name, value in optimizer.state[parameter].items():
            assert torch.equal(fresh.state[mine][name], value)
    assert (filled["count"].item(), float(filled["number"])) == (5, 2.5)
    assert torch.equal(filled["sparse"].to_dense(), torch.eye(2))
    assert torch.equal(values["sparse"].to_dense(), torch.eye(2))
    assert torch.equal(filled["tied"][1], tied)
    assert torch.equal(again, torch.ones(3))
    assert torch.equal(values["model"]["norm"]["running_var"], model.norm.running_var)
    assert torch.equal(row, model.head.weight[1:2])
    assert torch.equal(part, model.head.weight[2:])
