"""Fingerprints of the parameters of an inference engine, under the names of the published model.

Each worker sums the boxes of published tensors that its parameters consist of (`views.forms`). The result
keeps the sums of each box with the ranks that hold it, so that a comparison can tell which rank differs. The
engine itself is not imported: what its modules say of themselves is read from their attributes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

import msgspec
import torch
from torch import nn

from holdfast._core.base.values import Message
from holdfast._core.layout.tensor import CODE_OF, FLOATS, TensorSpec, counted
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.protocol.call import begin_call
from holdfast._core.protocol.job import Job
from holdfast._core.protocol.operation import read_state
from holdfast._core.ready import ready
from holdfast._core.state.memory import TensorMemory, spec_of
from holdfast._models.equality.fingerprints import SumsTask
from holdfast._models.equality.parts import EngineFingerprint, PartSums
from holdfast._models.views.family import language_model
from holdfast._models.views.forms import ZERO, EngineForms, Layer, Misfit, Modules, forms_of, modules
from holdfast._models.views.reordered import as_published
from holdfast._models.views.sizes import sizes_of
from holdfast.errors import BadInput

_STATE = "vllm.distributed.parallel_state"
_NUMBERS = (
    *("head_size", "v_head_size", "num_heads", "num_kv_heads"),
    *("total_num_heads", "total_num_kv_heads", "num_kv_head_replicas"),
)
"""Attributes of modules that forms need."""
_COPY = (1, 2)
"""Declares a shard of zeros (`forms.ZERO`): another rank has the elements."""


def engine_fingerprint(
    model: nn.Module,
    *,
    config: Mapping[str, object] | None = None,
    tp: tuple[int, int] | None = None,
    job: Job | None = None,
) -> dict[str, EngineFingerprint]:
    """Compute the fingerprints of the weights in a vLLM model, under the names of the published model.

    All workers of the engine call it, each with its own model, and get the same result, in any layout over
    tensor, expert and pipeline parallel ranks. It issues no collective and gathers no weights.
    `holdfast.same` compares the result with the trainer's fingerprints, a checkpoint or a published folder,
    and says which ranks hold the elements that differ.

    Call it after the weights were loaded, and before vLLM's `process_weights_after_loading`: where that
    changes a parameter, BadInput is raised.

    model: the worker's model. config: the content of the model's `config.json`; None: `model.config`.
    tp: this worker's tensor parallel rank and their number; None: ask vLLM, which must be imported then.
    job: who takes part, and deadlines (`holdfast.Job`).

    Raises BadInput for models that no table describes, for parameters that no table names, and for those that
    are not as vLLM's loader fills them; ReplicaMismatch if ranks hold different shapes or dtypes of one
    tensor; CoverageError if no rank holds some part of a tensor; RankFailed and DeadlineExceeded for failures
    of other ranks.
    """
    call = begin_call(job)
    task = _EngineTask("fingerprint of the engine", "memory:engine", call)

    def read() -> None:
        task.take(_ParameterReader(model, config, tp).table(call.rank))

    task.collect_error = read_state(read, call.rank)
    return msgspec.convert(task.run(), ready(dict[str, EngineFingerprint]))


class _EngineTask(SumsTask):
    def finish(self, reports: dict[int, Message]) -> Message:
        whole = PartSums()
        for rank, rows in self.rows_of(reports):
            whole.add(rank, rows)
        answer: Message = msgspec.to_builtins(whole.result())
        return answer


class _ParameterReader:
    """Reads the parameters of one worker's model."""

    def __init__(
        self, model: nn.Module, config: Mapping[str, object] | None, tp: tuple[int, int] | None
    ) -> None:
        self._model, self._tp = model, tp
        if config is not None and not isinstance(config, Mapping):
            raise BadInput(
                f"config= is of type {type(config).__name__}.",
                hint="Give the content of the model's config.json as a dict.",
            )
        outer = config or _config_of(model)
        inner = language_model(outer)
        self._sizes = sizes_of(inner, "The configuration")
        self._forms: EngineForms = forms_of(outer, inner)
        self._modules: Modules = modules()

    def table(self, rank: int) -> ShardTable:
        table, unnamed = ShardTable(rank), []
        for name, tensor, module in self._tensors():
            found = self._forms.find(name)
            if found is None:
                unnamed.append(name)
                continue
            self._check(name, tensor, module)
            form, names = found
            try:
                segments = form(names, tuple(tensor.shape), self._layer(name, module))
            except (Misfit, KeyError, IndexError):
                raise self._misfit(name, tensor, module) from None
            for segment in segments:
                part = segment.theirs(segment.box)
                view = as_published(tensor.detach()[segment.box.slices()], segment.axes, len(segment.whole))
                spec: TensorSpec = spec_of(segment.name, view, segment.whole)
                replica = _COPY if segment.change == ZERO else None
                table.add(spec, part, replica, False, TensorMemory(view))
        if unnamed:
            raise BadInput(
                f"{len(unnamed)} parameters of the engine's model are in no table: {counted(unnamed)}.",
                hint="Nothing can be said of them. docs/engine.md shows how to add them.",
                details={"parameters": unnamed[:100]},
            )
        table.check()
        return table

    def _tensors(self) -> Iterable[tuple[str, torch.Tensor, nn.Module]]:
        """Yield parameters, and those buffers that have a form: others are no weights."""
        modules = dict(self._model.named_modules())
        for name, parameter in self._model.named_parameters():
            yield name, parameter, modules[name.rpartition(".")[0]]
        for name, buffer in self._model.named_buffers():
            if self._forms.find(name) is not None:
                yield name, buffer, modules[name.rpartition(".")[0]]

    def _check(self, name: str, tensor: torch.Tensor, module: nn.Module) -> None:
        """Raise BadInput if a parameter is not as the loader fills it."""
        said, method = self._modules, getattr(module, "quant_method", None)
        kind = type(method).__name__
        if method is not None and kind not in said.unquantized:
            raise BadInput(
                f"The engine holds {name!r} by {kind}, and Holdfast knows parameters of "
                f"{', '.join(said.unquantized)} only.",
                hint="Compare an engine without quantization.",
                details={"tensor": name},
            )
        backend = getattr(getattr(method, "unquantized_backend", None), "name", "")
        is_set_up = getattr(method, "moe_kernel", None) is not None and backend not in said.as_loaded
        changed = any(hasattr(module, attribute) for attribute in said.processed)
        if is_set_up or changed or CODE_OF.get(str(tensor.dtype)[6:]) not in FLOATS or not tensor.numel():
            raise self._misfit(name, tensor, module)

    def _misfit(self, name: str, tensor: torch.Tensor, module: nn.Module) -> BadInput:
        method = getattr(module, "quant_method", None)
        backend = getattr(getattr(method, "unquantized_backend", None), "name", "")
        by = f"the backend {backend}" if backend else type(method or module).__name__
        return BadInput(
            f"{name!r}, of shape {list(tensor.shape)}, is not as vLLM's loader fills it, or {by} may have "
            "changed it since: what it holds can't be told.",
            hint="Take the fingerprints after load_weights and before process_weights_after_loading.",
            details={"tensor": name, "by": by},
        )

    def _layer(self, name: str, module: nn.Module) -> Layer:
        numbers = dict(self._sizes)
        for attribute in _NUMBERS:
            if isinstance(value := getattr(module, attribute, None), int):
                numbers[attribute] = value
        parallel = getattr(getattr(module, "moe_config", None), "moe_parallel_config", None)
        if parallel is not None and parallel.enable_eplb:
            raise BadInput(
                f"The experts in {name!r} are moved between ranks while the engine runs (enable_eplb), so "
                "which ones they are can't be told.",
                hint="Compare an engine without it.",
            )
        shared = parallel if parallel is not None else module
        rank, size = getattr(shared, "tp_rank", None), getattr(shared, "tp_size", None)
        if not isinstance(rank, int) or not isinstance(size, int):
            rank, size = self._place()
        indices = getattr(module, "shard_indices", None)
        return Layer(
            rank,
            size,
            numbers,
            tuple(getattr(module, "output_sizes", ())),
            (0, 0, 0)
            if indices is None
            else (
                indices.org_vocab_start_index,
                indices.org_vocab_end_index,
                int(getattr(module, "org_vocab_size", 0)),
            ),
            _experts_of(module),
            int(getattr(module, "global_num_experts", 0)),
        )

    def _place(self) -> tuple[int, int]:
        """Return this worker's tensor parallel rank, and their number."""
        if self._tp is None:
            state = sys.modules.get(_STATE)
            if state is None:
                raise BadInput(
                    "vLLM is not imported here, so the tensor parallel rank is not known.",
                    hint="Call this in each worker, or give tp=(rank, size).",
                )
            rank = state.get_tensor_model_parallel_rank()
            self._tp = rank, state.get_tensor_model_parallel_world_size()
        return self._tp


def _experts_of(module: nn.Module) -> tuple[int, ...]:
    """Return the experts in a module, in its order. Raises Misfit if it does not tell."""
    many = getattr(module, "local_num_experts", 0)
    places = getattr(module, "_expert_map", None)
    if places is None:
        if many != getattr(module, "global_num_experts", many):
            raise Misfit  # which of them are here is not told
        return tuple(range(many))
    slots = {slot: expert for expert, slot in enumerate(places.tolist()) if slot >= 0}
    return tuple(slots[slot] for slot in sorted(slots))


def _config_of(model: nn.Module) -> dict[str, object]:
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if to_dict is None:
        raise BadInput(
            f"A {type(model).__name__} has no config that says which model it is.",
            hint="Give config=, the content of its config.json.",
        )
    values: dict[str, object] = to_dict()
    return values
