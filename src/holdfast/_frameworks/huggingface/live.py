"""Loading published weights into a framework's live model and exporting them, without a collective.

`fill` reads a folder into the weights that a rank holds. `export` saves the weights, and exports the saved
checkpoint. In both, ranks first agree whether to leave the call to the framework's own function: ranks with
different decisions would wait for each other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from holdfast._core.base.threads import within
from holdfast._core.base.values import Json
from holdfast._core.io.old_steps import remove_step
from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import counted, listed
from holdfast._core.protocol.call import Call
from holdfast._core.protocol.operation import agree, read_state
from holdfast._core.store.local import open_local, open_store
from holdfast._frameworks.huggingface.weights import Left, Weights
from holdfast._frameworks.megatron import mcore
from holdfast._frameworks.megatron.checkpointing import load_state
from holdfast._frameworks.megatron.saving import own_containers, read_state_dict
from holdfast._models.huggingface.export import FILE_BYTES, run_export
from holdfast._models.huggingface.importing import published_folder
from holdfast._models.huggingface.published_tensors import config_of, view_to_export
from holdfast._models.views.family import OUTPUT, View
from holdfast._models.views.published_model import quantization_of
from holdfast.errors import (
    BadInput,
    CoverageError,
    HoldfastError,
    LoadFailed,
    MissingTensors,
    ShapeMismatch,
)

log = logging.getLogger("holdfast")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NOT_OURS = (BadInput, MissingTensors, ShapeMismatch, CoverageError)
"""Errors for a model or folder that does not match the tables. All ranks raise the same one."""


class LiveWeights(Weights):
    """Weights, described as megatron-core and Hugging Face do."""

    def describe(self) -> mcore.StateDict:
        """Return the sharded state dict of the weights alone, by chunk."""
        metadata = {
            "dp_cp_group": mcore.parallel_state.get_data_parallel_group(with_context_parallel=True),
            "singleton_local_shards": False,
        }
        modules: list[Any] = self.modules()  # models of megatron-core
        return {
            f"model{number}": {
                name: value
                for name, value in module.sharded_state_dict(metadata=metadata).items()
                # Transformer Engine adds `_extra_state`; published models do not have it.
                if "_extra_state" not in name and name not in self.without
            }
            for number, module in enumerate(modules)
        }

    @cached_property
    def view(self) -> View:
        """The published model that is loaded."""
        return published_folder(open_store(self.folder)).view


def fill(asked: Weights | Left, place: str, call: Call) -> None:
    """Read the published folder into the model; each rank reads the weights that it holds.

    asked: Left if this rank already knows that Holdfast does not support the load.
    place: the name of the load, the same on all ranks even if their paths of the folder differ.

    Raises Left on all ranks if the framework's function must do it, otherwise the errors of
    `holdfast.megatron.load`.
    """
    with _left_if_not_ours():
        weights = _agree(asked, place, call, to_load=True)
        # In place, except for fused tensors, which megatron-core's factories put together.
        loaded = load_state(
            open_store(weights.folder),
            weights.describe(),
            mcore.StrictHandling.ASSUME_OK_UNEXPECTED,
            call,
            left_out=frozenset({OUTPUT} if weights.without else ()),
            # Many models are trained without any of these layers; other weights must all be there.
            may_be_left=lambda name: weights.view.predicts_further(name) or weights.view.is_unused(name),
            left_together=weights.view.is_predictor,
        )
    for number, module in enumerate(weights.modules()):
        kept = module.load_state_dict(loaded[f"model{number}"], strict=False).missing_keys
        lost = [name for name in kept if "_extra_state" not in name and name not in weights.without]
        if lost:
            raise LoadFailed(
                f"{len(lost)} weights of the model on rank {call.rank} are not in its sharded state dict, "
                f"and were not loaded from {weights.folder}: {listed(lost)}.",
                rank=call.rank,
                hint="install(huggingface=False) leaves such loads to the framework.",
            )


def export(
    asked: Weights | Left, out: str, call: Call, *, file_bytes: int = FILE_BYTES, strict: bool = True
) -> None:
    """Export a live model as published weights to `out`, and replace the weights that are there.

    The weights are first saved once beside `out`, in a folder that is removed at the end. The framework
    writes configuration and tokenizer.

    asked: Left if this rank already knows that Holdfast does not support the export.
    file_bytes: the maximum number of bytes of weights in a file.
    strict: raise an error for weights of the published model that the live one does not have, except for
        layers for multi-token prediction. Otherwise a warning lists the missing weights.

    Raises Left on all ranks if the framework's function must do it, otherwise the errors of a save and an
    export.
    """
    target = Path(out).absolute()
    between = target.parent / f".{target.name}.weights"
    with _left_if_not_ours():
        weights = _agree(asked, str(target), call, to_load=False)
        try:
            read_state_dict(open_store(between), weights.describe(), call).run()
            report = run_export(
                open_store(between),
                open_local(weights.folder, "An export"),
                open_local(target, "An export"),
                call,
                file_bytes=file_bytes,
                strict=strict,
                in_framework=True,
            )
        finally:
            # The export ends only after all ranks have read what they need.
            if call.rank == call.participants[0]:
                with suppress(HoldfastError):
                    remove_step(open_store(between.parent), between.name)
    if report.missing and call.rank == call.participants[0]:
        log.warning(
            "%s holds no %d tensors of the published model: %s.",
            report.path,
            len(report.missing),
            counted(report.missing),
        )


@contextmanager
def _left_if_not_ours() -> Iterator[None]:
    try:
        yield
    except _NOT_OURS as error:
        raise Left(str(error)) from error


def _agree(asked: Weights | Left, place: str, call: Call, to_load: bool) -> LiveWeights:
    """Return the weights; raise Left on all ranks if the call is unsupported on one of them."""
    if isinstance(asked, Left):
        why, folder = str(asked), ""
    else:
        weights, folder = LiveWeights(asked.chunks, asked.folder, asked.without), asked.folder
        why = str(read_state(lambda: _check(weights, place, call, to_load), call.rank) or "")

    def choose(reports: dict[int, Json]) -> str:
        for rank, (reason, _) in reports.items():
            if reason:
                return f"{reason} (rank {rank})"
        folders = sorted({path for _, path in reports.values()})
        return f"ranks find the model in different folders: {listed(folders)}" if len(folders) > 1 else ""

    title = f"choice of who {'loads' if to_load else 'exports to'} {place}"
    chosen = agree(title, f"{place}|{to_load}", choose, call, [why, folder])
    if isinstance(asked, Left) or chosen:
        raise Left(str(chosen))
    return weights


def _check(weights: LiveWeights, place: str, call: Call, to_load: bool) -> None:
    """Raise an error if this rank's model is unsupported: it is not megatron-core's, or has quantized
    weights, or the published model lacks some of them, or has them in another shape."""
    for module in weights.modules():
        if not callable(getattr(module, "sharded_state_dict", None)):
            raise BadInput(f"{type(module).__name__} has no sharded_state_dict()")
        for name, value in module.named_parameters():
            # A subclass of Tensor may hold 8-bit values, or only a part of the elements.
            if type(value.data) is not torch.Tensor or value.dtype not in _FLOATS:
                raise BadInput(f"{name!r} is {value.dtype} in a {type(value.data).__name__}")
    # The protocol bounds everything after it; before it, `within` bounds the time for storage. The model is
    # described on this thread, because its current device is the model's.
    views: list[View] = []
    within(
        call.deadline.left(),
        f"looking for {place}",
        lambda: views.append(weights.view if to_load else _exported_view(weights.folder)),
    )
    view, state = views[0], own_containers(weights.describe())
    mcore.apply_factories(state)
    tensors = [value for value in mcore.nested_values(state) if isinstance(value, mcore.ShardedTensor)]
    unknown = sorted({value.key for value in tensors if not view.knows(value.key)})
    if unknown:
        raise BadInput(
            f"the family {view.family.name!r} has no place for {len(unknown)} weights: {counted(unknown)}"
        )
    for value in tensors:
        box = Box(tuple(value.global_offset), (*(1,) * value.prepend_axis_num, *value.local_shape))
        for _ in view.segments(value.key, tuple(value.global_shape), box):
            pass


def _exported_view(folder: str) -> View:
    base = open_local(folder, "An export")
    published_folder(base)
    if quantization_of(config_of(base)) is not None:
        raise BadInput(f"{base.url} holds a quantized model")
    return view_to_export(base)
