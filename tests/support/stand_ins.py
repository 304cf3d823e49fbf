"""Empty modules in place of what frameworks import and the functions under test need nothing from.

What stands in for what, and why, is listed here, or in the tests of one framework (`stand_in`). From the frameworks'
functions down to megatron-core, Ray and torch nothing is replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

STAND_INS = {
    # needs CUDA or builds for it
    "cuda": ("transformer_engine", "triton", "modelopt"),
    # its layers have their parameters, and no arithmetic: tests/support/transformer_engine.py
    "transformer-engine": ("transformer_engine",),
    # its kernels; the rest of the framework is there
    "triton": ("triton",),
    # plots, servers and models of inference
    "nemo-rl": (
        *("fastapi", "hydra", "mlflow", "prometheus_client", "pynvml", "swanlab", "uvicorn", "wandb", "zmq"),
    ),
    # the trainer's data, tokenizers, hubs and plots
    "ms-swift": (
        *("datasets", "json_repair", "modelscope", "pandas", "tqdm", "transformers"),
        *("mcore_bridge.patcher", "swift.model", "swift.tuners"),
    ),
    # where its models and their conversion are real
    "mcore-bridge": (
        *("accelerate", "datasets", "json_repair", "modelscope", "pandas", "peft", "triton"),
        *("mcore_bridge.patcher", "swift.model", "swift.tuners"),
    ),
    "megatron-bridge": (
        *("modelopt", "omegaconf", "torch.utils.tensorboard", "transformer_engine", "transformers"),
        *("megatron.bridge.data", "megatron.bridge.models", "megatron.bridge.training.tokenizers.tokenizer"),
    ),
    # where its models and their conversion are real
    "megatron-bridge weights": (
        *("datasets", "modelopt", "six", "torch.utils.tensorboard", "triton"),
        *("megatron.bridge.data", "megatron.bridge.training.tokenizers.tokenizer"),
    ),
    "megatron-lm": ("megatron.rl", "megatron.training.tokenizer", "triton"),
    "verl": (
        *("accelerate", "codetiming", "datasets", "hydra", "pandas", "peft", "pylatexenc", "torchdata"),
        *("fastapi", "uvicorn"),  # servers of inference
    ),
}
"""By framework, the modules that are empty in its tests."""


class _Nothing:
    """What a stand-in has in place of every class and function: callable, empty and false."""

    def __init__(self, *args: Any, **named: Any) -> None: ...

    def __call__(self, *args: Any, **named: Any) -> Any:
        return _Nothing()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()

    def __getitem__(self, key: Any) -> Any:
        return _Nothing()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Nothing,), {})


class _StandIns(MetaPathFinder, Loader):
    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        wanted = any(name == own or name.startswith(f"{own}.") for own in self.names)
        return ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def stand_in_for(framework: str) -> None:
    """The modules of `STAND_INS[framework]`, and all below them, are empty from now on, in this process."""
    if framework == "megatron-bridge":
        with suppress(ImportError):  # Bridge 0.3 does without
            import_module("megatron.training.config")  # it has to find that there is no Transformer Engine
    stand_in(STAND_INS[framework])


def stand_in(names: tuple[str, ...]) -> None:
    """These modules, and all below them, are empty from now on, in this process."""
    sys.meta_path.insert(0, _StandIns(names))
