"""A DeepSpeed ZeRO checkpoint as tensors by parameter name, for any stage and number of ranks.

ZeRO 1 and 2 concatenate the parameters of a group into one flat tensor, pad it, and split it into parts of
equal length, one for each rank. ZeRO 3 splits each parameter that way, and concatenates a rank's parts. So
the file and position of an element can be computed; a file is opened at the first read of one of its
elements. In a universal checkpoint each parameter has its own files.

Source: DeepSpeed 0.19.8, runtime/engine.py (`_save_checkpoint`, `_save_zero_checkpoint`), `state_dict` of
runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py and runtime/bf16_optimizer.py, utils/zero_to_fp32.py,
checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from threading import Lock
from typing import Any, TypeAlias, TypeVar

import torch

from holdfast._core.format.pickle_reader import PickledObject
from holdfast._core.io.small_files import read_file
from holdfast._core.layout.tensor import Dims
from holdfast._core.store.base import Store
from holdfast._frameworks.deepspeed.elements import ElementPlace, Elements, NotPlain, plain
from holdfast._frameworks.deepspeed.torch_file import TorchFile, TorchFileTensor
from holdfast.errors import BadInput, CorruptCheckpoint

log = logging.getLogger("holdfast")
LATEST = "latest"
"""The file in a folder of checkpoints that names the newest one."""
MODEL, OPTIMIZER = "_model_states.pt", "_optim_states.pt"
WHOLE = f"mp_rank_00{MODEL}"
"""The file of the model below ZeRO 3."""
OF_RANK = "zero_pp_rank_{}_mp_rank_00"
_PARTS = "single_partition_of_fp32_groups"
_WEIGHTS = {1: _PARTS, 2: _PARTS, 3: "fp32_flat_groups"}
"""By stage, the key of a rank's parts of the weights."""
_SOME = 4 << 20
"""Bytes that the values of a file may take in memory beyond its size."""
Content: TypeAlias = dict[str, Any]
"""A part of a file of DeepSpeed's, by its keys."""
State = dict[str, Elements | torch.Tensor | float]
"""The optimizer's state of one parameter: its moments, and numbers such as `step`."""
_Kind = TypeVar("_Kind")


class _Unexpected(Exception):
    """A file has content that DeepSpeed does not write. The message describes it."""


class ZeroCheckpoint:
    """An open ZeRO checkpoint; close it at the end.

    ranks, stage: the number of ranks and the stage of the save. common: the unmodified content of the model's
    file. optimizer: rank 0's unmodified state of DeepSpeed's optimizer. shapes: for each flat tensor, the
    shapes of the trained parameters by name. model, states: all weights, and the optimizer's states, by name.
    groups: hyperparameters, and names of parameters under `params`. extra: entries of the module's state dict
    other than tensors.
    """

    def __init__(self, store: Store) -> None:
        """store: the folder of one checkpoint, or its parent with a `latest` file.

        Raises BadInput if it is no supported checkpoint, CorruptCheckpoint for a file that is missing or
        damaged.
        """
        newest = read_file(store, LATEST, 4096) or read_file(store, f"{LATEST}_universal", 4096)
        # A child can't be outside of its store.
        self.store = store.child(newest.decode("utf-8", "replace").strip()) if newest else store
        self._files, self._lock = dict[str, TorchFile](), Lock()
        try:
            with self._known():
                self._open(frozenset(self.store.list()))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def check(self) -> None:
        """Read all files of the checkpoint; raise CorruptCheckpoint if the CRC of one does not match."""
        names = {name for rank in range(self.ranks) for name in self._files_of(rank)}
        for name in sorted(names | self._files.keys()):
            self._file(name).check()

    def plain(self, values: Content, where: str = "") -> Content:
        """Return the values that consist of tensors, numbers and text; log a warning about others."""
        made = {}
        for key, value in values.items():
            try:
                made[key] = plain(value, self._room)
            except (NotPlain, RecursionError) as error:
                log.warning("%s: '%s%s' is left out: it is %s.", self.store.url, where, key, error)
        return made

    @property
    def loss_scaler(self) -> Content:
        """The numeric attributes of the loss scaler."""
        state = getattr(self.optimizer.get("loss_scaler"), "state", None)
        numbers = state.items() if type(state) is dict else ()
        return {key: value for key, value in numbers if type(value) in (bool, int, float)}

    # -- files ------------------------------------------------------------------------------------

    def _open(self, names: frozenset[str]) -> None:
        self._is_whole, self._is_universal = WHOLE in names, "zero/" in names
        if not any(name.endswith((MODEL, OPTIMIZER)) for name in names):
            raise BadInput(f"{self.store.url} holds no checkpoint of DeepSpeed: there is no {WHOLE}.")
        model = WHOLE if self._is_whole else OF_RANK.format(0) + MODEL
        if model not in names:
            raise CorruptCheckpoint(f"{self.store.url} has no {model}, which rank 0 has written.")
        self.model_file = f"{self.store.url}/{model}"
        self.common = _as(dict, self._file(model).value)
        self._room = [self._file(model).reader.size + _SOME]
        self._refuse_others(names)
        self.ranks = _as(int, self.common.get("dp_world_size"))
        if not self.ranks:
            raise _Unexpected("it says that no rank has written it")
        self._prefix = "bf16_" if f"bf16_{OF_RANK.format(0)}{OPTIMIZER}" in names else ""
        for rank in range(self.ranks):
            for name in self._files_of(rank):
                if name not in names:
                    raise CorruptCheckpoint(
                        f"{self.store.url} has no {name}, which rank {rank} of {self.ranks} has written.",
                        hint="Each host writes the files of its ranks: copy them all into one folder.",
                        details={"file": name, "ranks": [rank]},
                    )
        self.optimizer = self._optimizer(0)
        self.stage = _stage(self.optimizer.get("zero_stage", 1))  # BF16_Optimizer has none, and is stage 1
        self.shapes = _shapes(_as(list, self.common.get("param_shapes")))
        self.model, self.states = dict[str, Elements](), dict[str, State]()
        self._collect()
        self.groups = self._groups()

    def _file(self, name: str) -> TorchFile:
        with self._lock:  # a save reads with several threads
            if name not in self._files:
                self._files[name] = TorchFile(self.store, name)
            return self._files[name]

    def _files_of(self, rank: int) -> list[str]:
        model = [] if self._is_whole else [OF_RANK.format(rank) + MODEL]
        return model if self._is_universal else [*model, self._prefix + OF_RANK.format(rank) + OPTIMIZER]

    def _optimizer(self, rank: int) -> Content:
        if self._is_universal:
            return _as(dict, self._file("zero/optimizer_state.pt").value)
        file = self._file(self._prefix + OF_RANK.format(rank) + OPTIMIZER)
        return _as(dict, _as(dict, file.value).get("optimizer_state_dict"))

    def _refuse_others(self, names: frozenset[str]) -> None:
        parallel = _as(dict, self.common.get("checkpoint_parallel_dimensions") or {})
        degree = max(_as(int, size) for size in (self.common.get("mp_world_size"), *parallel.values()))
        reasons = {
            "experts in files of their own": any("expert_" in name for name in names),
            "DeepSpeed's expert parallelism": bool(self.common.get("ds_autoep_layers")),
            f"tensor or pipeline parallelism of degree {degree}": degree > 1,
            "a pipeline's layers in files of their own": self.common.get("module") is None,
            "no optimizer of ZeRO": self.common.get("param_shapes") is None,
        }
        for reason in (reason for reason, is_so in reasons.items() if is_so):
            raise BadInput(f"{self.store.url} has {reason}, which Holdfast does not read of DeepSpeed.")

    @contextmanager
    def _known(self) -> Iterator[None]:
        try:
            yield
        except (_Unexpected, IndexError, OverflowError) as error:
            raise CorruptCheckpoint(
                f"{self.store.url} is no ZeRO checkpoint that Holdfast knows: {error}."
            ) from None

    # -- tensors ----------------------------------------------------------------------------------

    def _collect(self) -> None:
        for number, shapes in enumerate(self.shapes):
            if self._is_universal:
                for name, shape in shapes.items():
                    self._add_universal(name, shape)
            else:
                self._add_group(number, shapes)
        module = _as(dict, self.common["module"])
        tied = _as(dict, self.common.get("shared_params") or {})
        if (
            not self._is_whole
        ):  # ZeRO 3 cuts parameters that are not trained, too, and has them beside the module
            fragments = _as(dict, self.common.get("frozen_param_fragments") or {})
            for name, shape in _shapes([self.common.get("frozen_param_shapes") or {}])[0].items():
                find = partial(self._frozen, name)
                place = self._cut(0, math.prod(shape), _as(TorchFileTensor, fragments.get(name)).numel, name)
                self.model[name] = Elements(fragments[name].dtype, shape, find, place)
        tensors = {name: value for name, value in module.items() if isinstance(value, TorchFileTensor)}
        for name in tensors.keys() - self.model.keys() - tied.keys():
            self.model[name] = Elements.of(tensors[name], tensors[name].shape)
        # Both names, as in the state dict of the module.
        self.model |= {
            name: self.model[first] for name, first in tied.items() if _as(str, first) in self.model
        }
        self.extra = self.plain({name: module[name] for name in module if name not in tensors}, "module.")

    def _add_group(self, number: int, shapes: Mapping[str, Dims]) -> None:
        flat, start = self._flat(number, None, 0), 0
        length = flat.numel
        if self.stage < 3 and "zero_stage" in self.optimizer:  # BF16_Optimizer does not strip the padding
            length += _as(int, _as(list, self.optimizer.get("group_paddings"))[number])
        padding = self.optimizer.get("param_alignment_paddings")
        padding = _as(list, _as(list, padding)[number]) if padding else [0] * len(shapes)
        if len(padding) != len(shapes):
            raise _Unexpected(f"it has {len(padding)} paddings of {len(shapes)} parameters")
        state = self._base_state(0, number)
        for (name, shape), more in zip(shapes.items(), padding, strict=True):
            numel = math.prod(shape)
            if self.stage == 3:
                place = self._cut(start, numel, length, name)
                start += math.ceil(numel / self.ranks)
            else:
                self._require(start + numel <= length * self.ranks, name)
                place = partial(_in_flat, start, max(length, 1), numel)
                start += numel + _as(int, more)
            self.model[name] = Elements(flat.dtype, shape, partial(self._flat, number, None), place)
            mine = self.states[name] = {}
            for key, value in state.items():
                if isinstance(value, TorchFileTensor) and value.shape in ((length,), (flat.numel,)):
                    mine[key] = Elements(value.dtype, shape, partial(self._flat, number, key), place)
                else:
                    self._add_number(mine, name, key, value)

    def _add_universal(self, name: str, shape: Dims) -> None:
        state = self.states[name] = {}
        files = [file for file in self.store.list(f"zero/{name}") if file.endswith(".pt")]
        if "step.pt" not in files and self.stage == 3:  # its conversion leaves the step where it was
            self._add_number(state, name, "step", self._base_state(0, 0).get("step"))
        for file in files:
            value, key = self._file(f"zero/{name}/{file}").value, file.removesuffix(".pt")
            value = value.get("param") if type(value) is dict else value
            if isinstance(value, TorchFileTensor) and value.numel == math.prod(shape) and key != "step":
                state[key] = Elements.of(value, shape)
            else:
                self._add_number(state, name, key, value)
        self.model[name] = _as(Elements, state.pop("fp32", None))

    def _add_number(self, state: State, name: str, key: str, value: object) -> None:
        if isinstance(value, TorchFileTensor) and value.numel == 1:
            state[key] = Elements.of(value, ()).whole()
        elif isinstance(value, int | float):
            state[key] = value
        elif value is not None:
            raise BadInput(
                f"{self.store.url} has a state {key!r} of {name!r} that is neither cut like the parameter "
                "nor a number."
            )

    def _cut(self, start: int, numel: int, length: int, name: str) -> Callable[[int], ElementPlace]:
        """Return a function that finds the elements of a parameter split by ZeRO 3. start: position of its
        part in each rank's flat tensor. length: length of that tensor."""
        part = max(math.ceil(numel / self.ranks), 1)
        self._require(numel == 0 or start + part <= length, name)
        return lambda index: ElementPlace(index // part, start + index % part, part - index % part)

    def _require(self, there: bool, name: str) -> None:
        if not there:
            raise CorruptCheckpoint(f"{self.store.url} has fewer elements of {name!r} than its shape says.")

    def _flat(self, group: int, key: str | None, rank: int) -> TorchFileTensor:
        """Return a rank's part of a flat group: of the weights, or of a state."""
        with self._known():
            if key is not None:
                return _as(TorchFileTensor, self._base_state(rank, group).get(key))
            return _as(TorchFileTensor, _as(list, self._optimizer(rank).get(_WEIGHTS[self.stage]))[group])

    def _frozen(self, name: str, rank: int) -> TorchFileTensor:
        with self._known():
            file = _as(dict, self._file(OF_RANK.format(rank) + MODEL).value)
            return _as(TorchFileTensor, _as(dict, file.get("frozen_param_fragments")).get(name))

    def _base_state(self, rank: int, group: int) -> Content:
        return _as(dict, _as(dict, self._base(rank).get("state") or {}).get(group) or {})

    def _base(self, rank: int) -> Content:
        """Return the state of torch's own optimizer."""
        key = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        base = self._optimizer(rank).get(key) or {}
        if type(base) is list:
            raise BadInput(
                f"{self.store.url} was saved with elastic_checkpoint, which Holdfast does not read.",
                hint="DeepSpeed itself loads it on any number of ranks: save it again without that.",
            )
        return _as(dict, base)

    def _groups(self) -> list[Content]:
        groups, taken = [], set[int]()
        for group in _as(list, self._base(0).get("param_groups") or self.optimizer.get("param_groups") or []):
            hyper = {key: group[key] for key in _as(dict, group) if key not in ("params", "param_names")}
            flats = [_as(int, flat) for flat in _as(list, group.get("params"))]
            if len(taken | {*flats}) < len(taken) + len(flats):
                raise _Unexpected("two of its parameter groups have one flat tensor")
            taken |= {*flats}
            names = [name for flat in flats for name in self.shapes[flat]]
            groups.append({**self.plain(hyper, "param_groups."), "params": names})
        return groups


def _in_flat(start: int, length: int, numel: int, index: int) -> ElementPlace:
    """Return the place of an element of a parameter. start: the parameter's position in the flat tensor.
    length: length of the parts into which that is split."""
    rank, at = divmod(start + index, length)
    return ElementPlace(rank, at, min(length - at, numel - index))


def _as(kind: type[_Kind], value: object) -> _Kind:
    """Return the value if it is of this type, and not negative; raise _Unexpected otherwise."""
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise _Unexpected(f"it has a {type(value).__name__} where a {kind.__name__} is expected")
    return value


def _shapes(groups: list[object]) -> list[dict[str, Dims]]:
    made, taken = list[dict[str, Dims]](), set[str]()
    for group in groups:
        shapes = {
            _as(str, name): tuple(_as(int, n) for n in _as(tuple, shape))
            for name, shape in _as(dict, group).items()
        }
        # A small file can name one large group many times.
        if not taken.isdisjoint(shapes):
            raise _Unexpected(f"it has {min(taken & shapes.keys())!r} in two flat tensors")
        taken |= shapes.keys()
        made.append(shapes)
    return made


def _stage(stage: object) -> int:
    stage = stage.args[0] if isinstance(stage, PickledObject) and stage.args else stage
    if stage not in (1, 2, 3):
        raise _Unexpected(f"its stage is {stage!r}")
    return _as(int, stage)


def open_zero(store: Store) -> closing[ZeroCheckpoint]:
    """Open a ZeRO checkpoint, to be closed at the end of the block."""
    return closing(ZeroCheckpoint(store))
