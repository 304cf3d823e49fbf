"""Megatron-Bridge's functions that load and save published weights, which NeMo RL and verl call, too."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from holdfast._core.protocol.call import Call
from holdfast._frameworks.huggingface.replacing import (
    OUTPUT,
    Arguments,
    Chunks,
    chunks_of,
    export,
    fill,
    output_of_values,
    replacing,
)
from holdfast._frameworks.huggingface.weights import Left, Weights
from holdfast._frameworks.patching import Replacement
from holdfast._frameworks.settings import Settings

_CONVERSION = "megatron.bridge.models.conversion"


def replacements(settings: Settings) -> Iterator[Replacement]:
    """Yield the replacements. All loads go through the first function."""
    name = "MegatronModelBridge.load_weights_hf_to_megatron"
    known = ("self", "hf_pretrained", "megatron_model", "allowed_mismatched_params")
    yield replacing(settings, f"{_CONVERSION}.model_bridge", name, known, _load)
    # every rank writes files in any case, and shows no progress
    known_of_save = (
        *("self", "model", "path", "show_progress", "strict"),
        *("distributed_save", "save_every_n_ranks", "weight_dtype"),
    )
    yield replacing(
        settings, f"{_CONVERSION}.auto_bridge", "AutoBridge.save_hf_weights", known_of_save, _save
    )


def _load(given: Arguments, call: Call) -> object:
    chunks, pretrained = chunks_of(given["megatron_model"]), given["hf_pretrained"]
    fill(_asked_to_load(given, chunks), str(getattr(pretrained, "model_name_or_path", "")), call)
    return chunks


def _asked_to_load(given: Arguments, chunks: Chunks) -> Weights | Left:
    mismatched = given.get("allowed_mismatched_params") or []
    if mismatched not in ([], [OUTPUT]):  # verl gives the latter for a value model
        return Left(f"allowed_mismatched_params={mismatched} was given")
    if hasattr(chunks[0], "hide_teacher_model") or hasattr(chunks[0], "hide_loss_modules"):
        return Left("the model is one that is distilled")
    return _of_pretrained(
        given["self"], given["hf_pretrained"], chunks, output_of_values(chunks) if mismatched else ()
    )


def _save(given: Arguments, call: Call) -> None:
    bridge, chunks = given["self"], chunks_of(given["model"])
    asked = _of_pretrained(bridge, bridge.hf_pretrained, chunks)
    if given.get("weight_dtype") is not None:  # 0.3.1 does not have it
        asked = Left("weight_dtype was given")
    export(asked, given["path"], call, strict=bool(given.get("strict", True)))


def _of_pretrained(
    bridge: Any, pretrained: object, chunks: Chunks, without: tuple[str, ...] = ()
) -> Weights | Left:
    """Return the weights with the folder that a bridge reads; for a model on the hub, that in the cache."""
    if getattr(bridge, "export_weight_dtype", "bf16") == "fp8":  # 0.3.1 does not have it
        return Left("export_weight_dtype is fp8")
    state = import_module("megatron.bridge.models.hf_pretrained.state")
    source = getattr(getattr(pretrained, "state", None), "source", None)
    if not isinstance(source, state.SafeTensorsStateSource):
        return Left("its weights are not read from safetensors files")
    return Weights(chunks, str(source.path), without)
