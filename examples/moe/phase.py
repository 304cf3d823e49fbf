"""One rank of one phase of the demo: train, and tell the driver over a pipe what happened.

This module imports torch; the driver preloads it in the fork server, so that a rank starts in milliseconds.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from examples.moe.train import Hooks, Layout, TrainConfig, Trainer, app_state, train

COLLECTIVE_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Job:
    """What all ranks of a phase are told."""

    name: str
    layout: Layout
    config: TrainConfig
    digest_step: int | None = None  # take digests of everything that the save of this step saves
    digest_end: bool = False  # and of what the last step left
    victim: int | None = None  # this rank kills itself ...
    kill_step: int | None = None  # ... in the middle of writing for the save of this step


class Recorder(Hooks):
    """Sends everything of interest to the driver."""

    def __init__(self, rank: int, job: Job, pipe: Connection) -> None:
        self.rank, self.job, self.pipe = rank, job, pipe
        self.save_began = 0.0
        self._lock = threading.Lock()  # events may come from another thread than the training

    def send(self, kind: str, **fields: Any) -> None:
        with self._lock:
            self.pipe.send({"kind": kind, "rank": self.rank, "at": time.monotonic(), **fields})

    def restored(self, trainer: Trainer) -> None:
        self.send("restored", step=trainer.step)
        self._digest("restored", trainer)

    def step_done(self, step: int, loss: float, probe: float, seconds: float) -> None:
        self.send("step", step=step, loss=loss, probe=probe, seconds=seconds)

    def saving(self, trainer: Trainer) -> None:
        if trainer.step == self.job.digest_step:
            self._digest("saved", trainer)
        self.save_began = time.monotonic()

    def saved(self, report: Any) -> None:
        self.send("saved", step=report.step, seconds=report.seconds, bytes=report.bytes_written)

    def finished(self, trainer: Trainer) -> None:
        if self.job.digest_end:
            self._digest("end", trainer)

    def _digest(self, label: str, trainer: Trainer) -> None:
        digests = logical_digests(app_state(trainer), keep=self.rank == 0)
        if self.rank == 0:
            self.send("digests", label=label, digests=digests)


def run_rank(rank: int, job: Job, port: int, pipe: Connection) -> None:
    """Body of one process. A failed save is an expected outcome: it is reported, and the exit is clean."""
    torch.set_num_threads(1)
    recorder = Recorder(rank, job, pipe)
    recorder.send("started", pid=os.getpid(), host=socket.gethostname())
    try:
        # The driver holds the store, as torchrun's agent does: it outlives every rank.
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=False, timeout=COLLECTIVE_TIMEOUT
        )
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=job.layout.world, timeout=COLLECTIVE_TIMEOUT
        )
        if rank == job.victim:
            _die_while_writing(recorder, job.kill_step)
        _train(job, recorder)
        dist.destroy_process_group()
        recorder.send("done")
    except BaseException:
        recorder.send("crashed", traceback=traceback.format_exc())
        raise


def _train(job: Job, recorder: Recorder) -> None:
    from holdfast.errors import HoldfastError

    try:
        train(job.config, job.layout, recorder)
    except HoldfastError as error:
        recorder.send(
            "failed",
            error=type(error).__name__,
            message=str(error),
            step=error.step,
            phase=error.phase,
            missing=[_fields(info) for info in error.missing],
            seconds=time.monotonic() - recorder.save_began,
        )


def _fields(info: Any) -> dict[str, Any]:
    return {name: getattr(info, name) for name in ("rank", "host", "pid", "phase", "seconds_since_seen")}


def _die_while_writing(recorder: Recorder, step: int | None) -> None:
    """SIGKILL to this very process as soon as half of its bytes of that step are written."""
    import holdfast

    def on_event(event: Any) -> None:
        if event.name != "save.writing" or event.step != step or "bytes_done" not in event.fields:
            return  # the first of a phase says that it begins
        done, total = event.fields["bytes_done"], event.fields["bytes_total"]
        if 2 * done >= total:
            recorder.send("dying", step=step, bytes_done=done, bytes_total=total)
            os.kill(os.getpid(), signal.SIGKILL)

    holdfast.events.subscribe(on_event)


# --- digests ------------------------------------------------------------------------------------------------


def logical_digests(state: Mapping[str, Any], *, keep: bool) -> dict[str, str]:
    """SHA-256 of every whole tensor by name, gathered from all ranks; only a check like this one gathers."""
    digests: dict[str, str] = {}
    for name, tensor in _tensors(state):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            header = f"{whole.dtype} {tuple(whole.shape)} ".encode()
            digests[name] = hashlib.sha256(header + whole.contiguous().numpy().tobytes()).hexdigest()
    return digests


def _tensors(value: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield prefix, value
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from _tensors(child, f"{prefix}.{key}" if prefix else str(key))
