"""Replacements for Megatron-FSDP's functions that describe uneven tensors, and for the functions that call
these. They import `uneven` when they are called."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module

from holdfast._frameworks.arguments import by_name, names_of
from holdfast._frameworks.guard import is_guarded
from holdfast._frameworks.patching import MakeReplacement, Replacement

Function = Callable[..., object]
_SPLITS = "megatron.core.transformer.fsdp_dtensor_checkpoint"
_UNEVEN = ("megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor", "megatron_fsdp.uneven_dtensor")
_PREPARE = (
    ("megatron.bridge.training.checkpointing", "preprocess_fsdp_dtensor_state_dict"),
    ("megatron.training.checkpointing", "preprocess_fsdp_dtensor_state_dict"),
    ("swift.megatron.utils.megatron_fsdp_checkpoint", "_preprocess_state_dict"),
)
"""Functions with the arguments (configuration, state, model)."""
_here = threading.local()


def replacements() -> Iterator[Replacement]:
    for name in ("handle_swiglu_in_state_dict", "handle_gdn_in_state_dict"):
        yield Replacement(_SPLITS, name, "checkpoints", _split(name), optional=True)
    for module in _UNEVEN:
        name = "preprocess_state_dict_for_uneven_dtensor"
        yield Replacement(module, name, "checkpoints", _uneven, optional=True)
    for module, name in _PREPARE:
        yield Replacement(module, name, "checkpoints", _with_model, optional=True)


def _split(name: str) -> MakeReplacement:
    """Make Megatron-FSDP's function that splits fused parameters: ours, without a collective.

    A parameter that never got a gradient has no optimizer state on some ranks; with stock code, ranks then
    issue different collectives. Here such ranks add zeros, which is the value of that state.
    """

    def make(original: Function) -> Function:
        @wraps(original)
        def call(
            model: object,
            model_state_dict: object,
            optimizer_state_dict: object = None,
            *args: object,
            **named: object,
        ) -> object:
            fsdp = import_module("holdfast._frameworks.megatron_fsdp.uneven")
            if isinstance(optimizer_state_dict, dict) and "state" in optimizer_state_dict:
                # Before the split, so that the added state is split, too.
                fsdp.fill_missing_states(model, optimizer_state_dict)
            return getattr(fsdp, name)(model, model_state_dict, optimizer_state_dict, *args, **named)

        return call

    return make


def _uneven(original: Function) -> Function:
    """Make the function that sets chunk metadata: Holdfast's, with the model's parameters, in a save or load
    by Holdfast; stock's elsewhere, because torch DCP needs its metadata."""

    @wraps(original)
    def preprocess_state_dict_for_uneven_dtensor(
        state_dict: object, *args: object, **named: object
    ) -> object:
        model = getattr(_here, "model", None)
        if model is None or not is_guarded():
            return original(state_dict, *args, **named)
        fsdp = import_module("holdfast._frameworks.megatron_fsdp.uneven")
        return fsdp.preprocess_state_dict_for_uneven_dtensor(state_dict, model)

    return preprocess_state_dict_for_uneven_dtensor


def _with_model(original: Function) -> Function:
    """Make the function that prepares an fsdp_dtensor state, and remember its model for `_uneven`, which
    stock code calls without the model."""

    @wraps(original)
    def prepare(*args: object, **named: object) -> object:
        # Each framework has other names for the first two arguments.
        given = by_name(original, names_of(original), args, named)
        outer, _here.model = getattr(_here, "model", None), given["model"]
        try:
            return original(*args, **named)
        finally:
            _here.model = outer

    return prepare
