"""The sinks of an asynchronous save: its bytes go through an arena to the writer process, as a whole or in
waves."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from holdfast._core.background.arena import Arena
from holdfast._core.background.stage import Into, Staged, aligned_bytes, stage_wave, witnessed
from holdfast._core.background.writer_client import WriterClient
from holdfast._core.background.writer_messages import WriteJob
from holdfast._core.background.writer_process import write_job
from holdfast._core.base.deadline import Deadline
from holdfast._core.base.options import Options
from holdfast._core.format.names import DATA, WrittenFile
from holdfast._core.io.file_writer import DISCARDED_WITHIN, About, discard, split_files
from holdfast._core.layout.tensor import OBJECT, Replica
from holdfast._core.plan.save import plan_save
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.saving.job import SaveJob
from holdfast._core.state.memory import BytesMemory
from holdfast._core.store.base import Store, bounded, capabilities
from holdfast._core.store.schemes import environment
from holdfast.errors import HoldfastError

_COPIED = BytesMemory(b"")


class StagedSink:
    """Writes a copy that was complete before the save began. arena: None if the state could not be read, so
    that nothing will be written."""

    def __init__(self, writer: WriterClient, arena: Arena | None, staged: Staged) -> None:
        self._writer, self._arena, self._staged = writer, arena, staged

    def write(self, job: SaveJob, replicas: list[Replica], about: About) -> list[WrittenFile]:
        assert self._arena is not None
        return _write(self._writer, self._arena, job, _order(job, replicas, about, self._arena, self._staged))


class WaveSink:
    """Copies as much as the budget allows, writes it as one file, and repeats. The caller waits for the last
    copy.

    has_staged: called once the last wave is copied. budget: bytes that the copy may take. into: the context
        that copies are made in.
    """

    def __init__(
        self, writer: WriterClient, arena: Arena, has_staged: Callable[[], None], budget: int, into: Into
    ) -> None:
        self._writer, self._arena, self._has_staged = writer, arena, has_staged
        self._budget, self._into = budget, into
        self.copying = False
        """Is a thread copying into the arena now?"""

    def write(self, job: SaveJob, replicas: list[Replica], about: About) -> list[WrittenFile]:
        # A wave is a file: the writer can finish and sync it, and the arena is free for the next one. No
        # column panels, as they are not contiguous.
        table, limit = job.table, min(job.options.max_file_bytes, self._budget)
        options = replace(job.options, columns=(), max_file_bytes=limit)
        plan = plan_save(table, replicas, options)
        job.streams.wait()
        # Digest the witnessed pieces now, because the state may change after the last wave is copied.
        cuts, digests = split_files(plan, options), witnessed(table, plan)
        # In the arena each piece begins at a multiple of 64 bytes, so a wave of small tensors takes more.
        while large := [
            cut for cut in cuts if cut[1] - cut[0] > 1 and aligned_bytes(plan, cut) > self._budget
        ]:
            # Below the size of the smallest such wave, so that each is cut; by an eighth, for few rounds.
            nbytes = min(int(plan.chunks.nbytes[slice(*cut)].sum()) for cut in large)
            options = replace(options, max_file_bytes=nbytes * 7 // 8)
            cuts = split_files(plan, options)
        files: list[WrittenFile] = []
        for part, cut in enumerate(cuts):
            self.copying = True
            staged = stage_wave(table, plan, cut, self._arena, self._into)
            staged.witnessed = digests
            # If this save was cancelled meanwhile, training has continued, and this copy may be of a later
            # state. Then `copying` stays set, so that the arena is not reused.
            job.operation.cancel.check()
            self.copying = False
            if part == len(cuts) - 1:
                forget_copied(table)
                self._has_staged()
            order = _order(job, replicas, about, self._arena, staged, options, part)
            files += _write(self._writer, self._arena, job, order)
        return files


def _order(
    job: SaveJob,
    replicas: list[Replica],
    about: About,
    arena: Arena,
    staged: Staged,
    options: Options | None = None,
    only: int | None = None,
) -> WriteJob:
    """Build the job of the writer process. only: the number of one file to write; None for all."""
    table = job.table
    return WriteJob(
        number=0,
        arena=0,
        size=arena.size,
        store=job.store.url,
        rank=job.rank,
        specs=table.specs,
        boxes=table.boxes,
        replicas=replicas,
        unsharded=table.unsharded,
        deferred=table.deferred,
        base=staged.base,
        witnessed=[(*key, *value) for key, value in staged.witnessed.items()],
        about=json.dumps(about),
        options=options or job.options,
        earlier=job.earlier(),
        only=only,
        tied=table.tied,
        environment=environment() if "://" in job.store.url else None,
    )


def is_written_here(store: Store) -> bool:
    """Return whether this process must write into the store, because the writer process can't open it."""
    return not capabilities(store).reopens


def _write(writer: WriterClient, arena: Arena, job: SaveJob, order: WriteJob) -> list[WrittenFile]:
    """Write files from the arena: in the writer process, or in this thread if that is not possible."""

    def planned(total: int) -> None:
        job.operation.bytes_total = total

    if is_written_here(job.store):
        return write_job(order, arena, job.store, planned, job.operation.progress)
    job.operation.presence.more = lambda: {"doing": writer.describe()}
    try:
        files = writer.write(arena, order, planned, job.operation.progress, job.operation.cancel.check)
        arena.populate()
        return files
    except BaseException:
        writer.kill()  # it may be stuck, and would leave files behind if it went on
        if not job.options.keep_failed:
            _sweep(job.store, json.loads(order.about)["attempt"], job.rank)
        raise
    finally:
        job.operation.presence.more = dict


def forget_copied(table: ShardTable) -> None:
    """Drop references to the copied tensors; objects are kept, to compare them with those of other ranks."""
    table.memory = [
        memory if spec.kind == OBJECT else _COPIED
        for spec, memory in zip(table.specs, table.memory, strict=True)
    ]


def _sweep(store: Store, attempt: str, rank: int) -> None:
    """Delete the files that a killed writer left behind. The deadline of the save may have passed."""
    store = bounded(store, Deadline(DISCARDED_WITHIN))
    with suppress(HoldfastError):
        mine = f"{attempt}-r{rank:05d}"  # followed by the number of a part, or by the suffix
        names = [name for name in store.list(DATA) if name.startswith((f"{mine}-", f"{mine}."))]
        discard(store, [f"{DATA}/{name}" for name in names])
