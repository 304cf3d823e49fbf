"""mbridge's functions that load and save published weights."""

from __future__ import annotations

import os
from collections.abc import Iterator

from holdfast._core.protocol.call import Call
from holdfast._frameworks.huggingface.replacing import Arguments, export, fill, output_of_values, replacing
from holdfast._frameworks.huggingface.weights import Left, Weights
from holdfast._frameworks.patching import Replacement
from holdfast._frameworks.settings import Settings


def replacements(settings: Settings) -> Iterator[Replacement]:
    # memory_efficient: ours holds one tensor at a time in any case
    known = ("self", "models", "weights_path", "memory_efficient")
    for name, do in (("load_weights", _load), ("save_weights", _save)):
        yield replacing(settings, "mbridge.core.bridge", f"Bridge.{name}", known, do)


def _load(given: Arguments, call: Call) -> None:
    bridge, chunks, path = given["self"], given["models"], given["weights_path"]
    # mbridge finds the folder in the hub's cache itself.
    folder = path if os.path.isdir(path) else bridge._get_actual_hf_path(path)
    # As stock does: a later save takes file names from it.
    bridge.safetensor_io = bridge._get_safetensor_io(folder)
    fill(Weights(chunks, folder, output_of_values(chunks)), str(path), call)


def _save(given: Arguments, call: Call) -> None:
    bridge, out = given["self"], given["weights_path"]
    loaded = bridge.safetensor_io
    none = Left("no weights were loaded through this bridge")
    export(none if loaded is None else Weights(given["models"], loaded.hf_dir), out, call)
    if call.rank == call.participants[0]:
        bridge.hf_config.save_pretrained(out)
