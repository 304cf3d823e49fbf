"""Holdfast in processes in which torch lacks one of its private names: `python -m tests.support.without_names`.

    {"_world": ["hidden", "gone"], ...} on its standard input, {"_world": {"hidden": "", ...}} on its output

Each run is a fork of this process, which has imported torch and not holdfast. *gone*: the name is deleted from torch,
for everyone; if torch's own saves and loads fail by that, the answer is `STOCK`, and if nothing there has the name,
or can't lose it, `KEPT`. *hidden*: only Holdfast does not find it. An answer is "" if all was saved and loaded, else
what was raised.
"""

from __future__ import annotations

import builtins
import gc
import importlib.util
import io
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec  # noqa: F401 (not anew in each fork, like the other such imports)
import numpy as np
import torch
import torch._dynamo  # an optimizer imports it
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

STOCK, KEPT = "torch itself fails", "it can't be taken away"
ROOM = "holdfast._core.torch_private"
AT_ONCE = 2


def hide(*names: str) -> None:
    """Have Holdfast find none of these names; before anything of it is imported."""

    def getattr_without(owner: object, name: str, *default: object) -> object:
        return builtins.getattr(owner, "_no such name" if name in names else name, *default)

    assert not any(module.startswith("holdfast._") for module in sys.modules)
    spec = importlib.util.find_spec(ROOM)
    assert spec is not None
    assert spec.loader is not None
    room: Any = importlib.util.module_from_spec(spec)
    room.getattr = getattr_without
    sys.modules[ROOM] = room
    spec.loader.exec_module(room)


def take_away(name: str) -> bool:
    """Delete a name of torch; return whether it was there and could be deleted."""
    from torch.distributed import distributed_c10d
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.checkpoint.staging import DefaultStager

    c10d = torch._C._distributed_c10d
    taken = False
    for owner in (
        *(
            torch,
            torch._utils,
            torch._tensor,
            torch.serialization,
            torch._C,
            c10d,
            distributed_c10d,
            filesystem,
        ),
        *(
            torch.Tensor,
            DTensor,
            ShardedTensor,
            DefaultStager,
            dist.ProcessGroup,
            c10d.Backend,
            c10d.Backend.Options,
        ),
    ):
        if name in vars(owner):
            try:
                delattr(owner, name)
            except TypeError:  # a class of C
                continue
            taken = True
    return taken


def state() -> dict[str, Any]:
    torch.manual_seed(1)
    layer = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    mesh = init_device_mesh("cpu", (1,))
    return {
        "model": {**layer.state_dict(), "half": torch.arange(6, dtype=torch.bfloat16).view(2, 3)},
        "sharded": DTensor.from_local(torch.arange(8.0).view(4, 2), mesh, [Shard(0)]),
        "optimizer": optimizer.state_dict(),
        "step": 3,
    }


def zeroed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: zeroed(item) for key, item in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, DTensor):
        with torch.no_grad():
            one, other = one.to_local(), other.to_local()
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def open_world() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def stock(folder: Path) -> None:
    """Torch's own save and load of the same values."""
    mine = state()
    buffer = io.BytesIO()
    torch.save({"model": mine["model"], "optimizer": mine["optimizer"]}, buffer)
    buffer.seek(0)
    torch.load(buffer)
    tensors = {"model": mine["model"], "sharded": mine["sharded"]}
    dcp.save(tensors, checkpoint_id=folder / "stock")
    loaded = zeroed(tensors)
    dcp.load(loaded, checkpoint_id=folder / "stock")
    assert same(loaded, tensors)


def ours(folder: Path) -> None:
    import holdfast
    import holdfast.dcp

    holdfast.install()
    mine = state()
    holdfast.save(mine, f"{folder}/a")
    loaded = zeroed(mine)
    holdfast.load(loaded, f"{folder}/a")
    assert same(loaded, mine)
    tensors = {"model": mine["model"], "sharded": mine["sharded"]}
    holdfast.dcp.save(tensors, checkpoint_id=f"{folder}/b")
    loaded = zeroed(tensors)
    holdfast.dcp.load(loaded, checkpoint_id=f"{folder}/b")
    assert same(loaded, tensors)
    holdfast.save({"name": {1, "two"}, "sparse": torch.eye(3).to_sparse()}, f"{folder}/c")
    held = holdfast.load({"name": set[object](), "sparse": torch.zeros(3, 3).to_sparse()}, f"{folder}/c")
    assert held is not None


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self._call = (function, args)

    def __reduce__(self) -> Any:
        return self._call


def pickled(name: str) -> object:
    """A value whose pickle names a function of torch."""
    warnings.simplefilter("ignore", UserWarning)  # that quantized and nested tensors are not for ever
    marked = torch.nn.Parameter(torch.ones(2))
    marked.extra = 1  # type: ignore[attr-defined]
    cpu, utils = torch.ones(2), torch._utils
    made: dict[str, Callable[[], object]] = {
        "_get_layout": lambda: [torch.sparse_coo],
        "_rebuild_from_type_v2": lambda: Call(
            torch._tensor._rebuild_from_type_v2, torch.Size, torch.Size, ((1, 2),), {}
        ),
        "_rebuild_tensor_v2": lambda: torch.arange(12.0).view(3, 4)[1:, ::2],
        "_rebuild_tensor_v3": lambda: torch.arange(4).to(torch.uint16),
        "_rebuild_parameter": lambda: torch.nn.Parameter(torch.arange(3.0)),
        "_rebuild_parameter_with_state": lambda: marked,
        "_rebuild_qtensor": lambda: torch.quantize_per_tensor(cpu, 0.5, 0, torch.quint8),
        "_rebuild_nested_tensor": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        "_rebuild_meta_tensor_no_storage": lambda: torch.ones(2, device="meta"),
        "_rebuild_sparse_tensor": lambda: torch.eye(3).to_sparse(),
        "_rebuild_wrapper_subclass": lambda: Call(
            utils._rebuild_wrapper_subclass,
            torch.Tensor,
            torch.float32,
            (2,),
            (1,),
            0,
            torch.strided,
            "cpu",
            False,
        ),
        "_rebuild_device_tensor_from_numpy": lambda: Call(
            utils._rebuild_device_tensor_from_numpy, np.ones(2), torch.float64, "cpu", False
        ),
        "_rebuild_device_tensor_from_cpu_tensor": lambda: Call(
            utils._rebuild_device_tensor_from_cpu_tensor, cpu, torch.float32, "cpu", False
        ),
    }
    return made[name]()


def objects(name: str) -> None:
    """Load an object whose pickle names a function of torch."""
    from holdfast._core.format import torch_objects

    value, buffer = pickled(name), io.BytesIO()
    torch.save(value, buffer)
    made: Any = torch_objects.decode(buffer.getvalue(), "it")
    if isinstance(value, torch.Tensor):
        assert made.dtype == value.dtype
        assert type(made) is type(value)
        assert made.layout == value.layout
        assert torch.equal(made.to_dense(), value.to_dense())
        assert made.requires_grad == value.requires_grad
    elif isinstance(value, list):
        assert made == value


def features(name: str, folder: Path) -> None:
    """What only works with one name."""
    if name.startswith("_rebuild") or name == "_get_layout":
        objects(name)
    from holdfast._core import torch_private as room

    if name == "_StorageInfo":
        room.storage_info("file", 0, 1)
    if name == "_local_tensor":
        room.set_local(state()["sharded"], torch.zeros(4, 2))
    if name == "_get_default_store _world":
        import holdfast

        holdfast.save({"w": torch.ones(2)}, f"{folder}/d")


def one(name: str, way: str, folder: Path) -> str:
    if way == "gone":
        try:
            if not take_away(name):
                return KEPT
            open_world()
            stock(folder)
        except BaseException:  # torch DCP's is no Exception
            return STOCK
        ours(folder)
        return ""
    hide(*name.split())
    open_world()
    if way == "feature":
        features(name, folder)
    else:
        ours(folder)
    return ""


def answer(name: str, way: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return one(name, way, Path(folder))
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # or the garbage collection of each fork goes through torch, and so copies it
    asked: dict[str, list[str]] = json.load(sys.stdin)
    left = [(name, way) for name, ways in asked.items() for way in ways]
    answers: dict[str, dict[str, str]] = {name: {} for name in asked}
    running: dict[int, tuple[str, str, int]] = {}
    while left or running:
        while left and len(running) < AT_ONCE:
            name, way = left.pop()
            read, write = os.pipe()
            pid = os.fork()
            if not pid:
                os.dup2(2, 1)  # the answers alone go to the standard output
                os.write(write, answer(name, way).encode()[:60_000])
                os._exit(0)
            os.close(write)
            running[pid] = name, way, read
        pid, status = os.wait()
        if pid in running:
            name, way, read = running.pop(pid)
            with open(read, "rb") as pipe:
                answers[name][way] = pipe.read().decode() if not status else f"it ended with status {status}"
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
