"""The writer process: hashes and writes what a trainer has copied into shared memory. It imports no torch.

It runs the same writer as a synchronous save. It ends with its trainer: the socket between them closes when
either process ends, for whatever reason. Unfinished files belong to no checkpoint, as no index lists them.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable

from holdfast._core.background.arena import Arena, ArenaMemory
from holdfast._core.background.writer_messages import (
    Attach,
    Done,
    Failed,
    Moved,
    Planned,
    ToWriter,
    Wire,
    WriteJob,
)
from holdfast._core.base.values import told
from holdfast._core.format.names import WrittenFile
from holdfast._core.io.file_writer import WriteRequest, write_files
from holdfast._core.layout.tensor import DTYPES
from holdfast._core.plan.save import plan_save
from holdfast._core.plan.shard_table import Memory, ShardTable
from holdfast._core.store.base import Store
from holdfast._core.store.local import open_store
from holdfast._core.store.schemes import set_environment
from holdfast.errors import HoldfastError

TELL_EVERY = 0.05
"""Seconds between two progress messages."""
YIELDS = 10
"""Niceness: if cores are scarce, training has priority, and so have copies of other ranks."""


class _Process:
    def __init__(self, sock: socket.socket) -> None:
        self.wire = Wire[ToWriter](sock, ToWriter)
        self.arenas: dict[int, Arena] = {}
        self.jobs: queue.SimpleQueue[WriteJob] = queue.SimpleQueue()

    def listen(self) -> None:
        """Receive jobs until the trainer has ended."""
        # On a separate thread, so that a closed socket is detected during a long write.
        try:
            while True:
                message, fd = self.wire.receive()
                match message:
                    case Attach(arena) if fd is not None:
                        self.arenas[arena] = Arena(fd)
                    case WriteJob():
                        self.jobs.put(message)
        finally:
            os._exit(0)  # also in the middle of a write: its result is no longer needed

    def work(self) -> None:
        while True:
            job = self.jobs.get()
            try:
                self.wire.send(Done(job.number, self._write(job)))
            except HoldfastError as error:
                self.wire.send(Failed(job.number, error.to_message()))
            # Reported, so that the trainer raises it on all ranks: if this process ended instead, the trainer
            # would see only an exit code.
            except Exception as error:
                failure = HoldfastError(f"The writer process met {told(error)}", rank=job.rank)
                self.wire.send(Failed(job.number, failure.to_message()))

    def _write(self, job: WriteJob) -> list[WrittenFile]:
        last_sent, moved = time.monotonic(), 0

        def progress(nbytes: int) -> None:
            nonlocal last_sent, moved
            moved += nbytes
            if time.monotonic() >= last_sent + TELL_EVERY:
                self.wire.send(Moved(job.number, moved))
                last_sent, moved = time.monotonic(), 0

        if job.environment is not None:
            set_environment(job.environment)
        arena = self.arenas[job.arena]
        arena.reserve(job.size)  # maps it again if the trainer has grown it since
        files = write_job(
            job,
            arena,
            open_store(job.store),
            lambda total: self.wire.send(Planned(job.number, total)),
            progress,
        )
        if moved:
            self.wire.send(Moved(job.number, moved))
        return files


def write_job(
    job: WriteJob, arena: Arena, store: Store, planned: Callable[[int], None], progress: Callable[[int], None]
) -> list[WrittenFile]:
    """Plan and write a job; `planned` is called with its number of bytes."""
    memory: list[Memory] = [
        ArenaMemory(arena.address + base, box.shape, DTYPES[spec.dtype].size)
        for spec, box, base in zip(job.specs, job.boxes, job.base, strict=True)
    ]
    table = ShardTable(
        job.rank, job.specs, job.boxes, list(job.replicas), job.unsharded, memory, job.deferred, job.tied
    )
    plan = plan_save(table, job.replicas, job.options)
    planned(int(plan.chunks.nbytes.sum()))
    witnessed = {(row, offset): (block, value) for row, offset, block, value in job.witnessed}
    about = json.loads(job.about)
    return write_files(
        WriteRequest(store, table, plan, about, job.options, progress, witnessed, job.only, job.earlier)
    )


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    os.nice(YIELDS)
    process = _Process(socket.socket(fileno=fd))
    threading.Thread(target=process.listen, name="holdfast-listen", daemon=True).start()
    process.work()
