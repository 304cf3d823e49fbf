"""A job of eight real ranks that records its events; run by `ProcessWorld`."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import holdfast
from holdfast import events
from tests.watch.fault_jobs import compute

LATE = 3
"""The rank that comes late."""
TIMEOUT = 12.0


def recorded(rank: int, folder: str) -> None:
    """Save, hang for a while in a collective, save with a late rank, and load."""
    os.environ["HOLDFAST_EVENTS"] = folder
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT), group_desc="train")
    job = holdfast.Job(timeout=60, report_after=1.0)
    holdfast.install("torch-dcp", guard=False, job=job)
    try:
        state = {"w": holdfast.Shard(torch.ones(1 << 20), (8 << 20,), (rank << 20,)), "step": 1}
        with holdfast.Checkpoints(folder, asynchronous=False, job=job) as run:
            with events.phase("train"):
                run.save(1, state)
                # A rank that never showed itself can't be looked at by others.
                time.sleep(1.5)
            with events.phase("eval"):
                if rank == LATE:
                    with events.phase("compute metrics"):
                        compute(0.85 * TIMEOUT)
                dist.all_reduce(torch.ones(4), group=group)
            if rank == LATE:
                time.sleep(4)
            run.save(2, state)
            run.restore(state)
    finally:
        holdfast.uninstall()
