"""Export of a checkpoint's weights to a folder that transformers loads.

Every published tensor is assembled from boxes of the checkpoint's tensors, one slab at a time. A file gets
its final name once it is complete, and the weights' index is written last. So transformers does not take the
folder of a killed export for a model, and a rerun keeps the files that are complete.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch

from holdfast.errors import BadInput, HoldfastError
from holdfast.format import hugging_face as hf
from holdfast.format.container import encode_header
from holdfast.format.digest import digest, hex_digest
from holdfast.format.index import Index
from holdfast.integrations.huggingface.carried import carry, refuse_changed
from holdfast.integrations.huggingface.published_tensors import (
    PublishedTensor,
    missing_tensors,
    published_tensors,
    share_among_files,
)
from holdfast.integrations.reporting import Progress, quiet
from holdfast.io.hugging_face import read_config
from holdfast.io.index_file import open_index
from holdfast.layout.box import Box
from holdfast.layout.tensor import DTYPES, TensorSpec
from holdfast.loading.boxes import fill_rows
from holdfast.plan.shard_table import ShardTable
from holdfast.protocol.call import Call, begin_call
from holdfast.protocol.operation import read_state
from holdfast.protocol.task import CollectiveTask
from holdfast.roster.base import Roster
from holdfast.state.memory import ShiftedMemory, TensorMemory, torch_dtype
from holdfast.state.reordered import as_ours
from holdfast.store.base import Store, replace_file, storage_errors
from holdfast.store.local import LocalStore, open_store
from holdfast.values import Message
from holdfast.views.family import View, view_of
from holdfast.views.mapping import MINUS_ONE, Segment

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SLAB = 64 << 20
"""Bytes of weights that are assembled at a time."""
_ALIGN = 16
FILE_BYTES = 5_000_000_000
"""The most bytes of weights in a file, as transformers shards them."""
_PARTIAL = re.compile(r"\.model[^/]*\.safetensors\.[0-9a-f]{8}\.partial")
_MODEL = re.compile(r"model.*\.safetensors")
"""Names of files with a model's weights; an adapter's begin otherwise."""


class ExportReport(msgspec.Struct, frozen=True):
    """The result of an export."""

    path: str
    step: int | None
    tensors: int
    bytes_written: int
    """Bytes of weights that this call wrote; files that an earlier one had finished are not counted."""
    files: int
    missing: tuple[str, ...] = ()
    """Tensors of the folder `like` that the checkpoint does not have (strict=False)."""


def export_huggingface(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str],
    dtype: str | None = None,
    file_bytes: int = FILE_BYTES,
    strict: bool = True,
    progress: Progress | None = None,
    participants: Iterable[int] | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    timeout: float = 7200.0,
    stall_timeout: float = 120.0,
    roster: Roster | None = None,
) -> ExportReport:
    """Export the weights of a Holdfast checkpoint of megatron-core's to a folder that transformers loads.

    In a job all participants call it. Each writes some of the files completely; there is no collective.

    source: a committed checkpoint; optimizer state in it is not read.
    out: a new folder, or one in which an export of the same checkpoint was interrupted.
    like: the folder of the published model, whose configuration, tokenizer and code are copied. If it holds
        weights, the exported names and shapes must be the same.
    dtype: of floating-point weights, such as "bfloat16"; None: as they are stored.
    file_bytes: the most bytes of weights in a file.
    strict: raise an error for tensors of `like` that the checkpoint does not have; otherwise they are left
        out and reported.
    progress: called with the bytes that this rank has done, and the bytes of all its files.
    participants: ranks of the default process group that take part, ascending or not; default all. Other
        ranks must not call.
    process_group: the same, as a group of torch.distributed.
    no_dist: this process exports alone, whether or not torch.distributed is initialised.
    timeout: seconds from this call until it fails, even if it makes progress.
    stall_timeout: seconds that a rank may go without any progress before it is given up.
    roster: a coordination store to use in place of torch.distributed's.

    Raises BadInput for arguments, an unknown family and unknown weights, MissingTensors and CoverageError for
    missing tensors or parts of them, NotCommitted and CorruptCheckpoint for the checkpoint, StorageError, and
    RankFailed and DeadlineExceeded for other ranks.
    """
    if file_bytes < 1:
        raise BadInput(f"file_bytes must be at least 1, not {file_bytes}.")
    call = begin_call(
        roster,
        no_dist=no_dist,
        participants=participants,
        process_group=process_group,
        timeout=timeout,
        stall_timeout=stall_timeout,
    )
    return ExportRequest(
        store=open_store(source),
        base=open_store(like),
        out=open_store(out),
        call=call,
        dtype=dtype,
        file_bytes=file_bytes,
        strict=strict,
        progress=progress or quiet,
    ).run()


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """The arguments of an export on this rank; the first fields are those of `export_huggingface`.

    in_framework: write only weights, and replace other weights in the folder. The framework writes
        configuration and tokenizer, and layers for multi-token prediction may be missing.
    """

    store: Store
    base: LocalStore
    out: LocalStore
    call: Call
    dtype: str | None = None
    file_bytes: int = FILE_BYTES
    strict: bool = True
    progress: Progress = quiet
    in_framework: bool = False

    def run(self) -> ExportReport:
        """Run the export. Raises the same error on all ranks."""
        export = _Export(self)

        def plan() -> None:
            with open_index(self.store) as index:
                view = view_of_published(self.base)
                tensors = published_tensors(index, view, self.base, self.dtype)
                layers = view.sizes["num_hidden_layers"] if self.in_framework else None
                missing = missing_tensors(tensors, self.base, self.strict, layers)
                export.plan(index, share_among_files(tensors, self.file_bytes), missing)

        export.trouble = read_state(plan, self.call.rank)
        export.run()
        return export.report()


def view_of_published(base: LocalStore) -> View:
    """Map a published folder to megatron-core's names and shapes, by its configuration alone."""
    config = read_config(base)
    if config is None:
        raise BadInput(f"{base.url} has no {hf.CONFIG}.", hint="like= is the folder of the published model.")
    # inner=False: the configuration of a multimodal model describes more than its language model.
    return view_of(config, f"{base.url}/{hf.CONFIG}", inner=False)


class _Export(CollectiveTask):
    """The files of one export; each rank writes some of them."""

    kind = "export"

    def __init__(self, request: ExportRequest) -> None:
        super().__init__(f"export to {request.out.url}", request.out.url, request.call)
        self.store, self.base, self.out = request.store, request.base, request.out
        self.trouble: HoldfastError | None = None
        """The error of planning; all ranks raise it."""
        self._call, self._progress = request.call, request.progress
        self._in_framework = request.in_framework
        self._files: list[tuple[str, list[PublishedTensor]]] = []
        self._missing: tuple[str, ...] = ()
        self._done = self._total = self._written = 0
        self._slab = torch.empty(0, dtype=torch.uint8)

    def plan(self, index: Index, files: list[tuple[str, list[PublishedTensor]]], missing: list[str]) -> None:
        """Set the files of all ranks; this rank writes its share of them."""
        self._files, self._missing = files, tuple(missing)
        self._identity = index.identity
        step = index.about.get("step")
        self._step = step if isinstance(step, int) else None
        self._total = sum(tensor.nbytes for _, tensors in self._mine() for tensor in tensors)
        with storage_errors("Making", self.out.url):
            os.makedirs(self.out.url, exist_ok=True)
        if not self._in_framework:
            self._refuse_others()

    def report(self) -> ExportReport:
        """Return the report of a finished export."""
        tensors = sum(len(part) for _, part in self._files)
        return ExportReport(self.out.url, self._step, tensors, self._written, len(self._files), self._missing)

    # -- called by the protocol ---------------------------------------------------------------------

    def contribute(self) -> Message:
        if self.trouble is not None:
            raise self.trouble
        return {"identity": self._identity, "files": [name for name, _ in self._files]}

    def decide(self, contributions: dict[int, Message]) -> dict[int, Message]:
        first, mine = next(iter(contributions.items()))
        for rank, other in contributions.items():
            if other != mine:
                raise BadInput(
                    f"Rank {rank} exports another checkpoint, or into other files, than rank {first}.",
                    rank=rank,
                    hint="Give the same arguments on all ranks, and no checkpoint that is being replaced.",
                )
        # After all ranks have contributed, and before any of them writes.
        if self._in_framework:
            self._remove_others()
        return {rank: {} for rank in contributions}

    def execute(self, answer: Message) -> Message:
        with open_index(self.store) as self._index:
            if self._index.identity != self._identity:
                raise BadInput(f"{self.store.url} was replaced while it was exported.", hint="Export again.")
            for name, tensors in self._mine():
                self._write(name, tensors)
        return {}

    def finish(self, reports: dict[int, Message]) -> Message:
        """Complete the model once all files are written; the weights' index comes last."""
        for name, tensors in self._files:
            if not self._is_finished(name, tensors):
                raise BadInput(f"{self.out.url}/{name} was changed or removed by somebody else meanwhile.")
        for name in self.out.list():
            if _PARTIAL.fullmatch(name):
                self.out.delete(name)
        if not self._in_framework:
            # Weights are written without quantization, so the configuration must not describe one.
            carry(self.base, self.out, without="quantization_config")
        if len(self._files) > 1:  # a single file needs no index
            where = {tensor.name: name for name, tensors in self._files for tensor in tensors}
            total = sum(tensor.nbytes for _, tensors in self._files for tensor in tensors)
            value = {"metadata": {"total_size": total}, "weight_map": where}
            replace_file(
                self.out, hf.WEIGHTS_INDEX, msgspec.json.format(msgspec.json.encode(value), indent=2)
            )
        return {}

    # -- this rank's share ------------------------------------------------------------------------

    def _mine(self) -> list[tuple[str, list[PublishedTensor]]]:
        ranks = self._call.participants
        return self._files[ranks.index(self._call.rank) :: len(ranks)]

    def _refuse_others(self) -> None:
        """Raise BadInput if the folder holds another model, or a finished export."""
        files = dict(self._files)
        names = self.out.list()
        for name in hf.weights_files(names):
            if name not in files or not self._is_finished(name, files[name]):
                raise BadInput(
                    f"{self.out.url} holds {name}, which is not of this export.",
                    hint="Export into a new folder, or the one of an export that was interrupted.",
                )
        if not self._in_framework:
            refuse_changed(self.base, self.out, without="quantization_config")
        if hf.WEIGHTS_INDEX in names:
            raise BadInput(f"{self.out.url} holds a whole model already.", hint="Export into a new folder.")

    def _remove_others(self) -> None:
        """Remove the weights of an earlier model, their index first: an incomplete model must not load."""
        names = self.out.list()
        for name in (hf.WEIGHTS_INDEX, *filter(_MODEL.fullmatch, names)):
            if name in names:
                self.out.delete(name)

    def _write(self, name: str, tensors: Sequence[PublishedTensor]) -> None:
        """Write one file, unless an earlier export has finished it."""
        header = self._header(tensors)
        if self._is_finished(name, tensors):
            self._advance(sum(tensor.nbytes for tensor in tensors))
            return
        # A unique name, because another export, or a rank that was given up, may still write.
        hidden = f".{name}.{secrets.token_hex(4)}.partial"
        file = self.out.create(hidden)
        try:
            file.write_at(0, [header])
            offset = len(header)
            for buffers in self._slabs(tensors):
                file.write_at(offset, buffers)
                size = sum(map(len, buffers))
                offset += size
                self._written += size
                self._advance(size)
        except BaseException:
            file.discard()
            raise
        file.finish()
        with storage_errors("Renaming", f"{self.out.url}/{hidden}"):
            os.replace(f"{self.out.url}/{hidden}", f"{self.out.url}/{name}")

    def _advance(self, size: int) -> None:
        self._done += size
        self.doing(f"writing, {self._done} of {self._total} bytes")
        self._progress(self._done, self._total)

    def _header(self, tensors: Sequence[PublishedTensor]) -> bytes:
        rows, start = [], 0
        for tensor in tensors:
            rows.append((tensor.name, DTYPES[tensor.code].tag, tensor.shape, start, start + tensor.nbytes))
            start += tensor.nbytes
        # Also a digest of the pieces: a rerun with another configuration must not keep these files.
        made = hex_digest(digest(repr([tensor.pieces for tensor in tensors]).encode()))
        return encode_header(
            rows, {"format": "pt", "holdfast.source": self._identity, "holdfast.pieces": made}
        )

    def _is_finished(self, name: str, tensors: Sequence[PublishedTensor]) -> bool:
        """Return whether a file is already as this export would write it; its header names the checkpoint."""
        header = self._header(tensors)
        entry = self.out.stat(name)
        if entry is None or entry.size != len(header) + sum(tensor.nbytes for tensor in tensors):
            return False
        reader = self.out.open(name)
        try:
            return reader.read(0, len(header)) == header
        finally:
            reader.close()

    def _slabs(self, tensors: Sequence[PublishedTensor]) -> Iterator[list[memoryview]]:
        """Yield the bytes of tensors in order: several small tensors at a time, or a part of a large one."""
        batch: list[tuple[PublishedTensor, Box]] = []
        size = 0
        for tensor in tensors:
            for part in _parts(tensor):
                nbytes = part.volume * DTYPES[tensor.code].size
                if batch and size + nbytes > SLAB:
                    yield self._read(batch)
                    batch, size = [], 0
                batch.append((tensor, part))
                size += nbytes
        if batch:
            yield self._read(batch)

    def _target(self, tensor: PublishedTensor, part: Box, before: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return memory for a part, after `before`; reused, because new memory costs as much as a copy."""
        dtype = DTYPES[tensor.code]
        start = sum(_aligned(other.nbytes) for other in before)
        stop = start + part.volume * dtype.size
        if len(self._slab) < stop:
            if before:  # many small parts, whose alignment gaps add up
                return torch.empty(part.shape, dtype=getattr(torch, dtype.name))
            self._slab = torch.empty(max(stop, SLAB), dtype=torch.uint8)
        return self._slab[start:stop].view(getattr(torch, dtype.name)).view(part.shape)

    def _read(self, batch: Sequence[tuple[PublishedTensor, Box]]) -> list[memoryview]:
        """Read and assemble parts of published tensors."""
        table = ShardTable()
        buffers: list[torch.Tensor] = []
        for tensor, part in batch:
            target = self._target(tensor, part, buffers)
            buffers.append(target)
            for spec, segment in tensor.pieces:
                # `part` cuts only the first axis, and `segment.split` concerns only the last one.
                cut = Box(
                    (*part.offset[:1], *(0,) * (len(segment.whole) - 1)),
                    (*part.shape[:1], *segment.whole[1:]),
                )
                _add(table, spec, segment, target.view(cut.shape), cut)
        fill_rows(self.store, self._index, table, lambda moved: None)
        return [target.view(-1).view(torch.uint8).numpy().data for target in buffers]


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _add(table: ShardTable, spec: TensorSpec, segment: Segment, target: torch.Tensor, part: Box) -> None:
    """Add the rows of a segment in a part of the published tensor; `target` is the memory of the part."""
    ours = segment.ours(part)
    if ours is None:
        return
    theirs = segment.theirs(ours).relative_to(part.offset)
    view = as_ours(target[theirs.slices()], segment.axes)
    stored = torch_dtype(spec.dtype)
    memory = ShiftedMemory(view, stored, 1) if segment.change == MINUS_ONE else TensorMemory(view, stored)
    table.add(spec, ours, (0, 1), False, memory)


def _parts(tensor: PublishedTensor) -> Iterator[Box]:
    """Split a tensor along its first axis into parts of at most `SLAB` bytes, or of one row."""
    if not tensor.shape:
        yield Box((), ())
        return
    rest = tensor.shape[1:]
    row = max(tensor.nbytes // max(tensor.shape[0], 1), 1)
    step = max(SLAB // row, 1)
    for low in range(0, tensor.shape[0], step):
        yield Box((low, *(0,) * len(rest)), (min(step, tensor.shape[0] - low), *rest))
