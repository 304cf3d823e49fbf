"""Replaces the functions of frameworks that load and save published weights.

The originals load or save by collectives that every rank must enter; the replacements read and write through
Holdfast (`live`). Models without a table, and features that Holdfast lacks (adapters, 8 bits), are left to
the original, with a warning.

This module imports neither a framework nor megatron-core; `fill` and `export` import `live`, and with it
megatron-core, when they are called.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import ModuleType
from typing import Any, TypedDict, Unpack

import torch

from holdfast._core.protocol.call import Call, begin_call
from holdfast._frameworks.huggingface.weights import Left, Weights, unwrapped
from holdfast._frameworks.patching import MakeReplacement, Replacement
from holdfast._frameworks.settings import Settings

log = logging.getLogger("holdfast")
OUTPUT = "output_layer.weight"
Arguments = Mapping[str, Any]
"""The arguments of one call of a framework's function, by name, with defaults."""


def replacing(
    settings: Settings,
    module: str,
    name: str,
    known: tuple[str, ...],
    do: Callable[[Arguments, Call], object],
) -> Replacement:
    """Return the replacement of a framework's function: it calls `do` with the arguments, and the original if
    that raises Left.

    known: the arguments that `do` uses or can ignore. If any other argument differs from its default, the
        call is left to the framework.
    """
    return Replacement(module, name, "huggingface", _made(settings, known, do), takes=lambda: known)


def _made(
    settings: Settings, known: tuple[str, ...], do: Callable[[Arguments, Call], object]
) -> MakeReplacement:

    def make(original: Callable[..., object]) -> Callable[..., object]:
        signature = inspect.signature(original)

        @wraps(original)
        def call(*args: object, **named: object) -> object:
            if not _has_groups():
                return original(*args, **named)
            bound = signature.bind(*args, **named)
            bound.apply_defaults()
            begun = begin_call(settings.of_a_call())  # made here: groups may be made long after install()
            try:
                for key, value in bound.arguments.items():
                    if key not in known and value is not signature.parameters[key].default:
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


Chunks = Sequence[torch.nn.Module]
"""The parts of a model on this rank."""


class HowToExport(TypedDict, total=False):
    """Arguments of `live.export`."""

    file_bytes: int
    strict: bool


def chunks_of(model: Any) -> Chunks:
    """Return a model as a list of its chunks, which most frameworks already pass."""
    return model if isinstance(model, list | tuple) else [model]


def output_of_values(chunks: Chunks) -> tuple[str, ...]:
    """Return the output layer's name if it has one row (a value model); stock code does not load it."""
    weights = [dict(unwrapped(chunk).named_parameters()) for chunk in chunks]
    return (OUTPUT,) if any(OUTPUT in own and own[OUTPUT].shape[0] == 1 for own in weights) else ()


def fill(asked: Weights | Left, place: str, call: Call) -> None:
    """Read the published folder into the model (`live.fill`)."""
    _live().fill(asked, place, call)


def export(asked: Weights | Left, out: str, call: Call, **how: Unpack[HowToExport]) -> None:
    """Export a live model as published weights (`live.export`)."""
    _live().export(asked, out, call, **how)


def _live() -> ModuleType:
    from holdfast._frameworks.huggingface import live

    return live
