"""mcore-bridge's function that saves published weights, which ms-swift calls. Its load is not replaced: it
does not wait for other ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from holdfast._core.protocol.call import Call
from holdfast._frameworks.huggingface.replacing import Arguments, chunks_of, export, replacing
from holdfast._frameworks.huggingface.weights import Left, Weights
from holdfast._frameworks.patching import Replacement
from holdfast._frameworks.settings import Settings


def replacements(settings: Settings) -> Iterator[Replacement]:
    known = (
        *("self", "mg_models", "output_dir", "peft_format", "adapter_name", "converter", "max_shard_size"),
        "save_missing_weights",
    )  # adapter_name: only with peft_format
    yield replacing(settings, "mcore_bridge.bridge.gpt_bridge", "GPTBridge.save_weights", known, _save)


def _save(given: Arguments, call: Call) -> None:
    bridge, size = given["self"], re.fullmatch(r"(\d+)(?:GB)?", str(given["max_shard_size"]))
    # For a model that was loaded from a checkpoint, the configuration names the published folder.
    folder = bridge._source_model_dir or bridge.config.hf_config.name_or_path
    asked: Weights | Left = Weights(chunks_of(given["mg_models"]), folder)
    if not folder or not os.path.isdir(folder):
        asked = Left("the folder of the published model is not known")
    for name in ("peft_format", "converter", "save_missing_weights"):  # these change what is written
        if given.get(name):
            asked = Left(f"{name} was given")
    if size is None:
        asked = Left(f"max_shard_size={given['max_shard_size']!r} was given")
    file_bytes = int(size[1]) * 10**9 if size is not None else 1
    export(asked, given["output_dir"], call, file_bytes=file_bytes)
