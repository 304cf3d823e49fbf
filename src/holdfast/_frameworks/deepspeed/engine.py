"""`DeepSpeedEngine.load_checkpoint` on another number of ranks, or in another ZeRO stage.

DeepSpeed refuses it, because each rank reads only the file of its own rank number. Here, for such a
checkpoint, the engine's file reader returns to each rank the content that it would have saved itself: its
parts, read from the files that have the elements, in the order and padding of the live engine. DeepSpeed's
own code does the rest. This module does not import DeepSpeed.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import wraps
from typing import Any, TypeAlias

import torch

from holdfast._core.io.small_files import read_file
from holdfast._core.layout.tensor import CODE_OF
from holdfast._core.state.memory import torch_dtype
from holdfast._core.store.base import Store
from holdfast._core.store.local import open_store
from holdfast._frameworks.deepspeed.checkpoint import (
    LATEST,
    MODEL,
    OF_RANK,
    OPTIMIZER,
    WHOLE,
    Content,
    ZeroCheckpoint,
    open_zero,
)
from holdfast._frameworks.deepspeed.elements import Elements
from holdfast._frameworks.deepspeed.torch_file import TorchFileTensor
from holdfast._frameworks.folders import refuse_url
from holdfast._frameworks.patching import Replacement
from holdfast._frameworks.settings import Settings
from holdfast.errors import BadInput, MissingTensors

log = logging.getLogger("holdfast")
Engine: TypeAlias = Any
"""A DeepSpeedEngine."""
_OWN = ("module", "frozen_param_fragments")
"""The entries of the model's file that differ between ranks."""
_FLATS = (
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat_partition",
    "single_partition_of_fp32_groups",
)
"""Attributes with a rank's parts of the weights in ZeRO 3, in BF16_Optimizer, and in ZeRO 1 and 2."""


def replacements(settings: Settings) -> Iterator[Replacement]:
    """Yield the replacement of the engine's load, and of its saves, which are given no URL."""

    def make(original: Callable[..., object]) -> Callable[..., object]:
        @wraps(original)
        def load_checkpoint(
            self: Engine,
            load_dir: str | os.PathLike[str],
            tag: str | None = None,
            *args: object,
            **named: object,
        ) -> object:
            refuse_url(load_dir, "DeepSpeedEngine.load_checkpoint")
            with _repartitioned(self, load_dir, tag):
                return original(self, load_dir, tag, *args, **named)

        return load_checkpoint

    place = "deepspeed.runtime.engine"
    yield Replacement(place, "DeepSpeedEngine.load_checkpoint", "checkpoints", make)
    for name in ("save_checkpoint", "save_16bit_model"):
        yield Replacement(place, f"DeepSpeedEngine.{name}", "checkpoints", _to_paths)


def _to_paths(original: Callable[..., object]) -> Callable[..., object]:
    """Make a save of the engine that refuses URLs."""

    @wraps(original)
    def save(self: Engine, save_dir: str | os.PathLike[str], *args: object, **named: object) -> object:
        refuse_url(save_dir, f"DeepSpeedEngine.{original.__name__}")
        return original(self, save_dir, *args, **named)

    return save


@contextmanager
def _repartitioned(engine: Engine, load_dir: str | os.PathLike[str], tag: str | None) -> Iterator[None]:
    """Within the block, let the engine read a checkpoint of another number of ranks or stage as its own."""
    store = open_store(load_dir)
    newest = read_file(store, LATEST, 4096) if tag is None else str(tag).encode()
    if newest is None or not _is_of_others(engine, store := store.child(newest.decode().strip())):
        yield
        return
    with open_zero(store) as checkpoint:
        ranks = checkpoint.ranks, engine.seq_dp_world_size
        log.info("%s: ZeRO %d of %d ranks is loaded on %d.", store.url, checkpoint.stage, *ranks)
        own = engine.checkpoint_engine
        engine.checkpoint_engine = _Reader(engine, checkpoint, own)
        # DeepSpeed would look for the file of this rank in the folder, which may not exist.
        engine._get_all_ckpt_names = lambda *_: [checkpoint.model_file]
        try:
            yield
        finally:
            engine.checkpoint_engine = own
            del engine._get_all_ckpt_names


def _is_of_others(engine: Engine, store: Store) -> bool:
    """Return whether a checkpoint is from another number of ranks or another stage, and of a kind that
    DeepSpeed loads only with the same ones."""
    others = (
        engine.load_universal_checkpoint() or engine.zero_elastic_checkpoint() or engine.mp_world_size > 1
    )
    files = {name.removeprefix("bf16_") for name in store.list() if name.endswith(OPTIMIZER)}
    if not engine.zero_optimization() or others or not files:
        return False
    ours = {OF_RANK.format(rank) + OPTIMIZER for rank in range(engine.seq_dp_world_size)}
    model = OF_RANK.format(0) + MODEL if engine.zero_optimization_partition_weights() else WHOLE
    return ours != files or store.stat(model) is None


class _Reader:
    """Replaces the engine's checkpoint engine: returns this rank's states in the live engine's layout."""

    def __init__(self, engine: Engine, checkpoint: ZeroCheckpoint, own: object) -> None:
        self._engine, self._checkpoint, self._own = engine, checkpoint, own
        self._optimizer = engine.optimizer
        self._rank = torch.distributed.get_rank(group=self._optimizer.dp_process_group)
        self._is_cut = engine.zero_optimization_partition_weights()

    def __getattr__(self, name: str) -> object:
        return getattr(self._own, name)

    def load(self, path: str, map_location: object = None) -> Content:
        return self._model_state() if path.endswith(MODEL) else {"optimizer_state_dict": self._zero_state()}

    # -- the model, and what belongs to no rank ------------------------------------------------------

    def _model_state(self) -> Content:
        common = self._checkpoint.common
        state = self._checkpoint.plain({key: common[key] for key in common if key not in _OWN})
        live = self._engine.module.state_dict()
        state["module"] = self._checkpoint.extra | {
            name: self._weight(name, live.get(name)) for name in self._checkpoint.model
        }
        state["dp_world_size"] = self._engine.seq_dp_world_size
        state["frozen_param_fragments"] = self._frozen() if self._is_cut else None
        return state

    def _weight(self, name: str, live: torch.Tensor | None) -> torch.Tensor:
        # ZeRO 3 has empty placeholders for parameters, also in the module's state.
        if live is not None and not live.numel():
            return torch.empty(live.shape, dtype=live.dtype)
        stored = self._checkpoint.common["module"].get(name)
        # Prefer the file's tensor, which is in the module's own dtype.
        has = isinstance(stored, TorchFileTensor) and stored.numel > 0
        made = (Elements.of(stored, stored.shape) if has else self._checkpoint.model[name]).whole()
        return made if live is None else made.to(live.dtype)

    def _frozen(self) -> dict[str, torch.Tensor] | None:
        cut = self._engine._get_zero_frozen_param_attributes(lambda parameter: parameter.ds_tensor)
        if any(name not in self._checkpoint.model for name in cut):
            return None  # saved without them; they stay as they are
        return {
            name: self._checkpoint.model[name].read(
                part.numel() * self._rank, torch.zeros(part.shape, dtype=part.dtype)
            )
            for name, part in cut.items()
        }

    # -- the optimizer ---------------------------------------------------------------------------------

    def _zero_state(self) -> Content:
        shapes = self._engine._get_zero_param_shapes()
        self._compare(shapes)
        state = self._checkpoint.plain(
            {
                key: value
                for key, value in self._checkpoint.optimizer.items()
                if key in ("overflow", "dynamic_loss_scale", "clip_grad")
            }
        )
        state["ds_version"] = self._checkpoint.common.get("ds_version")
        optimizer, base = (
            self._optimizer,
            {"state": self._states(shapes), "param_groups": self._groups(shapes)},
        )
        weights = [self._flat(number, group, self._checkpoint.model) for number, group in enumerate(shapes)]
        state["loss_scaler"] = self._scaler()
        if self._is_cut:
            return {**state, "optimizer_state_dict": base, "fp32_flat_groups": weights}
        state["group_paddings"] = [0] * len(weights)  # these parts keep their padding
        state["param_alignment_paddings"] = getattr(optimizer, "round_robin_bit16_padding", None)
        return {**state, "base_optimizer_state": base, "single_partition_of_fp32_groups": weights}

    def _compare(self, shapes: list[Mapping[str, torch.Size]]) -> None:
        """Raise MissingTensors if the checkpoint lacks weights of the engine's optimizer."""
        for name, shape in (item for group in shapes for item in group.items()):
            there = self._checkpoint.model.get(name)
            if there is None or tuple(there.shape) != tuple(shape):
                what = "is not there" if there is None else f"has the shape {list(there.shape)}"
                raise MissingTensors(
                    f"{name!r} of shape {list(shape)} {what} in {self._checkpoint.store.url}.",
                    rank=self._engine.global_rank,
                )

    def _groups(self, shapes: list[Mapping[str, torch.Size]]) -> list[Content]:
        """Return the hyperparameters of each group, with the engine's numbers of its flat tensors.

        Raises BadInput if the checkpoint has no group of the same parameters.
        """
        # Below ZeRO 3, each group has one flat tensor.
        of_flat = getattr(self._optimizer, "sub_group_to_group_id", None) or dict(
            enumerate(range(len(shapes)))
        )
        groups = []
        for index in range(len(self._optimizer.optimizer.param_groups)):
            flats = [number for number, group in of_flat.items() if group == index]
            names = {name for number in flats for name in shapes[number]}
            theirs = [group for group in self._checkpoint.groups if {*group["params"]} == names]
            if not theirs:
                raise BadInput(
                    f"No parameter group in {self._checkpoint.store.url} has just the parameters of group "
                    f"{index} of this optimizer, among them {min(names, default='')!r}.",
                    hint="Group the parameters as they were, or call "
                    "load_checkpoint(load_optimizer_states=False).",
                    rank=self._engine.global_rank,
                )
            groups.append({**theirs[0], "params": flats})
        return groups

    def _states(self, shapes: list[Mapping[str, torch.Size]]) -> dict[int, dict[str, object]]:
        states: dict[int, dict[str, object]] = {}
        for number, group in enumerate(shapes):
            mine = {name: self._checkpoint.states.get(name, {}) for name in group}
            made = states[number] = dict[str, object]()
            for key, value in next(iter(mine.values()), {}).items():
                if isinstance(value, Elements):
                    made[key] = self._flat(number, group, {name: state[key] for name, state in mine.items()})
                else:
                    made[key] = copy(value)
        return {number: made for number, made in states.items() if made}

    def _flat(self, number: int, group: Mapping[str, torch.Size], source: Mapping[str, Any]) -> torch.Tensor:
        """Return this rank's part of a flat tensor, in the engine's length, with zeros as padding."""
        flats = next(getattr(self._optimizer, name) for name in _FLATS if hasattr(self._optimizer, name))
        dtype = torch_dtype(CODE_OF[source[next(iter(group))].dtype])
        made, position = torch.zeros(flats[number].numel(), dtype=dtype), 0
        padding = getattr(self._optimizer, "round_robin_bit16_padding", None)
        first = self._rank * made.numel()
        for index, (name, shape) in enumerate(group.items()):
            numel = math.prod(shape)
            if self._is_cut:
                part = math.ceil(numel / self._engine.seq_dp_world_size)
                source[name].read(part * self._rank, made[position : position + part])
                position += part
                continue
            begin, end = max(position, first), min(position + numel, first + made.numel())
            if begin < end:
                source[name].read(begin - position, made[begin - first : end - first])
            position += numel + (padding[number][index] if padding else 0)
        return made

    def _scaler(self) -> object:
        """Return a copy of the engine's loss scaler, with the numbers of the stored one."""
        scaler = copy(getattr(self._optimizer, "loss_scaler", None))
        for key, value in self._checkpoint.loss_scaler.items():
            if type(getattr(scaler, key, None)) in (bool, int, float):
                setattr(scaler, key, value)
        return scaler
