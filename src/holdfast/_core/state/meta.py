"""Tensors on the meta device, which have a shape and no memory: a load gives them memory, as torch DCP
does."""

from __future__ import annotations

from typing import TypeGuard

import torch
import torch.distributed as dist

from holdfast._core.state.sharded import copy_boxes
from holdfast._core.state.subclasses import is_dtensor, is_sharded_tensor, is_wrapper, type_name
from holdfast._core.torch_private import devices, local_of
from holdfast.errors import BadInput


def is_meta(value: object) -> TypeGuard[torch.Tensor]:
    if not isinstance(value, torch.Tensor) or is_sharded_tensor(value):
        return False
    return value.device.type == "meta"


def materialize(name: str, tensor: torch.Tensor, fixed: bool = False) -> torch.Tensor:
    """Return an uninitialised tensor of the same kind: a DTensor on its mesh's device, any other on that of
    the default process group.

    Without a process group, torch's default device is used. fixed: the tensor can't be replaced by another
    one. Raises BadInput for a wrapper, and if `fixed`.
    """
    if fixed:
        raise BadInput(
            f"{name!r} is on the meta device, and stands where no other tensor can be put: in a tensor "
            "subclass.",
            hint="Materialise it first.",
        )
    if is_wrapper(tensor):
        raise BadInput(f"{name!r} is a {type_name(tensor)} on the meta device; materialise it first.")
    if not is_dtensor(tensor):
        made = torch.empty_like(tensor, device=_default_device(), requires_grad=False)
        copy_boxes(tensor, made)
        return made
    from torch.distributed.tensor import DTensor

    device = _current(tensor.device_mesh.device_type)
    local = torch.empty_like(local_of(tensor), device=device, requires_grad=False)
    vars(local).update(vars(local_of(tensor)))  # chunk metadata, if there is any
    # With shape and stride, because from_local would derive them from an even cut. run_check would
    # communicate.
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _default_device() -> torch.device:
    if dist.is_available() and dist.is_initialized():
        kinds = [device.type for device in devices(dist.group.WORLD)]
        return _current("cpu" if "cpu" in kinds else kinds[0])
    default = torch.get_default_device()
    return torch.device("cpu") if default.type == "meta" else default


def _current(kind: str) -> torch.device:
    """Return the device of this type that the process uses."""
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())
