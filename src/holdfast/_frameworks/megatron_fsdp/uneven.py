"""Offsets of Megatron-FSDP's uneven DTensors, computed from local data without a collective. The functions
have the names and arguments of megatron-core's.

Users import them from `holdfast.megatron_fsdp`. They use only attributes of parameters that both
megatron-core's copy of Megatron-FSDP and the package `megatron-fsdp` set; the tests run the former.

Theory. Megatron-FSDP puts parameters into flat buffers and shards the buffers. So each rank knows which part
of a parameter it holds: `megatron_fsdp_slice`, in elements of this rank's tensor-parallel shard. Stock code
gathers shapes instead, tensor by tensor, in the order of each rank's own dict. Where ranks hold different
optimizer states (no gradient, an empty shard, another device), they gather different tensors, and hang or mix
them up. Here the offset along the first axis is the start of the slice, divided by the elements of a row. A
fused parameter (gate and up, the projections of a gated delta net) is split at the boundaries of its parts.
The parts alias the fused tensor, so a load fills it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from holdfast._core.state.dtensor import CHUNKS
from holdfast._core.state.live import State
from holdfast._core.state.subclasses import is_dtensor
from holdfast._core.torch_private import local_of, set_local
from holdfast.errors import BadInput

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Split = tuple[Sequence[str], Sequence[int]]
"""The suffixes of the parts of a fused parameter, and the share of rows of each (in any unit)."""

_SWIGLU = re.compile(
    r"\.mlp\.(?:(?:shared_experts\.)?linear_fc1\.(?:weight|bias)"
    r"|experts\.linear_fc1\.(?:weight|bias)\d+"
    r"|experts\.local_experts\.\d+\.linear_fc1\.(?:weight|bias))$"
)
_EXPERT = re.compile(r"(\.mlp\.experts\.(?:local_experts\.|linear_fc\d\.(?:weight|bias)))(\d+)")
_GDN = ("query", "key", "value", "z", "beta", "alpha")
"""The parts of `in_proj`; the first three are those of `conv1d`."""
_WRITES = "__create_write_items__"


def handle_swiglu_in_state_dict(
    model: torch.nn.Module, model_state_dict: State, optimizer_state_dict: State | None
) -> tuple[State, State | None]:
    """Split `linear_fc1` of gated layers into `..._w` and `..._v`, in the model's state and the optimizer's.

    model: as `unwrap_model` returns it. Returns new dicts of DTensors that alias the given ones and have
        chunk metadata.
    Raises BadInput for a tensor that can't be split.
    """
    gated = {
        _bare(path): bool(module.config.gated_linear_unit)
        for path, module in model.named_modules()
        if hasattr(getattr(module, "config", None), "gated_linear_unit") and path
    }

    def split(key: str) -> Split | None:
        if not _SWIGLU.search(key):
            return None
        path = _bare(key)
        while path and path not in gated:  # the nearest enclosing module with a configuration
            path = path.rpartition(".")[0]
        # Without such a module the layer counts as gated; stock code takes all layers as gated.
        return (("_w", "_v"), (1, 1)) if gated.get(path, True) else None

    return _split_all(model, model_state_dict, optimizer_state_dict, split)


def handle_gdn_in_state_dict(
    model: torch.nn.Module, model_state_dict: State, optimizer_state_dict: State | None
) -> tuple[State, State | None]:
    """Split `in_proj` of a gated delta net into query, key, value, z, beta and alpha, and its `conv1d` into
    the first three."""
    sizes = {}
    for path, module in model.named_modules():
        if all(hasattr(module, name) for name in ("qk_dim", "v_dim", "in_proj_dim", "num_value_heads")):
            qk, v, heads = module.qk_dim, module.v_dim, module.num_value_heads
            sizes[_bare(path)] = (qk, qk, v, v, heads, heads)

    def split(key: str) -> Split | None:
        path, _, last = _bare(key).rpartition(".")
        layer, _, projection = path.rpartition(".")
        if layer not in sizes or projection not in ("in_proj", "conv1d") or last not in ("weight", "bias"):
            return None
        count = len(_GDN) if projection == "in_proj" else 3
        return [f".{name}" for name in _GDN[:count]], sizes[layer][:count]

    return _split_all(model, model_state_dict, optimizer_state_dict, split)


def preprocess_state_dict_for_uneven_dtensor(
    state_dict: State, model: torch.nn.Module | None = None
) -> State:
    """Add chunk metadata to each DTensor that lacks it, and remove values that a checkpoint can't store, in
    place: the classes in the parameter groups of an offloaded optimizer, which are settings of the process.

    model: the model whose parameters define the offsets. Without it, and for a tensor that belongs to no
        parameter, the offset stays undefined: `holdfast.save` and `holdfast.load` compute it from the lengths
        on all ranks. (torch DCP can't, and needs the model here.)
    """
    for group in state_dict.get("optimizer", {}).get("param_to_group_meta", {}).values():
        for key in [key for key, value in group.items() if isinstance(value, type)]:
            del group[key]
    if model is None:
        return state_dict
    slices = _Parameters(model)
    if "state" in state_dict.get("optimizer", {}):
        state_dict["optimizer"] = _with_dtensors(state_dict["optimizer"], slices)
    for path, value in _leaves(state_dict, ()):
        if not is_dtensor(value) or hasattr(local_of(value), CHUNKS):
            continue
        # One of the keys on the path is the parameter's name: the last one in a model's state, an earlier one
        # in an optimizer's.
        candidates = (slices.get(key, path[0] == "model") for key in path)
        elements = next((candidate for candidate in candidates if candidate is not None), None)
        if elements is not None and value.dim() and elements.stop - elements.start == local_of(value).numel():
            _say_where(value, _begin(value, elements.start, value.shape[0]))
    return state_dict


def fill_missing_states(model: torch.nn.Module, optimizer_state_dict: State) -> list[str]:
    """Add zero optimizer state for parameters of which this rank holds a part but no state: they never got a
    gradient, or another device has the state.

    Without this, a save fails with the name of the first tensor that only other ranks have. Adds only states
    of the parameter's shape; `step` comes from the ranks that have it. Returns the names of the parameters;
    none if this rank has no optimizer state at all.
    """
    states = optimizer_state_dict["state"]
    # Frameworks put `module.` before names, once or several times; added names get the same prefix.
    there = {_bare(key): (key, state) for key, state in states.items()}
    like = {
        key: value
        for _, state in there.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.dim()
    }
    prefix = next((key[: len(key) - len(bare)] for bare, (key, _) in there.items()), "")
    filled: list[str] = []
    if not like:  # no state here to take kinds and dtypes from
        return filled
    for bare, parameter in _Parameters(model).of_all_ranks():
        # A save needs no state for a parameter without elements on this rank.
        if bare in there or not parameter.requires_grad or not local_of(parameter).numel():
            continue
        elements = getattr(parameter, "megatron_fsdp_slice", None)
        # With dtype and device of the other states, which may differ from the parameter's.
        states[prefix + bare] = made = {
            key: torch.zeros_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False)
            for key, value in like.items()
        }
        if elements is not None:
            for value in made.values():
                assert is_dtensor(value)
                _say_where(value, _begin(value, elements.start, value.shape[0]))
        filled.append(prefix + bare)
    return filled


# -- parameters and their slices --------------------------------------------------------------------


def _bare(name: str) -> str:
    """Remove the prefix that wrappers put before a name."""
    return re.sub(r"^(?:module\.)+", "", name)


class _Parameters:
    """`megatron_fsdp_slice` of each parameter, by its name without wrappers, with local expert numbers."""

    def __init__(self, model: torch.nn.Module) -> None:
        buffers = (getattr(module, "param_and_grad_buffer", None) for module in model.modules())
        buffer = next((candidate for candidate in buffers if candidate is not None), None)
        # The optimizer's parameters: Megatron-FSDP sets `megatron_fsdp_slice` on these DTensors.
        named = buffer.optimizer_named_parameters if buffer is not None else model.named_parameters()
        self._named = {_bare(name): parameter for name, parameter in named}
        self._experts = getattr(getattr(model, "config", None), "num_moe_experts", None)
        # The global numbers of this rank's experts.
        experts = (getattr(module, "local_expert_indices", None) for module in model.modules())
        self._first = next((int(min(numbers)) for numbers in experts if numbers), 0)

    def of_all_ranks(self) -> Iterator[tuple[str, DTensor]]:
        """Yield DTensors by name, with global expert numbers."""
        for name, parameter in self._named.items():
            if is_dtensor(parameter):
                yield _global(name, self._experts, self._first), parameter

    def find(self, key: str, local: bool) -> torch.Tensor | None:
        """Return a parameter. local: the key may have local expert numbers."""
        name = _bare(re.sub(r"(?:_w|_v|\.(?:query|key|value|z|beta|alpha))$", "", key))
        if not local or name not in self._named:
            name = _global(name, self._experts, -self._first)
        return self._named.get(name)

    def get(self, key: str, local: bool) -> slice | None:
        elements: slice | None = getattr(self.find(key, local), "megatron_fsdp_slice", None)
        return elements


def _global(name: str, experts: int | None, shift: int) -> str:
    """Shift the expert number in a name."""
    if not experts or not shift:
        return name
    return _EXPERT.sub(lambda match: f"{match[1]}{int(match[2]) + shift}", name)


def _leaves(tree: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, (*path, str(key)))
    else:
        yield path, tree


# -- splitting and describing -----------------------------------------------------------------------


def _split_all(
    model: torch.nn.Module,
    model_state: State,
    optimizer_state: State | None,
    split: Callable[[str], Split | None],
) -> tuple[State, State | None]:
    slices = _Parameters(model)
    made: State = {}
    for key, value in model_state.items():
        parts = split(key) if is_dtensor(value) else None
        made |= _split(key, value, parts, slices.get(key, True)) if parts is not None else {key: value}
    if optimizer_state is None:
        return made, None
    optimizer_state = _with_dtensors(optimizer_state, slices)
    states: State = {}
    for key, state in optimizer_state["state"].items():
        parts = split(key)
        if parts is None:
            states[key] = state
            continue
        for name in parts[0]:
            states[key + name] = {}
        for kind, value in state.items():
            whole = is_dtensor(value) and value.dim() > 0
            several = (
                _split(key, value, parts, slices.get(key, False))
                if whole
                else dict.fromkeys(map(key.__add__, parts[0]), value)
            )
            for name, part in several.items():
                states[name][kind] = part
    return made, {**optimizer_state, "state": states}


def _with_dtensors(optimizer_state: State, slices: _Parameters) -> State:
    """Return an optimizer's state with each tensor of its parameter's shape as a DTensor. An offloaded
    optimizer may have just the local tensor, in host memory."""

    def declared(parameter: object, value: object) -> object:
        if is_dtensor(value) or not isinstance(value, torch.Tensor) or not is_dtensor(parameter):
            return value
        shape = local_of(parameter).shape
        fits = value.dim() and value.numel() == shape.numel()
        return _over(parameter, value.view(shape), parameter.shape) if fits else value

    states = {
        key: {kind: declared(slices.find(key, False), value) for kind, value in state.items()}
        for key, state in optimizer_state["state"].items()
    }
    return {**optimizer_state, "state": states}


def _tensor_parallel(value: DTensor) -> tuple[int | None, int, int]:
    """Return the dimension that tensor parallelism shards (None: none), this rank's index, and their number.

    Its mesh dimension is the last one; it is applied first.
    """
    placements: Sequence[Any] = value.placements
    mesh = value.device_mesh
    cut = [axis for axis, placement in enumerate(placements) if placement.is_shard()]
    names = mesh.mesh_dim_names or ()
    last = len(placements) - 1
    if last not in cut or not names or "tp" not in str(names[last]) or len(placements) < 2:
        return None, 0, 1
    return int(placements[last].dim), int(mesh.get_local_rank(last)), int(mesh.size(last))


def _left(value: DTensor) -> tuple[int, ...]:
    """Return the shape of this rank's tensor-parallel shard."""
    axis, _, parts = _tensor_parallel(value)
    return tuple(size // parts if dim == axis else size for dim, size in enumerate(value.shape))


def _begin(value: DTensor, start: int, rows: int) -> tuple[int, ...]:
    """Return the offset of the local tensor, which begins at element `start` of the tensor-parallel shard.

    rows: rows of the whole tensor.
    """
    axis, rank, parts = _tensor_parallel(value)
    begin = [start // max(prod(_left(value)[1:]), 1)] + [0] * (value.dim() - 1)
    if axis == 0:
        begin[0] += rank * (rows // parts)
    elif axis is not None:
        begin[axis] = rank * _left(value)[axis]
    return tuple(begin)


def _split(key: str, value: DTensor, parts: Split, elements: slice | None) -> dict[str, DTensor]:
    """Split a fused DTensor along its first dimension into DTensors that alias it."""
    names, shares = parts
    axis, _, tensor_parallel = _tensor_parallel(value)
    rows, unit = value.shape[0], sum(shares)
    sizes = [rows * share // unit for share in shares]
    local = local_of(value)
    # `megatron_fsdp_slice` counts elements, but parts are split by rows: it must begin with a row.
    row = prod(_left(value)[1:])
    whole = axis == 0 and any(size % tensor_parallel for size in sizes)
    if (
        elements is None
        or rows % unit
        or whole
        or (elements.stop - elements.start) != local.numel()
        or elements.start % row
    ):
        raise BadInput(
            f"{key!r} of shape {tuple(value.shape)} can't be split into "
            f"{', '.join(name.strip('._') for name in names)}: "
            f"this rank holds {local.numel()} elements of it, and megatron_fsdp_slice is {elements}.",
            hint="Give the model whose parameters these are, as unwrap_model gives it, sharded by rows.",
        )
    each = [size // tensor_parallel if axis == 0 else size for size in sizes]
    made, begin = {}, 0
    for name, size, mine in zip(names, sizes, each, strict=True):
        low, high = (min(max(edge // row, begin), begin + mine) for edge in (elements.start, elements.stop))
        first = elements.start // row
        # A view, so that a load into the part fills the fused parameter.
        piece = local.view(-1, *local.shape[1:])[low - first : high - first] if low < high else local[:0]
        made[key + name] = part = _over(value, piece, (size, *value.shape[1:]))
        _say_where(part, _begin(part, (low - begin) * row, size))
        begin += mine
    return made


def _over(like: DTensor, local: torch.Tensor, shape: Sequence[int]) -> DTensor:
    """Make a DTensor over the memory of a local tensor, with the mesh and placements of `like`."""
    from torch.distributed.tensor import DTensor

    made = DTensor.from_local(
        local.detach()[:0],
        like.device_mesh,
        like.placements,
        # A check would communicate, but ranks may have different tensors here.
        run_check=False,
        shape=torch.Size(shape),
        # On the meta device, because only the strides are needed.
        stride=torch.empty(shape, device="meta").stride(),
    )
    # Set afterwards: from_local copies a tensor that is on another device than the mesh, and a load must fill
    # this one.
    set_local(made, local.detach())
    return made


def _say_where(value: DTensor, begin: tuple[int, ...]) -> None:
    """Set chunk metadata on the local tensor, as Megatron-FSDP does for torch DCP."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    local = local_of(value)
    chunk = ChunkStorageMetadata(torch.Size(begin), torch.Size(local.shape))

    def writes(fqn: str, tensor: torch.Tensor) -> list[WriteItem]:
        # As stock does; DCP would plan an empty write.
        if not local.numel():
            return []
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(local), tensor.size())
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    setattr(local, CHUNKS, lambda: [chunk])
    setattr(local, _WRITES, writes)
