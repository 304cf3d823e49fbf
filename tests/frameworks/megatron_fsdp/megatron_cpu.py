"""Megatron-FSDP (megatron-core 0.16.1, whose lines are named, and 0.19.2) on CPU ranks with gloo, on top of
tests.frameworks.megatron.cpu.

No logic of Megatron-FSDP is replaced, but for the choice of ReduceOp (gloo has no PREMUL_SUM).
`use_cpu_fsdp()` changes the process for good: every job calls it first, in a world of its own.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_done: list[Any] = []


def _is_cuda(x: Any) -> bool:
    return (isinstance(x, str) and x.startswith("cuda")) or (isinstance(x, torch.device) and x.type == "cuda")


class _Redirect(TorchFunctionMode):
    """What tests.frameworks.megatron.cpu._OnCpu leaves over: device=0 (an index),
    x.to(torch.device("cuda:0")), x.to(0)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        device = named.get("device")
        if _is_cuda(device) or type(device) is int:
            named["device"] = torch.device("cpu")
        if getattr(func, "__name__", "") == "to":
            args = (args[0], *(torch.device("cpu") if _is_cuda(a) or type(a) is int else a for a in args[1:]))
        return func(*args, **named)


def use_cpu_fsdp() -> None:
    if _done:
        return
    from tests.frameworks.megatron.cpu import use_cpu

    use_cpu()
    # f"cuda:{torch.cuda.current_device()}" must name a device (megatron_fsdp.py:182,184,188,
    # mcore_fsdp_adapter.py:91); use_cpu() answers torch.device("cpu"), of which "cuda:cpu" is made.
    torch.cuda.current_device = lambda: 0  # type: ignore[assignment]
    mode = _Redirect()
    mode.__enter__()

    # A function that a mode handles runs without modes, Tensor.backward too, so FSDP's backward hooks, which
    # allocate buckets on "cuda:0" (param_and_grad_buffer.py:521), need one of their own.
    real_run = torch.autograd._engine_run_backward

    def run_backward(*args: Any, **named: Any) -> Any:
        with _Redirect():
            return real_run(*args, **named)

    torch.autograd._engine_run_backward = run_backward  # type: ignore[assignment]

    # gloo has no ReduceOp.PREMUL_SUM (param_and_grad_buffer.py:3772): take stock's other branch, scale and
    # then sum, as with gradient_reduce_div_fusion=False (which fully_shard() can't be given).
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer

    real_preprocessing = param_and_grad_buffer.gradient_reduce_preprocessing

    def preprocessing(grad: Any, factor: Any, config: Any) -> Any:
        config = copy.copy(config)
        config.gradient_reduce_div_fusion = False
        return real_preprocessing(grad, factor, config)

    param_and_grad_buffer.gradient_reduce_preprocessing = preprocessing

    # FullyShardedDataParallel.sync_rng_states_across_tp_group (TP > 1) sends the GPU's generator around.
    torch.cuda.get_rng_state = lambda *a, **k: torch.zeros(16, dtype=torch.uint8)  # type: ignore[assignment]
    torch.cuda.set_rng_state = lambda *a, **k: None  # type: ignore[assignment]

    # Meshes are made with device_type="cuda": mcore_fsdp_adapter.py:251,265,276 (DeviceMesh.from_group) and
    # fully_shard.py:260 (init_device_mesh).
    from torch.distributed import device_mesh

    mesh = device_mesh.DeviceMesh
    real_from_group, real_init_mesh = mesh.from_group, device_mesh.init_device_mesh

    def from_group(group: Any, device_type: str, *args: Any, **named: Any) -> Any:
        return real_from_group(group, "cpu" if device_type == "cuda" else device_type, *args, **named)

    def init_device_mesh(device_type: str, *args: Any, **named: Any) -> Any:
        return real_init_mesh("cpu" if device_type == "cuda" else device_type, *args, **named)

    mesh.from_group = staticmethod(from_group)  # type: ignore[method-assign]
    from megatron.core.distributed.fsdp.src.megatron_fsdp import fully_shard

    fully_shard.init_device_mesh = init_device_mesh  # type: ignore[attr-defined]

    # mcore_fsdp_adapter.py:184 (TP > 1) asks isinstance(x, (TELinear,)), which is no type without Transformer
    # Engine; 0.19 does not ask.
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter

    if not isinstance(getattr(mcore_fsdp_adapter, "TELinear", type), type):
        mcore_fsdp_adapter.TELinear = type("TELinear", (), {})

    # Float16Module asks isinstance(x, (torch.FloatTensor, torch.cuda.FloatTensor)), and use_cpu() has made a
    # function of the latter.
    from megatron.core.transformer import module

    for name in ("_FLOAT_TYPES", "_HALF_TYPES", "_BF16_TYPES"):
        setattr(module, name, tuple(t for t in getattr(module, name) if isinstance(t, type)))
    _done.append(mode)


_LOCAL = {
    "                param.requires_grad = False\n                if": "                grad = local(grad)\n",
    "                        gpu_param.data.copy_": "                        gpu_param = local(gpu_param)\n",
    "        params_total_numel = ": "        params = [local(param) for param in params]\n",
    "                    param = param.detach().clone().cpu()": "                    param = local(param)\n",
}
"""Before which lines of HybridDeviceOptimizer the local tensor is taken."""


def offload_dtensors() -> None:
    """Let HybridDeviceOptimizer step offloaded parameters of Megatron-FSDP by their local tensors, as the first
    revision of Megatron-LM's pull request 4623 does, which the author of issue 4910 ran. 0.16.1 and 0.19.2 copy
    a DTensor's gradient into a plain tensor, and torch refuses."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.optimizer.cpu_offloading import hybrid_optimizer

    source = inspect.getsource(hybrid_optimizer)
    for line, before in _LOCAL.items():
        assert source.count(line) == 1, line
        source = source.replace(line, before + line)
    space = vars(hybrid_optimizer) | {"local": lambda value: getattr(value, "_local_tensor", value)}
    exec(compile(source, hybrid_optimizer.__file__, "exec"), space)
    optimizer.HybridDeviceOptimizer = space["HybridDeviceOptimizer"]
    distrib_optimizer.HybridDeviceOptimizer = space["HybridDeviceOptimizer"]


def state_for_all(optimizer: Any) -> None:
    """Give parameters whose local shard is empty (their grad is None) a state too, as Transformer Engine's
    FusedAdam does and PyTorch's AdamW, which megatron-core falls back to, does not. Stock
    handle_swiglu_in_state_dict and preprocess_state_dict_for_uneven_dtensor run collectives for every state
    that a rank has, so they hang or fail where ranks have different ones. Call it after the first step."""
    some = next(iter(optimizer.state.values()))
    for group in optimizer.param_groups:
        for p in group["params"]:
            found = optimizer.state.pop(p, None) or {  # the order of states must be that of all ranks, too
                k: torch.zeros_like(p, dtype=v.dtype) if k != "step" else v.clone() for k, v in some.items()
            }
            optimizer.state[p] = found
