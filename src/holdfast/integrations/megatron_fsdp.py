"""Megatron-FSDP's uneven DTensors, described from local data: the names and arguments of megatron-core's
functions, and no collective.

Users import them from `holdfast.megatron_fsdp`. Asks parameters for nothing but what both megatron-core's
copy of Megatron-FSDP and the package `megatron-fsdp` give them; the tests run the former.

Theory. Megatron-FSDP lays parameters into flat buffers and cuts those, so the rows of a parameter that a rank
holds are known to it:
`megatron_fsdp_slice`, in elements of the part that tensor parallelism has left. Stock code gathers shapes
instead, tensor by tensor, in the order of each rank's own dict; where ranks hold different optimizer states
(no gradient, an empty shard, another device) they gather different tensors, and hang or mix them up. Here the
offset is that slice over the elements of a row. A fused parameter (gate and up, the projections of a gated
delta net) is cut where its parts meet. Parts alias the fused tensor, so a load fills it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from holdfast.errors import BadInput
from holdfast.state.dtensor import CHUNKS
from holdfast.state.live import State
from holdfast.state.subclasses import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Split = tuple[Sequence[str], Sequence[int]]
"""What the parts of a fused parameter are called, and the share of rows of each (in any unit)."""

_SWIGLU = re.compile(
    r"\.mlp\.(?:(?:shared_experts\.)?linear_fc1\.(?:weight|bias)"
    r"|experts\.linear_fc1\.(?:weight|bias)\d+"
    r"|experts\.local_experts\.\d+\.linear_fc1\.(?:weight|bias))$"
)
_EXPERT = re.compile(r"(\.mlp\.experts\.(?:local_experts\.|linear_fc\d\.(?:weight|bias)))(\d+)")
_GDN = ("query", "key", "value", "z", "beta", "alpha")
"""In `in_proj`; the first three are in `conv1d`, too."""
_WRITES = "__create_write_items__"


def handle_swiglu_in_state_dict(
    model: torch.nn.Module, model_state_dict: State, optimizer_state_dict: State | None
) -> tuple[State, State | None]:
    """megatron-core's: `linear_fc1` of gated layers becomes `..._w` and `..._v`, in the model and in all
    states of its optimizer.

    model: as `unwrap_model` gives it. Returns new dicts of DTensors that alias the given ones, each of which
        says where it lies.
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
        while path and path not in gated:  # the nearest module around it that says
            path = path.rpartition(".")[0]
        # Where no module says anything it is taken for gated, as stock code takes all of them.
        return (("_w", "_v"), (1, 1)) if gated.get(path, True) else None

    return _split_all(model, model_state_dict, optimizer_state_dict, split)


def handle_gdn_in_state_dict(
    model: torch.nn.Module, model_state_dict: State, optimizer_state_dict: State | None
) -> tuple[State, State | None]:
    """megatron-core's: `in_proj` of a gated delta net becomes query, key, value, z, beta and alpha, its
    `conv1d` the first three."""
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
    """megatron-core's: each DTensor that does not say yet where it lies is given chunk metadata, in place.

    model: whose parameters tell. Without it, or for a tensor that is of no parameter, the offset stays open:
        `holdfast.save` and
    `holdfast.load` find it by the lengths that all ranks hold. (torch DCP can't, and needs the model here.)
    """
    if model is None:
        return state_dict
    slices = _Parameters(model)
    for path, value in _leaves(state_dict, ()):
        if not is_dtensor(value) or hasattr(value._local_tensor, CHUNKS):
            continue
        # One of the keys on the path is the parameter's name: the last one in a model's state, one further up
        # in an optimizer's.
        found = next((at for key in path if (at := slices.get(key, path[0] == "model")) is not None), None)
        if found is not None and value.dim() and found.stop - found.start == value._local_tensor.numel():
            _say_where(value, _begin(value, found.start, value.shape[0]))
    return state_dict


def fill_missing_states(model: torch.nn.Module, optimizer_state_dict: State) -> list[str]:
    """Zeros for parameters of which this rank holds a part and no optimizer state: they never got a gradient,
    or another device has it.

    Their names are returned; none, if this rank has no state at all. Without this, a save names the first of
    them that other ranks have, and fails. Only what is shaped as the parameter is filled; `step` is said by
    the ranks that have it.
    """
    states = optimizer_state_dict["state"]
    # Frameworks put `module.` before names, once or several times; what is filled in gets the same.
    there = {_bare(key): (key, state) for key, state in states.items()}
    like = {key: value for _, state in there.values() for key, value in state.items() if is_dtensor(value)}
    prefix = next((key[: len(key) - len(bare)] for bare, (key, _) in there.items()), "")
    filled: list[str] = []
    if not like:  # this rank shows none to make them of
        return filled
    for bare, parameter in _Parameters(model).of_all_ranks():
        # Without elements here there is nothing that a save would lack.
        if bare in there or not parameter.requires_grad or not parameter._local_tensor.numel():
            continue
        at = getattr(parameter, "megatron_fsdp_slice", None)
        # In the dtype, and on the device, of the other states, which need not be the parameter's.
        states[prefix + bare] = made = {
            key: torch.zeros_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False)
            for key, value in like.items()
        }
        if at is not None:
            for value in made.values():
                _say_where(value, _begin(value, at.start, value.shape[0]))
        filled.append(prefix + bare)
    return filled


# -- parameters and their slices --------------------------------------------------------------------


def _bare(name: str) -> str:
    """A name without the segments of wrappers before it."""
    return re.sub(r"^(?:module\.)+", "", name)


class _Parameters:
    """`megatron_fsdp_slice` of each parameter, by its name without wrappers; expert numbers are this rank's
    own."""

    def __init__(self, model: torch.nn.Module) -> None:
        buffers = (getattr(module, "param_and_grad_buffer", None) for module in model.modules())
        buffer = next((found for found in buffers if found is not None), None)
        # The optimizer's own: on these DTensors Megatron-FSDP sets `megatron_fsdp_slice`.
        named = buffer.optimizer_named_parameters if buffer is not None else model.named_parameters()
        self._named = {_bare(name): parameter for name, parameter in named}
        self._experts = getattr(getattr(model, "config", None), "num_moe_experts", None)
        self._first = _first_expert(model)

    def of_all_ranks(self) -> Iterator[tuple[str, DTensor]]:
        """DTensors, by names with the experts' numbers among all."""
        for name, parameter in self._named.items():
            if is_dtensor(parameter):
                yield _global(name, self._experts, self._first), parameter

    def get(self, key: str, local: bool) -> slice | None:
        """`local`: the key has this rank's own expert numbers, or may have."""
        name = _bare(re.sub(r"(?:_w|_v|\.(?:query|key|value|z|beta|alpha))$", "", key))
        if not local or name not in self._named:
            name = _global(name, self._experts, -self._first)
        found: slice | None = getattr(self._named.get(name), "megatron_fsdp_slice", None)
        return found


def _first_expert(model: torch.nn.Module) -> int:
    """The number of this rank's first expert among all."""
    for module in model.modules():
        experts = getattr(module, "local_expert_indices", None)
        if experts:
            return int(min(experts))
    return 0


def _global(name: str, experts: int | None, shift: int) -> str:
    """The name with expert numbers moved."""
    if not experts or not shift:
        return name
    return _EXPERT.sub(lambda found: f"{found[1]}{int(found[2]) + shift}", name)


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


def _tensor_parallel(value: DTensor) -> tuple[int | None, int, int]:
    """The dimension that tensor parallelism cuts (its mesh dimension comes last, and cuts first), this rank's
    place, of how many."""
    placements: Sequence[Any] = value.placements
    mesh = value.device_mesh
    cut = [axis for axis, placement in enumerate(placements) if placement.is_shard()]
    names = mesh.mesh_dim_names or ()
    last = len(placements) - 1
    if last not in cut or not names or "tp" not in str(names[last]) or len(placements) < 2:
        return None, 0, 1
    return int(placements[last].dim), int(mesh.get_local_rank(last)), int(mesh.size(last))


def _left(value: DTensor) -> tuple[int, ...]:
    """The shape that tensor parallelism has left to a rank."""
    axis, _, parts = _tensor_parallel(value)
    return tuple(size // parts if at == axis else size for at, size in enumerate(value.shape))


def _begin(value: Any, start: int, rows: int) -> tuple[int, ...]:
    """Where the local tensor begins, if its part of the (maybe smaller) tensor begins `start` elements into
    what TP has left."""
    axis, rank, parts = _tensor_parallel(value)
    begin = [start // max(prod(_left(value)[1:]), 1)] + [0] * (value.dim() - 1)
    if axis == 0:
        begin[0] += rank * (rows // parts)
    elif axis is not None:
        begin[axis] = rank * _left(value)[axis]
    return tuple(begin)


def _split(key: str, value: DTensor, parts: Split, at: slice | None) -> dict[str, DTensor]:
    """The parts of a fused DTensor along its first dimension, each a DTensor that aliases it."""
    names, shares = parts
    axis, _, tensor_parallel = _tensor_parallel(value)
    rows, unit = value.shape[0], sum(shares)
    sizes = [rows * share // unit for share in shares]
    local = value._local_tensor
    # `megatron_fsdp_slice` counts elements, parts are cut by rows: it has to begin with one.
    row = prod(_left(value)[1:])
    whole = axis == 0 and any(size % tensor_parallel for size in sizes)
    if at is None or rows % unit or whole or (at.stop - at.start) != local.numel() or at.start % row:
        raise BadInput(
            f"{key!r} of shape {tuple(value.shape)} can't be split into "
            f"{', '.join(name.strip('._') for name in names)}: "
            f"this rank holds {local.numel()} elements of it, and megatron_fsdp_slice is {at}.",
            hint="Give the model whose parameters these are, as unwrap_model gives it, sharded by rows.",
        )
    each = [size // tensor_parallel if axis == 0 else size for size in sizes]
    made, begin = {}, 0
    for name, size, mine in zip(names, sizes, each, strict=True):
        low, high = (min(max(edge // row, begin), begin + mine) for edge in (at.start, at.stop))
        first = at.start // row
        # A view: what a load writes into the part is in the fused parameter.
        piece = local.view(-1, *local.shape[1:])[low - first : high - first] if low < high else local[:0]
        made[key + name] = _part(value, piece, (size, *value.shape[1:]), (low - begin) * row)
        begin += mine
    return made


def _part(value: DTensor, piece: torch.Tensor, shape: tuple[int, ...], start: int) -> DTensor:
    from torch.distributed.tensor import DTensor

    # On the meta device: only the strides are wanted.
    stride = torch.empty(shape, device="meta").stride()
    made = DTensor.from_local(
        piece.detach(),
        value.device_mesh,
        value.placements,
        # A check would communicate, and ranks may have different tensors here.
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )
    _say_where(made, _begin(made, start, shape[0]))
    return made


def _say_where(value: Any, begin: tuple[int, ...]) -> None:
    """Chunk metadata as torch DCP asks for it, and as Megatron-FSDP leaves it on the local tensor."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    local = value._local_tensor
    chunk = ChunkStorageMetadata(torch.Size(begin), torch.Size(local.shape))

    def writes(fqn: str, tensor: torch.Tensor) -> list[WriteItem]:
        # As stock does: DCP would plan a write of nothing.
        if not local.numel():
            return []
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(local), tensor.size())
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    setattr(local, CHUNKS, lambda: [chunk])
    setattr(local, _WRITES, writes)
