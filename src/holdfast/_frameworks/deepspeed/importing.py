"""Import of a DeepSpeed ZeRO checkpoint into Holdfast's format."""

from __future__ import annotations

import os

import torch

from holdfast._core.base.options import Options
from holdfast._core.base.reporting import Meter, quiet
from holdfast._core.base.values import ReportProgress
from holdfast._core.layout.box import whole
from holdfast._core.layout.tensor import CODE_OF, TensorSpec
from holdfast._core.protocol.call import begin_call
from holdfast._core.protocol.job import Job
from holdfast._core.saving.job import SaveReport
from holdfast._core.state.flatten import flatten
from holdfast._core.state.memory import Part
from holdfast._core.store.local import open_store
from holdfast._frameworks.deepspeed.checkpoint import ZeroCheckpoint, open_zero
from holdfast._frameworks.deepspeed.elements import Elements
from holdfast._models.conversion.importing import FileMemory, run_import

_KEPT = ("lr_scheduler", "data_sampler", "random_ltd", "global_steps", "global_samples", "skipped_steps")
"""DeepSpeed's state of a run beside model and optimizer, imported under the same names."""
_LEFT = (
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "universal_checkpoint_info",
    "ds_config",
    "ds_version",
)
"""DeepSpeed's own entries that describe its files. All other entries are from `client_state`."""


def import_zero(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    step: int | None = None,
    fingerprint: bool = False,
    progress: ReportProgress = quiet,
) -> SaveReport:
    """Convert a checkpoint of DeepSpeed's ZeRO 1, 2 or 3, or a universal one, to a Holdfast one.

    source: the folder with its `_states.pt` files, or the one with `latest`. Their CRCs are checked first.
    out: a folder that does not exist, is empty, or in which the same import was interrupted.
    step: None: DeepSpeed's `global_steps`. fingerprint: as in `Options`.
    Raises BadInput, CorruptCheckpoint (with the file), StorageError.
    """
    with open_zero(open_store(source)) as checkpoint:
        checkpoint.check()
        steps = checkpoint.common.get("global_steps")
        return run_import(
            checkpoint.store,
            open_store(out),
            begin_call(Job(no_dist=True)),
            lambda: iter(flatten(_state(checkpoint, Meter(progress)), 0).leaves),
            identity=f"zero {checkpoint.stage} {checkpoint.ranks} {steps}",
            step=steps if step is None and type(steps) is int and steps >= 0 else step,
            options=Options(fingerprint=fingerprint),
            imported="zero",
        )


def _state(checkpoint: ZeroCheckpoint, meter: Meter) -> dict[str, object]:
    """Return the state in the form of torch's `get_state_dict`, as a program would save it."""

    def part(name: str, value: Elements | torch.Tensor | float) -> object:
        if not isinstance(value, Elements):
            # torch's optimizers count in tensors, DeepSpeed's own in numbers.
            return value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        spec = TensorSpec(name, CODE_OF[value.dtype], value.shape)
        box = whole(value.shape)
        return Part(spec, box, FileMemory(spec, box, value.read_into, 0, meter))

    common = checkpoint.common
    kept = {key: common[key] for key in _KEPT if common.get(key) is not None}
    client = {key: value for key, value in common.items() if key not in (*_KEPT, *_LEFT)}
    return {
        "model": checkpoint.extra
        | {name: part(f"model.{name}", value) for name, value in checkpoint.model.items()},
        "optim": {
            "state": {
                name: {key: part(f"optim.state.{name}.{key}", value) for key, value in state.items()}
                for name, state in checkpoint.states.items()
                if state
            },
            "param_groups": checkpoint.groups,
        },
        **checkpoint.plain(kept),
        **({"client_state": checkpoint.plain(client, "client_state.")} if client else {}),
        **({"loss_scaler": checkpoint.loss_scaler} if checkpoint.loss_scaler else {}),
    }
