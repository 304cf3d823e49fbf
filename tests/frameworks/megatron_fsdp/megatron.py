"""A real mixture of experts of megatron-core under Megatron-FSDP: its state saved by ours and by stock code;
importable by spawned processes."""

from __future__ import annotations

import contextlib
import inspect
import random
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.tensor import DTensor

import holdfast
from holdfast import megatron_fsdp as ours
from tests.frameworks.megatron.cpu import with_a_device
from tests.frameworks.megatron.models import LENGTH, Layout, Recipe, Training, config_of, spec_of
from tests.frameworks.megatron_fsdp.megatron_cpu import offload_dtensors, state_for_all, use_cpu_fsdp
from tests.support.collectives import counted

SHAPE = Recipe(bf16=True, layers=2, shared_expert=True)


class FsdpTraining:
    """`tests.frameworks.megatron.models.Training` with FullyShardedDataParallel in place of DDP.

    offloads: with a HybridDeviceOptimizer (`optimizer_cpu_offload`) that offloads this fraction. The default
        is 0; more needs `offload_dtensors`.
    """

    step = Training.step

    def __init__(self, layout: Layout, seed: int = 1, offloads: float | None = None) -> None:
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
        from megatron.core.models.gpt import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module
        from megatron.core.utils import unwrap_model

        self.layout, self.recipe, self.iteration = layout, SHAPE, 0
        self.config = config_of(layout, SHAPE)
        self.config.finalize_model_grads_func = finalize_model_grads
        torch.manual_seed(seed)
        chunk = GPTModel(
            self.config,
            spec_of(self.config, SHAPE, None),
            vocab_size=SHAPE.vocab,
            max_sequence_length=LENGTH,
            position_embedding_type="rope",
        )
        chunk.eval()
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy="optim_grads_params",
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            bucket_size=40_000_000,
            grad_reduce_in_fp32=True,
        )
        wrapped = Float16Module(
            self.config, chunk
        )  # stock names fit only with this between, as get_model() has it
        self.models = [FullyShardedDataParallel(config=self.config, ddp_config=ddp, module=wrapped)]
        how = OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            clip_grad=1.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            optimizer_cpu_offload=offloads is not None,
            optimizer_offload_fraction=offloads or 0.0,
            overlap_cpu_optimizer_d2h_h2d=True,
            use_precision_aware_optimizer=offloads is not None,
        )
        self.device = with_a_device() if offloads is not None else contextlib.nullcontext()
        self.device.__enter__()  # for good, as `use_cpu_fsdp`
        if offloads:
            offload_dtensors()
        self.optimizer = get_megatron_optimizer(how, self.models)
        self.config.no_sync_func = self.models[0].no_sync
        self.model = unwrap_model(self.models)[0]

    def state(self, loading: bool = False) -> dict[str, Any]:
        """As Megatron-LM's generate_state_dict makes it for the format fsdp_dtensor."""
        state: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": self.iteration}
        state["model"] = {
            key: value
            for key, value in self.model.state_dict_for_save_checkpoint().items()
            if not key.endswith("._extra_state")
        }
        state["optimizer"] = self.optimizer.sharded_state_dict(
            state, is_loading=loading, metadata={"distrib_optim_sharding_type": "fsdp_dtensor"}
        )
        return state

    def prepared(self, state: dict[str, Any], by: Any, *more: Any) -> dict[str, Any]:
        """As its preprocess_fsdp_dtensor_state_dict goes on, by stock functions or ours."""
        from megatron.core.transformer.fsdp_dtensor_checkpoint import handle_experts_in_state_dict

        state = dict(state)
        state["model"], state["optimizer"] = by.handle_swiglu_in_state_dict(
            self.model, state["model"], state["optimizer"]
        )
        state["model"] = handle_experts_in_state_dict(state["model"], self.config.num_moe_experts)
        by.preprocess_state_dict_for_uneven_dtensor(state, *more)
        return state


class _Stock(NamedTuple):
    handle_swiglu_in_state_dict: Any
    preprocess_state_dict_for_uneven_dtensor: Any


def stock() -> _Stock:
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor
    from megatron.core.transformer import fsdp_dtensor_checkpoint

    return _Stock(
        fsdp_dtensor_checkpoint.handle_swiglu_in_state_dict,
        uneven_dtensor.preprocess_state_dict_for_uneven_dtensor,
    )


def begin(layout: Layout) -> None:
    from megatron.core import parallel_state as ps

    use_cpu_fsdp()
    ps.initialize_model_parallel(
        layout.tp,
        layout.pp,
        layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )


def dtensors(tree: Any, path: str = "") -> dict[str, DTensor]:
    if isinstance(tree, DTensor):
        return {path: tree}
    found: dict[str, DTensor] = {}
    for key, value in tree.items() if isinstance(tree, dict) else ():
        found |= dtensors(value, f"{path}.{key}" if path else str(key))
    return found


def where(value: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    (chunk,) = value._local_tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    return tuple(chunk.offsets), tuple(chunk.sizes)


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All values put together by what stock metadata says, with collectives; on rank 0."""
    mine = [
        (name, tuple(value.shape), *where(value), value.to_local()) for name, value in dtensors(state).items()
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found: dict[str, torch.Tensor] = {}
    for name, shape, offset, size, local in (row for rows in everyone for row in rows):
        target = found.setdefault(name, torch.full(shape, float("nan"), dtype=local.dtype))
        target[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))] = local
    return found


def save_both(rank: int, path: str, layout: Layout) -> tuple[int, int]:
    """Ours saves what ranks really hold, states on some ranks only; then stock metadata, of states that all
    ranks were given, says what all values are. Returns how many tensors agree about their place, and how many
    states this rank did not have."""
    begin(layout)
    training = FsdpTraining(layout)
    for _ in range(2):
        training.step()
    raw = training.state()
    has = set(raw["optimizer"]["state"])
    shuffled = list(raw["optimizer"]["state"].items())
    random.Random(rank).shuffle(shuffled)
    raw["optimizer"]["state"] = dict(shuffled)

    def save() -> None:
        state = training.prepared(raw, ours, training.model)
        holdfast.save(state, path, step=2, job=holdfast.Job(timeout=60, stall_timeout=20))

    assert counted(save) == []
    described = {
        name: where(value) for name, value in dtensors(training.prepared(raw, ours, training.model)).items()
    }

    state_for_all(training.optimizer.optimizer)
    full = training.state()
    by_stock = training.prepared(full, stock())
    agree = 0
    for name, value in dtensors(by_stock).items():
        if name in described and value.to_local().numel():
            assert described[name] == where(value), (name, described[name], where(value))
            agree += 1
    torch.distributed.checkpoint.save(by_stock, checkpoint_id=f"{path}.stock")  # type: ignore[attr-defined]
    values = whole(by_stock)
    if rank == 0:
        torch.save(values, f"{path}.values")
    return agree, len(full["optimizer"]["state"]) - len(has)


def load_and_compare(rank: int, path: str, layout: Layout, knows: bool, kind: str = "") -> int:
    """Into another model, of another layout maybe; `knows`: are our functions given the model, or are offsets
    left open? `kind`: which of the two checkpoints."""
    begin(layout)
    training = FsdpTraining(layout, seed=7)
    training.step()
    raw = training.state(loading=True)
    state = training.prepared(raw, ours, *([training.model] if knows else []))
    filled = dtensors(state)
    meta = {"optimizer.param_to_group_meta"}

    def load() -> None:
        holdfast.load(
            state, path + kind, exclude=sorted(meta), job=holdfast.Job(timeout=60, stall_timeout=20)
        )

    assert counted(load) == []
    state_for_all(training.optimizer.optimizer)
    values = torch.load(f"{path}.values", weights_only=True)
    compared = 0
    for name, value in dtensors(training.prepared(training.state(), stock())).items():
        offset, size = where(value)
        part = values[name][tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))]
        local = value.to_local()
        if local.numel():
            assert torch.equal(local, part), name
            compared += 1
    assert compared >= sum(bool(value._local_tensor.numel()) for value in filled.values())
    return compared


_stepped: list[FsdpTraining] = []


def step_and_prepare(rank: int, layout: Layout) -> float:
    """Train a step, and prepare the states as ranks have them then; the seconds that this takes."""
    begin(layout)
    training = FsdpTraining(layout)
    training.step()
    _stepped.append(training)
    begun = time.monotonic()
    training.prepared(training.state(), ours, training.model)
    return time.monotonic() - begun


def stock_alone(rank: int) -> str:
    """What stock preparation does with the same states."""
    (training,) = _stepped
    try:
        training.prepared(training.state(), stock())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def lose_a_state(rank: int, path: str, layout: Layout) -> tuple[str, list[str]]:
    """Rank 1 has no state of a parameter of which it has a part: what a save says; then with zeros."""
    begin(layout)
    training = FsdpTraining(layout)
    training.step()
    raw = training.state()
    states = raw["optimizer"]["state"]
    lost = next(key for key in sorted(states) if "linear_qkv.weight" in key) if rank == 1 else ""
    states.pop(lost, None)
    said = ""
    try:
        holdfast.save(
            training.prepared(raw, ours, training.model), path, job=holdfast.Job(timeout=60, stall_timeout=20)
        )
    except holdfast.errors.HoldfastError as error:
        said = str(error)
    filled = ours.fill_missing_states(training.model, raw["optimizer"])
    assert rank != 1 or lost in filled
    holdfast.save(
        training.prepared(raw, ours, training.model), path, job=holdfast.Job(timeout=60, stall_timeout=20)
    )
    return said, filled


def offloaded(rank: int, path: str, layout: Layout, fraction: float, saves: bool) -> list[float]:
    """Losses after a save of a training with `optimizer_cpu_offload`, or after its load into one that began
    with other values; by hand, without `install`."""
    from holdfast.megatron import load_optimizer_state_dict

    begin(layout)
    training = FsdpTraining(layout, 1 if saves else 2, fraction)
    if saves:
        training.step()
    raw = training.state(loading=not saves)
    state = training.prepared(raw, ours, training.model)
    if saves:
        holdfast.save(state, path, job=holdfast.Job(timeout=60, stall_timeout=20))
    else:
        holdfast.load(state, path, job=holdfast.Job(timeout=60, stall_timeout=20))
        training.models[0].load_state_dict(raw["model"])
        load_optimizer_state_dict(training.optimizer, raw["optimizer"])
        training.iteration = state["iteration"]
    return [training.step() for _ in range(2)]


# -- without a model of megatron-core ---------------------------------------------------------------


def stock_sorts(rank: int) -> bool:
    """Does stock preparation visit tensors in the order of their names?"""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor

    return "sorted(" in inspect.getsource(uneven_dtensor.preprocess_state_dict_for_uneven_dtensor)


def stock_order(rank: int, ordered: bool) -> dict[str, tuple[int, ...]]:
    """Offsets that stock metadata gives two tensors, whose order in the dict differs from rank to rank, or
    does not."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
        preprocess_state_dict_for_uneven_dtensor,
    )

    from tests.frameworks.megatron_fsdp.uneven import Uneven, cut

    whats = [Uneven("a", (13, 5), (3, 7, 0, 3)), Uneven("b", (9, 5), (1, 1, 1, 6))]
    state = {what.name: cut(what, (4,), 1) for what in (whats if ordered or rank % 2 else reversed(whats))}
    preprocess_state_dict_for_uneven_dtensor(state)
    return {name: where(value)[0] for name, value in state.items()}


QK, V, HEADS, WIDE = 6, 8, 4, 5


class _Net(torch.nn.Module):
    """What megatron-core's GatedDeltaNet has that the split of its state asks for."""

    qk_dim, v_dim, num_value_heads, in_proj_dim = QK, V, HEADS, 2 * QK + 2 * V + 2 * HEADS

    def __init__(self, values: dict[str, torch.Tensor], tp: int) -> None:
        super().__init__()
        self.tp_size = tp
        self.in_proj, self.conv1d = torch.nn.Module(), torch.nn.Module()
        for name, value in values.items():
            module, _, last = name.partition(".")
            getattr(self, module).register_parameter(last, torch.nn.Parameter(value))
            setattr(getattr(getattr(self, module), last), "megatron_fsdp_slice", value.at)  # noqa: B010


def delta_net(rank: int, path: str, tp: int, seed: int) -> dict[str, torch.Tensor]:
    """Save one whose rows are cut anywhere, zero it, load it; what its parts are, as one process sees
    them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    from tests.system.jobs import tensor

    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp_cp", "tp"))
    mesh._shard_order = [1, 0]  # type: ignore[attr-defined]
    data, model_rank = mesh.get_coordinate() or [0, 0]
    sizes = {"query": QK, "key": QK, "value": V, "z": V, "beta": HEADS, "alpha": HEADS}
    tails = {"in_proj.weight": (WIDE,), "conv1d.weight": (1, 4), "conv1d.bias": ()}
    wanted, values = {}, {}
    draw = random.Random(seed)
    for name, tail in tails.items():
        parts = list(sizes) if "in_proj" in name else list(sizes)[:3]
        for part in parts:
            wanted[f"net.{name}.{part}"] = tensor(f"{name}.{part}", (sizes[part], *tail), 1)
        mine = torch.cat([wanted[f"net.{name}.{part}"].chunk(tp)[model_rank] for part in parts])
        cuts = sorted(draw.randint(0, len(mine)) for _ in range(world // tp - 1))
        low, high = [0, *cuts][data], [*cuts, len(mine)][data]
        row = mine[0].numel()
        shape = (len(mine) * tp, *tail)
        placements = [Shard(0), Shard(0)]
        value = DTensor.from_local(
            mine[low:high].clone(),
            mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=torch.empty(shape).stride(),
        )
        value.at = slice(low * row, high * row) if low < high else slice(0, 0)
        values[name] = value
    model = torch.nn.ModuleDict({"module": torch.nn.ModuleDict({"net": _Net(values, tp)})})
    raw = {f"net.{name}": value for name, value in values.items()}
    states = {
        f"module.net.{name}": {"exp_avg": value, "step": torch.tensor(3.0)} for name, value in values.items()
    }

    def prepared() -> dict[str, Any]:
        parts, optimizer = ours.handle_gdn_in_state_dict(model, raw, {"state": states})
        return {"model": parts, "optimizer": optimizer}

    holdfast.save(prepared(), path, job=holdfast.Job(timeout=30, stall_timeout=10))
    before = {name: value.to_local().clone() for name, value in values.items()}
    for value in values.values():
        value._local_tensor.zero_()
    holdfast.load(prepared(), path, job=holdfast.Job(timeout=30, stall_timeout=10))
    for name, value in values.items():
        assert torch.equal(value.to_local(), before[name]), name  # parts alias the fused tensor
    return wanted
