"""CPU in place of GPUs, for tests that ask for GPUs: on stock and on Holdfast alike.

What names a GPU gets the CPU, and NCCL is gloo. A test that needs more of a GPU fails on stock, and is not
counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
import torch.distributed.device_mesh
from torch.overrides import TorchFunctionMode

_STAYS = (torch.Tensor.cuda, torch.Tensor.pin_memory)
_LIMIT = timedelta(seconds=60)
"""After this, a rank whose peer has failed fails in a collective, too."""


class _OnCPU(TorchFunctionMode):
    """Calls of torch that name a GPU name the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.device:  # a name alone; programs compare it
            return func(*args, **named)
        if func in _STAYS:
            return args[0]
        if "device" in named:
            named["device"] = _cpu(named["device"], number=True)
        if named.get("pin_memory"):
            named["pin_memory"] = False
        return func(*(_cpu(value, number=func is torch.Tensor.to) for value in args), **named)


def _cpu(value: Any, *, number: bool) -> Any:
    """Return the CPU in place of a GPU, which may be called by its number; any other value as it is."""
    named = isinstance(value, str | torch.device) and str(value).partition(":")[0] == "cuda"
    return "cpu" if named or (number and type(value) is int) else value


class _Stream:
    """A stream or an event of a device that has none: all is done at once."""

    def __init__(self, *args: object, **named: object) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: object) -> None: ...

    def query(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _always(None)


def _always(value: object) -> Callable[..., Any]:
    """Return a new function that returns `value`: torch.compile refuses one function under two names."""
    return lambda *_, **__: value


def stand_in_for_gpus(count: int) -> None:
    """From now on, `count` GPUs are there in this process, and are the CPU."""
    about = SimpleNamespace(name="CPU", major=8, minor=0, total_memory=1 << 34, multi_processor_count=1)
    instead = {
        "is_available": _always(True),
        "is_bf16_supported": _always(False),
        "device_count": _always(count),
        "current_device": lambda: int(os.environ.get("LOCAL_RANK", "0")),
        "get_device_name": _always(about.name),
        "get_device_capability": _always((about.major, about.minor)),
        "get_device_properties": _always(about),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        **dict.fromkeys(("Stream", "Event", "current_stream", "default_stream", "stream"), _Stream),
    }
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        instead[name] = _always(0)
    for name in ("init", "set_device", "synchronize", "empty_cache", "ipc_collect", "manual_seed"):
        instead[name] = _always(None)
    for name in ("manual_seed_all", "reset_peak_memory_stats", "reset_accumulated_memory_stats"):
        instead[name] = _always(None)
    for name, value in instead.items():
        setattr(torch.cuda, name, value)
    _gloo()
    _OnCPU().__enter__()


def stand_in_for_accelerators() -> None:
    """Also for the tests of PyTorch, which ask `torch.accelerator` for what `torch.cuda` has said."""
    cuda = torch.cuda
    for name in ("is_available", "device_count"):
        setattr(torch.accelerator, name, getattr(cuda, name))
    torch.accelerator.current_accelerator = _always(torch.device("cuda"))
    torch.accelerator.current_device_index = cuda.current_device
    torch.accelerator.current_stream = cuda.current_stream  # Adam's step asks it
    torch.accelerator.set_device_index = torch.accelerator.synchronize = _always(None)


def _gloo() -> None:
    """Make process groups and meshes of GPUs those of the CPU."""
    c10d, meshes = torch.distributed, torch.distributed.device_mesh
    c10d.is_nccl_available = _always(True)
    begin, add, make, wait = c10d.init_process_group, c10d.new_group, meshes.init_device_mesh, c10d.barrier

    def init_process_group(backend: str | None = None, *args: Any, **named: Any) -> None:
        named.pop("device_id", None)
        begin("gloo", *args, **{**named, "timeout": _LIMIT})

    def new_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **named: Any
    ) -> Any:
        named.pop("pg_options", None)
        named.pop("device_id", None)
        return add(ranks, _LIMIT, "gloo", **named)

    def barrier(*args: Any, device_ids: object = None, **named: Any) -> Any:
        return wait(*args, **named)

    def init_device_mesh(device_type: str, *args: Any, **named: Any) -> Any:
        return make("cpu", *args, **named)

    c10d.init_process_group, c10d.new_group, c10d.barrier = init_process_group, new_group, barrier
    c10d.init_device_mesh = meshes.init_device_mesh = init_device_mesh
