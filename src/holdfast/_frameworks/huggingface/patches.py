"""Replacements for the frameworks' functions that load and save published weights.

The originals load or save by collectives that every rank must enter; the replacements read and write through
Holdfast (`live`). Models without a table, and features that Holdfast lacks (adapters, 8 bits), are left to
the original, with a warning.

This module imports neither a framework nor megatron-core; the replacements import `live`, and with it
megatron-core, when they are called.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast._core.protocol.call import Call, begin_call
from holdfast._frameworks.patching import MakeReplacement, Replacement
from holdfast._frameworks.settings import Settings

if TYPE_CHECKING:
    from holdfast._frameworks.huggingface.live import Left, Weights

log = logging.getLogger("holdfast")
_OUTPUT = "output_layer.weight"
Arguments = Mapping[str, Any]
"""The arguments of one call of a framework's function, by name, with defaults."""


def mbridge(settings: Settings) -> Iterator[Replacement]:
    """Yield the replacements for mbridge, verl's `vanilla_mbridge`."""
    module = "mbridge.core.bridge"
    yield _replacement(settings, module, "Bridge.load_weights", _load_mbridge)
    yield _replacement(settings, module, "Bridge.save_weights", _save_mbridge)


def megatron_bridge(settings: Settings) -> Iterator[Replacement]:
    """Yield the replacements for Megatron-Bridge, which NeMo RL and verl call. All loads go through the first
    function."""
    module = "megatron.bridge.models.conversion"
    name = "MegatronModelBridge.load_weights_hf_to_megatron"
    yield _replacement(settings, f"{module}.model_bridge", name, _load_megatron_bridge)
    yield _replacement(settings, f"{module}.auto_bridge", "AutoBridge.save_hf_weights", _save_megatron_bridge)


def mcore_bridge(settings: Settings) -> Iterator[Replacement]:
    """Yield the replacement for mcore-bridge, which ms-swift calls. Its load is not replaced: it does not
    wait for other ranks."""
    module = "mcore_bridge.bridge.gpt_bridge"
    yield _replacement(settings, module, "GPTBridge.save_weights", _save_mcore_bridge)


KNOWN: Mapping[str, tuple[str, ...]] = {
    # memory_efficient: ours holds one tensor at a time in any case
    "Bridge.load_weights": ("self", "models", "weights_path", "memory_efficient"),
    "Bridge.save_weights": ("self", "models", "weights_path", "memory_efficient"),
    "MegatronModelBridge.load_weights_hf_to_megatron": (
        *("self", "hf_pretrained", "megatron_model", "allowed_mismatched_params"),
    ),
    # every rank writes files in any case, and shows no progress
    "AutoBridge.save_hf_weights": (
        *("self", "model", "path", "show_progress", "strict"),
        *("distributed_save", "save_every_n_ranks", "weight_dtype"),
    ),
    # adapter_name: only with peft_format
    "GPTBridge.save_weights": (
        *("self", "mg_models", "output_dir", "peft_format", "adapter_name", "converter", "max_shard_size"),
        "save_missing_weights",
    ),
}
"""By function, the arguments that the replacement uses or can ignore. If any other argument differs from its
default, the call is left to the framework."""


def _replacement(
    settings: Settings, module: str, name: str, do: Callable[[Arguments, Call], object]
) -> Replacement:
    make = _made(settings, name, do)
    return Replacement(module, name, "huggingface", make, takes=lambda: KNOWN[name])


def _made(settings: Settings, name: str, do: Callable[[Arguments, Call], object]) -> MakeReplacement:
    """Return a factory of the replacement of a function, which calls `do` with the arguments, and the
    original if that raises Left."""

    def make(original: Callable[..., object]) -> Callable[..., object]:
        signature = inspect.signature(original)

        @wraps(original)
        def call(*args: object, **named: object) -> object:
            if not _has_groups():
                return original(*args, **named)
            from holdfast._frameworks.huggingface.live import Left

            bound = signature.bind(*args, **named)
            bound.apply_defaults()
            begun = begin_call(settings.of_a_call())  # made here: groups may be made long after install()
            try:
                for key, value in bound.arguments.items():
                    if key not in KNOWN[name] and value is not signature.parameters[key].default:
                        raise Left(f"{key}={value!r} was given")
                return do(bound.arguments, begun)
            except Left as left:
                if begun.rank == begun.participants[0]:
                    log.warning(
                        "%s is left to the framework: %s.", original.__qualname__, str(left).rstrip(".")
                    )
            return original(*args, **named)

        return call

    return make


def _has_groups() -> bool:
    """Return whether megatron-core has made its groups; for others, the participants are not known."""
    state = sys.modules.get("megatron.core.parallel_state")
    return state is not None and bool(state.model_parallel_is_initialized())


def _chunks(model: Any) -> Any:
    """Return a model as a list of its chunks, which most frameworks already pass."""
    return model if isinstance(model, list | tuple) else [model]


def _output_of_values(chunks: list[Any]) -> tuple[str, ...]:
    """Return the output layer's name if it has one row (a value model); stock code does not load it."""
    from holdfast._frameworks.huggingface.live import unwrapped

    weights = [dict(unwrapped(chunk).named_parameters()) for chunk in chunks]
    return (_OUTPUT,) if any(_OUTPUT in own and own[_OUTPUT].shape[0] == 1 for own in weights) else ()


# -- mbridge -----------------------------------------------------------------------------------


def _load_mbridge(given: Arguments, call: Call) -> None:
    from holdfast._frameworks.huggingface.live import Weights, fill

    bridge, chunks, path = given["self"], given["models"], given["weights_path"]
    # mbridge finds the folder in the hub's cache itself.
    folder = path if os.path.isdir(path) else bridge._get_actual_hf_path(path)
    # As stock does: a later save takes file names from it.
    bridge.safetensor_io = bridge._get_safetensor_io(folder)
    fill(Weights(chunks, folder, _output_of_values(chunks)), str(path), call)


def _save_mbridge(given: Arguments, call: Call) -> None:
    from holdfast._frameworks.huggingface.live import Left, Weights, export

    bridge, out = given["self"], given["weights_path"]
    loaded = bridge.safetensor_io
    none = Left("no weights were loaded through this bridge")
    export(none if loaded is None else Weights(given["models"], loaded.hf_dir), out, call)
    if call.rank == call.participants[0]:
        bridge.hf_config.save_pretrained(out)


# -- Megatron-Bridge -----------------------------------------------------------------------------


def _load_megatron_bridge(given: Arguments, call: Call) -> object:
    from holdfast._frameworks.huggingface.live import fill

    chunks, pretrained = _chunks(given["megatron_model"]), given["hf_pretrained"]
    fill(_asked_to_load(given, chunks), str(getattr(pretrained, "model_name_or_path", "")), call)
    return chunks


def _asked_to_load(given: Arguments, chunks: list[Any]) -> Weights | Left:
    from holdfast._frameworks.huggingface.live import Left

    mismatched = given.get("allowed_mismatched_params") or []
    if mismatched not in ([], [_OUTPUT]):  # verl gives the latter for a value model
        return Left(f"allowed_mismatched_params={mismatched} was given")
    if hasattr(chunks[0], "hide_teacher_model") or hasattr(chunks[0], "hide_loss_modules"):
        return Left("the model is one that is distilled")
    return _of_pretrained(
        given["self"], given["hf_pretrained"], chunks, _output_of_values(chunks) if mismatched else ()
    )


def _save_megatron_bridge(given: Arguments, call: Call) -> None:
    from holdfast._frameworks.huggingface.live import Left, export

    bridge, chunks = given["self"], _chunks(given["model"])
    asked = _of_pretrained(bridge, bridge.hf_pretrained, chunks)
    if given.get("weight_dtype") is not None:  # 0.3.1 does not have it
        asked = Left("weight_dtype was given")
    export(asked, given["path"], call, strict=bool(given.get("strict", True)))


def _of_pretrained(
    bridge: Any, pretrained: object, chunks: list[Any], without: tuple[str, ...] = ()
) -> Weights | Left:
    """Return the weights with the folder that a bridge reads; for a model on the hub, that in the cache."""
    from holdfast._frameworks.huggingface.live import Left, Weights

    if getattr(bridge, "export_weight_dtype", "bf16") == "fp8":  # 0.3.1 does not have it
        return Left("export_weight_dtype is fp8")
    state = import_module("megatron.bridge.models.hf_pretrained.state")
    source = getattr(getattr(pretrained, "state", None), "source", None)
    if not isinstance(source, state.SafeTensorsStateSource):
        return Left("its weights are not read from safetensors files")
    return Weights(chunks, str(source.path), without)


# -- mcore-bridge (ms-swift) ---------------------------------------------------------------------


def _save_mcore_bridge(given: Arguments, call: Call) -> None:
    from holdfast._frameworks.huggingface.live import Left, Weights, export

    bridge, size = given["self"], re.fullmatch(r"(\d+)(?:GB)?", str(given["max_shard_size"]))
    # For a model that was loaded from a checkpoint, the configuration names the published folder.
    folder = bridge._source_model_dir or bridge.config.hf_config.name_or_path
    asked: Weights | Left = Weights(_chunks(given["mg_models"]), folder)
    if not folder or not os.path.isdir(folder):
        asked = Left("the folder of the published model is not known")
    for name in ("peft_format", "converter", "save_missing_weights"):  # these change what is written
        if given.get(name):
            asked = Left(f"{name} was given")
    if size is None:
        asked = Left(f"max_shard_size={given['max_shard_size']!r} was given")
    file_bytes = int(size[1]) * 10**9 if size is not None else 1
    export(asked, given["output_dir"], call, file_bytes=file_bytes)
