"""What ranks do with DTensors whose local tensors are made of others; importable by spawned processes."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

import holdfast
from holdfast.errors import HoldfastError

JOB = holdfast.Job(timeout=120, stall_timeout=60)


def trained(kind: str, shape: tuple[int, int], seed: int) -> tuple[nn.Module, Any]:
    """A model of one weight under FSDP2, and an optimizer with quantized states that has taken two steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchao.optim
    torch.manual_seed(seed)
    model = nn.Linear(shape[1], shape[0])
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = getattr(torchao.optim, kind)(model.parameters(), lr=0.01)
    take_steps(model, optimizer, seed)
    return model, optimizer


def take_steps(model: nn.Module, optimizer: Any, seed: int) -> None:
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(2):
            torch.manual_seed(100 * seed + step)
            model(torch.randn(4, model.in_features)).square().sum().backward()  # type: ignore[arg-type]
            optimizer.step()
            optimizer.zero_grad()


def values(optimizer: Any) -> list[torch.Tensor]:
    """The states, dequantized and put together."""
    found = []
    for state in optimizer.state.values():
        found.append(state["step"].float())
        for key in ("exp_avg", "exp_avg_sq"):
            local = state[key].to_local()
            mine = local.dequantize() if hasattr(local, "scale") else local
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, mine.float())
            found.append(torch.cat(parts))
    return found


def state_of(model: nn.Module, optimizer: Any, layout: str) -> dict[str, Any]:
    if layout == "itself":
        return {"model": model, "optim": optimizer}
    flat = layout == "flat"
    weights, states = holdfast.get_state_dict(model, optimizer, flatten_optimizer_state_dict=flat)
    return {"model": weights, "optim": states}


def save(rank: int, kind: str, shape: tuple[int, int], layout: str, path: str) -> Any:
    model, optimizer = trained(kind, shape, 1)
    try:
        holdfast.save(state_of(model, optimizer, layout), path, job=JOB)
    except HoldfastError as error:
        return str(error)
    saved = values(optimizer)
    take_steps(model, optimizer, 3)
    return saved, values(optimizer)


def load(rank: int, kind: str, shape: tuple[int, int], layout: str, path: str) -> Any:
    """The names of the classes of the states, their values after the load, and after more steps."""
    model, optimizer = trained(kind, shape, 2)
    try:
        holdfast.load(state_of(model, optimizer, layout), path, job=JOB)
    except HoldfastError as error:
        return str(error)
    kinds = [type(state["exp_avg"].to_local()).__name__ for state in optimizer.state.values()]
    loaded = values(optimizer)
    take_steps(model, optimizer, 3)
    return kinds, loaded, values(optimizer)


class RowScaled(torch.Tensor):
    """A weight with a scale of each row, and one number for all."""

    q: torch.Tensor
    scale: torch.Tensor
    one: torch.Tensor

    @staticmethod
    def __new__(cls, q: torch.Tensor, scale: torch.Tensor, one: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=torch.float32)

    def __init__(self, q: torch.Tensor, scale: torch.Tensor, one: torch.Tensor) -> None:
        self.q, self.scale, self.one = q, scale, one

    def __tensor_flatten__(self) -> Any:
        return ["q", "scale", "one"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["q"], inner["scale"], inner["one"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.slice.Tensor:
            return cls(*(part[: args[3]] for part in (args[0].q, args[0].scale)), args[0].one)
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return cls(args[0].q, args[0].scale, args[0].one)
        raise NotImplementedError(f"{func}")


class Closed(TwoTensor):
    """It refuses to be cut."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.slice.Tensor:
            raise NotImplementedError("slice")
        return super().__torch_dispatch__(func, types, args, kwargs)


def of_mesh(local: Any, shape: tuple[int, int], placement: Any) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=(shape[1], 1))


def weights(rank: int, path: str, saves: bool) -> Any:
    """Ten rows over any number of ranks, scaled by rows; and a replicated one."""
    rows = torch.arange(10).chunk(dist.get_world_size())[rank]

    def make(fill: bool) -> dict[str, Any]:
        q = (rows[:, None] * 10 + torch.arange(6)).to(torch.int8)
        parts = [q, rows + 0.5, torch.full((), 7.0)]
        given = [part if fill else torch.zeros_like(part) for part in parts]
        two = [torch.full((2, 3), 4.0), torch.full((2, 3), 5.0)]
        return {
            "w": of_mesh(RowScaled(*given), (10, 6), Shard(0)),
            "r": of_mesh(
                TwoTensor(*(part if fill else torch.zeros(2, 3) for part in two)), (2, 3), Replicate()
            ),
        }

    full, state = make(True), make(saves)
    if saves:
        holdfast.save(state, path, job=JOB)
    else:
        holdfast.load(state, path, job=JOB)
    inner, wanted = state["w"]._local_tensor, full["w"]._local_tensor
    equal = [torch.equal(getattr(inner, key), getattr(wanted, key)) for key in ("q", "scale", "one")]
    return [*equal, torch.equal(state["r"]._local_tensor.b, full["r"]._local_tensor.b)]


def refused(rank: int, path: str) -> list[str]:
    """What is said of a plain tensor that was freed, and of wrappers that are cut along another axis, or can't
    be cut."""
    said = []
    freed = torch.ones(2, 6)
    freed.untyped_storage().resize_(0)
    for local, placement in (
        (freed, Shard(0)),
        (TwoTensor(torch.ones(4, 3), torch.ones(4, 3)), Shard(1)),
        (Closed(torch.ones(2, 6), torch.ones(2, 6)), Shard(0)),
    ):
        try:
            holdfast.save({"odd": of_mesh(local, (4, 6), placement)}, path, job=JOB)
        except HoldfastError as error:
            said.append(str(error))
    return said
