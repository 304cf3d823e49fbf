"""Tensor subclasses: which have memory, which consist of other tensors, and which can't be stored.

A wrapper subclass (`torch.Tensor._make_wrapper_subclass`: quantized weights, 8-bit optimizer states) has no
memory of its own. If it names the tensors that it consists of (`__tensor_flatten__`, the protocol of
torch.compile), those are stored, each under the wrapper's name and its attribute's: `weight.codes`,
`weight.scale`. Filling them in place changes the wrapper's value.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.nn.parameter import is_lazy

from holdfast._core.format import torch_objects
from holdfast._core.torch_private import local_of
from holdfast.errors import BadInput, LoadFailed

if TYPE_CHECKING:  # both are known by their names, so that a process without them never imports them
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.tensor import DTensor

_ORDINARY = (torch.Tensor, torch.nn.Parameter)


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor. Checked by name, so that plain tensors never import
    torch.distributed.tensor."""
    return _is_a(value, "DTensor")


def is_sharded_tensor(value: object) -> TypeGuard[ShardedTensor]:
    """Return whether a value is a ShardedTensor, of FSDP1 or torchrec."""
    return _is_a(value, "ShardedTensorBase")


def _is_a(value: object, name: str) -> bool:
    kind: type = type(value)
    return kind not in _ORDINARY and bool(_has_base(kind, name))


@lru_cache(maxsize=4096)
def _has_base(kind: type, name: str) -> bool:
    # By name: isinstance would import torch.distributed.tensor, which plain tensors don't need.
    return any(
        base.__name__ == name and base.__module__.startswith("torch.distributed") for base in kind.__mro__
    )


def type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether there is memory behind the elements of a tensor."""
    if type(tensor).__module__.startswith("torch._subclasses"):  # a tracer's tensor would log a warning
        return False
    try:
        # An empty tensor has no address, and needs none.
        return not tensor.numel() or tensor.data_ptr() != 0
    except RuntimeError:  # torch refuses: it has no storage
        return False


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the result of a collective (AsyncCollectiveTensor) and return it; return any other tensor as
    it is."""
    if type(tensor) in _ORDINARY or not _is_a(tensor, "AsyncCollectiveTensor"):
        return tensor
    done: torch.Tensor = tensor.wait()  # type: ignore[attr-defined]
    return done


def is_wrapper(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a wrapper: a tensor that consists of others and names them
    (`__tensor_flatten__`)."""
    if type(value) in _ORDINARY or not hasattr(type(value), "__tensor_unflatten__"):
        return False
    if not isinstance(value, torch.Tensor) or value.is_nested or is_dtensor(value):
        return False
    return not _is_a(value, "AsyncCollectiveTensor") and (
        value.device.type == "meta" or not has_memory(value)
    )


def is_one_object(value: torch.Tensor) -> bool:
    """Return whether a tensor is stored as one object that includes its parts: a sparse or a nested one. A
    load replaces it, because the sizes of its parts may differ."""
    if type(value) not in _ORDINARY:  # a ShardedTensor refuses to tell
        return type(value).__name__ == "NestedTensor"
    return value.is_nested or value.layout is not torch.strided


def inner_tensors(wrapper: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that a wrapper consists of, each with the name of its attribute."""
    names, _ = wrapper.__tensor_flatten__()  # type: ignore[attr-defined]
    return [(name, getattr(wrapper, name)) for name in names]


def memory_of(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that a tensor of any type consists of on this rank."""
    if is_dtensor(value):
        yield from memory_of(local_of(value))
    elif is_sharded_tensor(value):
        for shard in value.local_shards():
            yield from memory_of(shard.tensor)
    elif is_wrapper(value):
        for _, inner in inner_tensors(value):
            yield from memory_of(inner)
    elif hasattr(value, "local_shards"):  # torch's LocalShardsWrapper
        for shard in value.local_shards():
            yield from memory_of(shard)
    else:
        yield value


def same_memory(one: object, other: object) -> bool:
    """Return whether two values share all of their memory, so that a load into one is a load into the
    other."""
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    # A DTensor and its local tensor share memory, but can't replace each other.
    if is_dtensor(one) != is_dtensor(other) or is_sharded_tensor(one) != is_sharded_tensor(other):
        return False
    mine, theirs = list(memory_of(one)), list(memory_of(other))
    return len(mine) == len(theirs) and all(map(_is_same, mine, theirs))


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if one.device.type == "meta" or not one.numel() or not has_memory(one):
        return False
    # The same address is not enough: a transposed view, say, has its elements in another order.
    return one.stride() == other.stride() and one.data_ptr() == other.data_ptr()


def check_kind(name: str, tensor: torch.Tensor) -> None:
    """Raise BadInput if a tensor has no dense memory."""
    if is_lazy(tensor):
        raise BadInput(
            f"{name!r} is a parameter of a lazy module that has no shape yet.",
            hint="Run a forward pass first.",
        )
    if tensor.is_quantized:
        raise BadInput(
            f"{name!r} is a quantized tensor ({str(tensor.dtype)[6:]}); Holdfast stores plain ones.",
            hint="Store its int_repr() with its scale and zero point, or dequantize() it.",
        )
    if tensor.is_meta:
        raise BadInput(f"{name!r} is on the meta device and has no data; materialise it first.")
    if not has_memory(tensor):
        plain = type(tensor) in _ORDINARY
        raise BadInput(
            f"{name!r} ({type_name(tensor)}, shape {tuple(tensor.shape)}) has no memory of its own, "
            + ("it was freed." if plain else "and does not say which tensors it is made of."),
            hint="Give the tensor while its storage is there."
            if plain
            else "Store the tensors that it is made of, or a dense copy.",
        )


def allowed_type(path: str, name: str) -> type[Any]:
    """Return a tensor subclass by its name. Raises LoadFailed unless this process allows it to be built from
    a file."""
    # The rule of torch's weights-only reader: only the process, never a checkpoint, allows a type.
    if isinstance(kind := torch_objects.allowed().get(path), type):
        return kind
    raise LoadFailed(
        f"{name!r} was saved as a {path}, which this process does not allow to be built.",
        hint=f"Import {path.rpartition('.')[0]}; if that does not allow it by itself, call "
        "torch.serialization.add_safe_globals with the type. Or let the optimizer take a step before the "
        "load.",
    )
