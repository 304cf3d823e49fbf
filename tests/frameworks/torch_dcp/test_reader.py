"""The way back: stock torch DCP reads a Holdfast checkpoint; and every name of DCP is there after the switch."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import holdfast
from holdfast import dcp
from holdfast._frameworks.torch_dcp.torch_dist import export_torch_dist
from holdfast.errors import CorruptCheckpoint
from tests.frameworks.torch_dcp.test_torch_dist import same
from tests.support.processes import ProcessWorld

ALONE = holdfast.Job(no_dist=True)


def sharded_load(rank: int, folder: str) -> list[bool]:
    """Stock DCP loads DTensors over two ranks from a checkpoint that one process wrote."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(7 * 6.0).reshape(7, 6)
    places = {"rows": [Shard(0)], "columns": [Shard(1)], "all": [Replicate()]}
    state = {name: distribute_tensor(torch.zeros(7, 6), mesh, place) for name, place in places.items()}
    stock.load(state, storage_reader=dcp.HoldfastReader(folder))
    halves = {
        name: distribute_tensor(torch.zeros(7, 6).half(), mesh, place) for name, place in places.items()
    }
    dcp.load(halves, checkpoint_id=folder)  # ours converts, as stock does
    return [
        torch.equal(state[name].full_tensor(), whole)
        and torch.equal(halves[name].full_tensor(), whole.half())
        for name in places
    ]


def test_stock_dcp_loads_shards_of_a_holdfast_checkpoint(tmp_path: Path) -> None:
    whole = torch.arange(7 * 6.0).reshape(7, 6)
    holdfast.save(dict.fromkeys(["rows", "columns", "all"], whole), tmp_path / "it", job=ALONE)
    with ProcessWorld(2) as world:
        assert world.run(sharded_load, str(tmp_path / "it"), timeout=120) == [[True] * 3] * 2


def test_stock_dcp_loads_modules_optimizers_and_objects(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "step": 7,
        "names": ["a", {"b": (1, 2)}],
        "half": torch.ones(3).bfloat16(),
    }
    holdfast.save({**state, "optimizer": optimizer}, tmp_path / "it", job=ALONE)
    blank = {
        "model": torch.nn.Linear(4, 3).state_dict(),
        "step": 0,
        "names": None,
        "half": torch.zeros(3).bfloat16(),
    }
    stock.load(blank, storage_reader=dcp.HoldfastReader(tmp_path / "it"), no_dist=True)
    assert torch.equal(blank["model"]["weight"], model.weight)
    assert (blank["step"], blank["names"]) == (7, ["a", {"b": (1, 2)}])
    assert torch.equal(blank["half"], state["half"])


def trained(steps: int) -> dict[str, Any]:
    """A model, its optimizer of two groups, a schedule and a list, as a trainer gives them to DCP."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW([{"params": part.parameters(), "lr": 0.1} for part in model])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(max(steps, 1)):  # get_state_dict of an optimizer without a state runs a step
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    for _ in range(steps):
        schedule.step()
    names, states = get_state_dict(model, optimizer)
    history = [{"step": step, "loss": [step, {"rank": step}]} for step in (steps, steps + 1)]
    return {"model": names, "optim": states, "schedule": schedule, "history": history, "plain": {"a": steps}}


def as_values(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "schedule": state["schedule"].state_dict()}


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("way", ["theirs", "marked", "plain", "reader", "export"])
def test_lists_of_dicts_have_the_names_that_stock_gives_them(way: str, tmp_path: Path) -> None:
    """Else stock DCP takes the folder for one of torch 2.3, where no dict of plain values is taken apart."""
    state, folder = trained(3), tmp_path / way
    if way == "theirs":
        stock.save(state, checkpoint_id=folder)
    elif way == "marked":
        dcp.save(state, checkpoint_id=folder)
    else:
        holdfast.save(state, folder, job=ALONE)
    if way == "export":
        export_torch_dist(folder, folder := tmp_path / "out")
    found = trained(0)
    given = {"storage_reader": dcp.HoldfastReader(folder)} if way == "reader" else {"checkpoint_id": folder}
    stock.load(found, **given)
    assert same(as_values(found), as_values(state))
    assert not same(as_values(trained(0)), as_values(state))
    dcp_to_torch_save(folder, tmp_path / "one.pt")
    one = torch.load(tmp_path / "one.pt", weights_only=False)
    assert one["history"] == state["history"]
    # Only `.metadata` of a save by DCP's name knows how names are nested.
    groups = one["optim"]["param_groups"] if way in ("theirs", "marked") else one["optim.param_groups"]
    assert groups == state["optim"]["param_groups"]


def test_a_checkpoint_becomes_one_file_of_torch_save(tmp_path: Path) -> None:
    """What torch's `dcp_to_torch_save` does, with our reader."""
    holdfast.save({"w": torch.arange(5.0), "step": 3}, tmp_path / "it", job=ALONE)
    state: dict[str, object] = {}
    reader, planner = dcp.HoldfastReader(tmp_path / "it"), _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    torch.save(state, tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt")
    assert torch.equal(found["w"], torch.arange(5.0))
    assert found["step"] == 3


def test_the_state_is_filled_in_place_in_its_own_dtype_and_strides(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    holdfast.save({"turned": whole, "half": whole}, tmp_path / "it", job=ALONE)
    state = {"turned": torch.zeros(4, 3).T, "half": torch.zeros(3, 4, dtype=torch.bfloat16)}
    turned = state["turned"]
    stock.load(state, storage_reader=dcp.HoldfastReader(tmp_path / "it"), no_dist=True)
    assert state["turned"] is turned
    assert torch.equal(turned, whole)
    assert torch.equal(state["half"], whole.bfloat16())


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_tools_that_make_a_reader_of_their_own_read_ours(tmp_path: Path) -> None:
    """As `dcp_to_torch_save`, Accelerate and Lightning do; also of a folder without torch's `.metadata`."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    state = {"model": {"a.b": torch.arange(5.0)}, "rest": [torch.ones(2), {"n": 3}], "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    found = _load_state_dict_from_keys(checkpoint_id=tmp_path / "dcp")
    assert torch.equal(found["model"]["a.b"], torch.arange(5.0))
    assert (found["rest"][1], found["step"]) == ({"n": 3}, 3)
    assert [*_load_state_dict_from_keys("model", checkpoint_id=tmp_path / "dcp")] == ["model"]
    holdfast.save(state, tmp_path / "plain", job=ALONE)
    dcp_to_torch_save(tmp_path / "plain", tmp_path / "one.pt")
    assert torch.equal(torch.load(tmp_path / "one.pt")["model.a.b"], torch.arange(5.0))
    stock.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "theirs")
    assert torch.equal(_load_state_dict_from_keys(checkpoint_id=tmp_path / "theirs")["w"], torch.ones(3))


def test_damage_and_folders_without_a_checkpoint(tmp_path: Path) -> None:
    holdfast.save({"w": torch.ones(1000)}, tmp_path / "it", job=ALONE)
    assert dcp.HoldfastReader.validate_checkpoint_id(tmp_path / "it")
    assert not dcp.HoldfastReader.validate_checkpoint_id(tmp_path)
    [data] = (tmp_path / "it" / "data").glob("*.safetensors")
    raw = bytearray(data.read_bytes())
    raw[raw.index(torch.ones(9).numpy().tobytes())] ^= 1
    data.write_bytes(raw)
    # Stock DCP raises what a rank raised in an exception of its own, which is no Exception.
    with pytest.raises(BaseException, match="damaged") as caught:
        stock.load({"w": torch.zeros(1000)}, storage_reader=dcp.HoldfastReader(tmp_path / "it"), no_dist=True)
    assert CorruptCheckpoint.__name__ in str(caught.value)


def test_every_public_name_of_dcp_is_there() -> None:
    ours = {"async_save", "load", "load_state_dict", "save", "save_state_dict"}
    for name in dir(stock):
        if name.startswith("_"):
            continue
        value = getattr(dcp, name)
        assert (value is getattr(stock, name)) == (name not in ours), name
        assert isinstance(value, types.ModuleType) or value.__doc__ is not None or isinstance(value, type)
    assert dcp.AsyncSaveResponse.__name__ == "AsyncSaveResponse"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dcp.nothing
