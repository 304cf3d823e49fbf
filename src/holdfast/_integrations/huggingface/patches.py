"""Replacements for the frameworks' functions that load and save published weights.

The originals load or save by collectives that every rank must enter; the replacements read and write through
Holdfast (`live`). Models without a table, and features that Holdfast lacks (adapters, 8 bits), are left to
the original, with a warning.

This module imports neither a framework nor megatron-core.
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
from typing import TYPE_CHECKING, Any, cast

from holdfast._integrations.patching import MakeReplacement, Replacement
from holdfast._integrations.settings import Settings
from holdfast._protocol.call import Call, begin_call

if TYPE_CHECKING:
    from types import ModuleType

    from holdfast._integrations.huggingface.live import Left, Weights

log = logging.getLogger("holdfast")
_OUTPUT = "output_layer.weight"
Arguments = Mapping[str, Any]
"""The arguments of one call of a framework's function, by name, with defaults."""


def mbridge(settings: Settings) -> Iterator[Replacement]:
    """Yield the replacements for mbridge, verl's `vanilla_mbridge`."""
    module = "mbridge.core.bridge"
    load = _load(settings, "weights_path", _of_mbridge)
    save = _save(settings, "weights_path", _of_mbridge_loaded, _strictness, _mbridge_config)
    yield Replacement(module, "Bridge.load_weights", "huggingface", load)
    yield Replacement(module, "Bridge.save_weights", "huggingface", save)


def megatron_bridge(settings: Settings) -> Iterator[Replacement]:
    """Yield those for Megatron-Bridge, which NeMo RL and verl call; all of its loads call the first one."""
    module = "megatron.bridge.models.conversion"
    load = _load(settings, "hf_pretrained", _of_bridge, _name_of_pretrained, _bridge_chunks)
    save = _save(settings, "path", _of_bridge_pretrained, _strictness)
    name = "MegatronModelBridge.load_weights_hf_to_megatron"
    yield Replacement(f"{module}.model_bridge", name, "huggingface", load)
    yield Replacement(f"{module}.auto_bridge", "AutoBridge.save_hf_weights", "huggingface", save)


def mcore_bridge(settings: Settings) -> Iterator[Replacement]:
    """Yield those for mcore-bridge, which ms-swift calls. Its load waits for no other rank, and stays."""
    save = _save(settings, "output_dir", _of_mcore_bridge, _file_size)
    module = "mcore_bridge.bridge.gpt_bridge"
    yield Replacement(module, "GPTBridge.save_weights", "huggingface", save)


def _live() -> ModuleType:
    """Import `live`, and with it megatron-core, which callers of these functions have imported already."""
    return import_module("holdfast._integrations.huggingface.live")


def _load(
    settings: Settings,
    place: str,
    read: Callable[[Arguments], Weights],
    name: Callable[[object], str] = str,
    after: Callable[[Arguments, Call], object] = lambda given, call: None,
) -> MakeReplacement:
    """Make the replacement of a function that loads published weights into a model.

    place: the argument that names what is loaded; the same on all ranks. name: turns it into text.
    read: reads the arguments; raises Left for what Holdfast does not do.
    after: does the rest of the original's work, and returns its result.
    """

    def do(given: Arguments, call: Call) -> object:
        _live().fill(_asked(read, given), name(given[place]), call)
        return after(given, call)

    return _standing_in(settings, do)


def _save(
    settings: Settings,
    out: str,
    read: Callable[[Arguments], Weights],
    options: Callable[[Arguments], dict[str, Any]],
    after: Callable[[Arguments, Call], object] = lambda given, call: None,
) -> MakeReplacement:
    """Make the replacement of a function that saves a model as published weights.

    out: the argument that is the folder. options: returns further arguments for `live.export`.
    read, after: as in `_load`.
    """

    def do(given: Arguments, call: Call) -> object:
        report = _live().export(_asked(read, given), os.fspath(given[out]), call, **options(given))
        if report.missing and call.rank == call.participants[0]:
            log.warning(
                "%s holds no %d tensors of the published model: %s.",
                report.path,
                len(report.missing),
                ", ".join(report.missing[:3]),
            )
        return after(given, call)

    return _standing_in(settings, do)


def _asked(read: Callable[[Arguments], Weights], given: Arguments) -> Weights | Left:
    try:
        return read(given)
    except _live().Left as left:
        return cast("Left", left)


def _standing_in(settings: Settings, do: Callable[[Arguments, Call], object]) -> MakeReplacement:
    def make(original: Callable[..., object]) -> Callable[..., object]:
        signature = inspect.signature(original)

        @wraps(original)
        def call(*args: object, **named: object) -> object:
            try:
                bound = signature.bind(*args, **named)
            except TypeError:  # the original raises the error for its arguments
                return original(*args, **named)
            if not _has_groups():
                return original(*args, **named)
            bound.apply_defaults()
            begun = begin_call(settings.of_a_call())  # made here: groups may be made long after install()
            try:
                return do(bound.arguments, begun)
            except _live().Left as left:
                if begun.rank == begun.participants[0]:
                    log.warning(
                        "%s is left to the framework: %s.", original.__qualname__, str(left).rstrip(".")
                    )
            return original(*args, **named)

        return call

    return make


def _strictness(given: Arguments) -> dict[str, Any]:
    """Return `strict`, which some versions do not have, for `live.export`."""
    return {"strict": bool(given.get("strict", True))}


def _has_groups() -> bool:
    """Return whether megatron-core has made its groups; for others, the participants are not known."""
    state = sys.modules.get("megatron.core.parallel_state")
    return state is not None and bool(state.model_parallel_is_initialized())


def _output_of_values(chunks: list[Any]) -> tuple[str, ...]:
    """Return the output layer's name if it has one row (a value model); stock code does not load it."""
    weights = [dict(_live().unwrapped(chunk).named_parameters()) for chunk in chunks]
    return (_OUTPUT,) if any(_OUTPUT in own and own[_OUTPUT].shape[0] == 1 for own in weights) else ()


# -- mbridge -----------------------------------------------------------------------------------


def _of_mbridge(given: Arguments) -> Weights:
    live, bridge, chunks = _live(), given["self"], given["models"]
    path = given["weights_path"]
    # mbridge finds the folder in the hub's cache itself.
    folder = path if os.path.isdir(path) else bridge._get_actual_hf_path(path)
    # As stock does: a later save takes file names from it.
    bridge.safetensor_io = bridge._get_safetensor_io(folder)
    return live.Weights(chunks, folder, _output_of_values(chunks))  # type: ignore[no-any-return]


def _of_mbridge_loaded(given: Arguments) -> Weights:
    live, bridge = _live(), given["self"]
    loaded = bridge.safetensor_io
    if loaded is None:
        raise live.Left("no weights were loaded through this bridge")
    return live.Weights(given["models"], loaded.hf_dir)  # type: ignore[no-any-return]


def _mbridge_config(given: Arguments, call: Call) -> None:
    if call.rank == call.participants[0]:
        given["self"].hf_config.save_pretrained(given["weights_path"])


# -- Megatron-Bridge -----------------------------------------------------------------------------


def _of_bridge(given: Arguments) -> Weights:
    live, chunks = _live(), _bridge_chunks(given)
    mismatched = given.get("allowed_mismatched_params") or []
    if mismatched not in ([], [_OUTPUT]):  # verl gives the latter for a value model
        raise live.Left(f"allowed_mismatched_params={mismatched} was given")
    if getattr(given["self"], "export_weight_dtype", "bf16") == "fp8":
        raise live.Left("export_weight_dtype is fp8")
    if hasattr(chunks[0], "hide_teacher_model") or hasattr(chunks[0], "hide_loss_modules"):
        raise live.Left("the model is one that is distilled")
    folder = _folder_of_pretrained(given["hf_pretrained"])
    return live.Weights(chunks, folder, _output_of_values(chunks) if mismatched else ())  # type: ignore[no-any-return]


def _of_bridge_pretrained(given: Arguments) -> Weights:
    live, bridge, model = _live(), given["self"], given["model"]
    if given.get("weight_dtype") is not None:
        raise live.Left("weight_dtype was given")
    if getattr(bridge, "export_weight_dtype", "bf16") == "fp8":
        raise live.Left("export_weight_dtype is fp8")
    chunks = model if isinstance(model, list) else [model]
    return live.Weights(chunks, _folder_of_pretrained(bridge.hf_pretrained))  # type: ignore[no-any-return]


def _bridge_chunks(given: Arguments, call: Call | None = None) -> list[Any]:
    """Return the model chunks to fill, which the original also returns."""
    model = given["megatron_model"]
    return model if isinstance(model, list) else [model]


def _name_of_pretrained(pretrained: object) -> str:
    return str(getattr(pretrained, "model_name_or_path", ""))


def _folder_of_pretrained(pretrained: object) -> str:
    """Return the folder of the weights; for a model on the hub, the folder in the cache."""
    state = import_module("megatron.bridge.models.hf_pretrained.state")
    source = getattr(getattr(pretrained, "state", None), "source", None)
    if not isinstance(source, state.SafeTensorsStateSource):
        raise _live().Left("its weights are not read from safetensors files")
    return str(source.path)


# -- mcore-bridge (ms-swift) ---------------------------------------------------------------------

_SIZE = re.compile(r"(\d+)(?:GB)?")


def _of_mcore_bridge(given: Arguments) -> Weights:
    live, bridge, models = _live(), given["self"], given["mg_models"]
    for name in ("peft_format", "converter", "save_missing_weights"):  # these change what is written
        if given.get(name):
            raise live.Left(f"{name} was given")
    # For a model that was loaded from a checkpoint, the configuration names the published folder.
    folder = getattr(bridge, "_source_model_dir", None) or bridge.config.hf_config.name_or_path
    if not folder or not os.path.isdir(folder):
        raise live.Left("the folder of the published model is not known")
    if not _SIZE.fullmatch(str(given["max_shard_size"])):
        raise live.Left(f"max_shard_size={given['max_shard_size']!r} was given")
    chunks = list(models) if isinstance(models, list | tuple) else [models]
    return live.Weights(chunks, folder)  # type: ignore[no-any-return]


def _file_size(given: Arguments) -> dict[str, Any]:
    parts = _SIZE.fullmatch(str(given["max_shard_size"]))
    return {"file_bytes": int(parts[1]) * 10**9} if parts is not None else {}
