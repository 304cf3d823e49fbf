"""Real megatron-core on CPU ranks: what it asks of CUDA is answered by the CPU. Nothing of its own logic is
replaced, but for one call that fails with PyTorch's own Adam (see `_with_step`). Where it spawns a process, one
is forked from the tests' server, which has torch imported.

Every function of a rank's process must call `use_cpu()` first; it changes the process for good, so these
ranks are a pool of their own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_done: list[Any] = []
_marking: list[None] = []
"""Not empty while tensors say whether they are on the host (`with_a_device`)."""


class _Stream:
    def __init__(self, *args: Any, **named: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Stream:
        return self

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


class _OnCpu(TorchFunctionMode):
    """Sends what is addressed to "cuda" to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and not _marking and getattr(func, "__name__", "") != "to":
            return func(*args)  # of most calls there is nothing to change
        named = dict(kwargs or {})
        if str(named.get("device")).startswith("cuda"):
            named["device"] = "cpu"
        if getattr(func, "__name__", "") == "to":
            args = tuple("cpu" if isinstance(arg, str) and arg.startswith("cuda") else arg for arg in args)
        pinned = bool(named.pop("pin_memory", False))
        out = func(*args, **named)
        if pinned or any(getattr(arg, "on_host", False) for arg in args):
            with contextlib.suppress(AttributeError):  # it is no tensor
                out.on_host = True
        return out


@contextlib.contextmanager
def with_a_device() -> Iterator[None]:
    """Inside, tensors count as on a GPU unless they were pinned: HybridDeviceOptimizer tells by it what it
    offloads, and copies nothing that is on the CPU already."""

    def pinned(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        self.on_host = True  # type: ignore[attr-defined]
        return self

    before, capability = torch.Tensor.pin_memory, torch.cuda.get_device_capability
    torch.Tensor.pin_memory = pinned  # type: ignore[assignment,method-assign]
    torch.Tensor.is_cuda = property(lambda self: not getattr(self, "on_host", False))
    torch.cuda.get_device_capability = lambda device=None: (8, 0)  # a broadcast asks for it
    _marking.append(None)
    try:
        yield
    finally:
        _marking.pop()
        torch.Tensor.pin_memory = before  # type: ignore[method-assign]
        torch.cuda.get_device_capability = capability
        del torch.Tensor.is_cuda


def _with_step(original: Any) -> Any:
    """Stock megatron-core 0.16.1 can't load its own `fully_reshardable` state without Transformer Engine or
    Apex: the Adam of PyTorch keeps a `step` a parameter, which is not among the tensors to be set."""

    def set_state(self: Any, param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        original(self, param, {**({"step": state["step"]} if "step" in state else {}), **tensors})

    return set_state


def _without_step(original: Any) -> Any:
    """Nor can one before 0.16 describe that state."""

    def get_state(self: Any, param: Any) -> dict[str, Any]:
        return {key: value for key, value in original(self, param).items() if key != "step"}

    return get_state


def _queue_of_the_server(module: Any) -> None:
    """Have the queue to megatron-core's writers made by a process that does not import torch for every rank."""
    [name] = (name for name in vars(module) if name.endswith("get_write_results_queue"))
    original: Callable[..., Any] = getattr(module, name)

    def queue(*args: Any) -> Any:
        if module._results_queue is None:
            module._results_queue = multiprocessing.get_context("forkserver").Manager().Queue()
        return original(*args)

    setattr(module, name, queue)


def use_cpu() -> None:
    if _done:
        return
    warnings.filterwarnings("ignore")  # what megatron-core says of CUDA extensions that it does not find
    torch.compiler.set_stance(
        "force_eager"
    )  # each rank would compile, and call the C++ compiler, for seconds
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *args, **named: None  # type: ignore[assignment]
    torch.cuda.Stream = _Stream  # type: ignore[assignment,misc]
    torch.cuda.Event = _Stream  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda *args, **named: _Stream()  # type: ignore[assignment]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.FloatTensor = lambda values: torch.tensor(values, dtype=torch.float)
    torch.Tensor.cuda = lambda self, *args, **named: self  # type: ignore[assignment]
    torch.nn.Module.cuda = lambda self, *args, **named: self  # type: ignore[assignment]
    mode = _OnCpu()
    mode.__enter__()
    real_type = torch.Tensor.type

    def type_of(self: torch.Tensor, *args: Any, **named: Any) -> Any:
        found = real_type(self, *args, **named)
        plain = not args and not named and isinstance(found, str) and "cuda" not in found
        return found.replace("torch.", "torch.cuda.") if plain else found

    torch.Tensor.type = type_of  # type: ignore[assignment,method-assign]
    from megatron.core import model_parallel_config
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not hasattr(model_parallel_config, "warnings"):  # 0.15 warns without importing it
        model_parallel_config.warnings = warnings  # type: ignore[attr-defined]

    from megatron.core.transformer import multi_latent_attention

    for name in ("TELinear", "TEColumnParallelLinear"):  # asked for with isinstance, and no type without it
        if not isinstance(getattr(multi_latent_attention, name, None), type):
            setattr(multi_latent_attention, name, type(name, (), {}))

    from megatron.core.optimizer import optimizer_config
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.package_info import MAJOR, MINOR

    # Where Transformer Engine is missing it compares the version None, for a precision-aware optimizer.
    optimizer_config.is_te_min_version = lambda *args, **named: False

    DistributedOptimizer._set_main_param_and_optimizer_states = _with_step(
        DistributedOptimizer._set_main_param_and_optimizer_states
    )
    if (MAJOR, MINOR) < (0, 16):
        DistributedOptimizer._get_main_param_and_optimizer_states = _without_step(
            DistributedOptimizer._get_main_param_and_optimizer_states
        )

    class Tracker(random.CudaRNGStatesTracker):
        @contextlib.contextmanager
        def fork(self, name: str = "") -> Iterator[None]:
            yield

    from megatron.core.dist_checkpointing.strategies import filesystem_async

    _queue_of_the_server(filesystem_async)
    random.initialize_rng_tracker()
    random._CUDA_RNG_STATE_TRACKER = Tracker()
    _done.append(mode)
