"""A real mixture of experts of megatron-core under Megatron-FSDP: its state saved by ours and by stock code; importable by spawned processes."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.adapters import megatron_fsdp as ours
from tests.fsdp.megatron_cpu import state_for_all, use_cpu_fsdp
from tests.megatron.models import LENGTH, Layout, Recipe, Training, _config, _spec
from tests.system.test_content import _counted

SHAPE = Recipe(bf16=True, layers=2, shared_expert=True)


class FsdpTraining:
    """`tests.megatron.models.Training` with FullyShardedDataParallel in place of DDP."""

    step = Training.step

    def __init__(self, layout: Layout, seed: int = 1) -> None:
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
        from megatron.core.models.gpt import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module
        from megatron.core.utils import unwrap_model

        self.layout, self.recipe, self.iteration = layout, SHAPE, 0
        self.config = _config(layout, SHAPE)
        self.config.finalize_model_grads_func = finalize_model_grads
        torch.manual_seed(seed)
        chunk = GPTModel(
            self.config,
            _spec(self.config, SHAPE, None),
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
        )
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
    """Ours saves what ranks really hold, states on some ranks only; then stock metadata, of states that all ranks were given, says
    what all values are. Returns how many tensors agree about their place, and how many states this rank did not have."""
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
        holdfast.save(state, path, step=2, timeout=60, stall_timeout=20)

    assert _counted(save) == []
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
    values = whole(by_stock)
    if rank == 0:
        torch.save(values, f"{path}.values")
    return agree, len(full["optimizer"]["state"]) - len(has)


def load_and_compare(rank: int, path: str, layout: Layout, knows: bool) -> int:
    """Into another model, of another layout maybe; `knows`: are our functions given the model, or are offsets left open?"""
    begin(layout)
    training = FsdpTraining(layout, seed=7)
    training.step()
    raw = training.state(loading=True)
    state = training.prepared(raw, ours, *([training.model] if knows else []))
    filled = dtensors(state)
    meta = {"optimizer.param_to_group_meta"}

    def load() -> None:
        holdfast.load(state, path, exclude=sorted(meta), timeout=60, stall_timeout=20)

    assert _counted(load) == []
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


def stock_alone(rank: int, layout: Layout) -> str:
    """What stock preparation does with states as ranks have them after a step."""
    begin(layout)
    training = FsdpTraining(layout)
    training.step()
    try:
        training.prepared(training.state(), stock())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"
