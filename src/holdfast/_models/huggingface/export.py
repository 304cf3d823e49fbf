"""Export of a checkpoint's weights to a folder that transformers loads.

Every published tensor is assembled from boxes of the checkpoint's tensors (`assembling`), one slab at a
time. A file gets its final name once it is complete, and the weights' index is written last. So transformers
does not load the folder of a killed export as a model, and a rerun keeps the complete files.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import groupby
from typing import NamedTuple

import msgspec
import torch

from holdfast._core.base.reporting import quiet
from holdfast._core.base.values import Message, ReportProgress, check_switches
from holdfast._core.format.index import Index
from holdfast._core.io.host_memory import ScratchBuffer, batches
from holdfast._core.io.index_file import open_index
from holdfast._core.io.missing_files import reading
from holdfast._core.io.on_threads import on_threads
from holdfast._core.layout.box import cut, whole
from holdfast._core.layout.tensor import CODE_OF, DTYPES
from holdfast._core.loading.alike import hold_the_same
from holdfast._core.protocol.call import Call, begin_call
from holdfast._core.protocol.job import Job, job_of
from holdfast._core.protocol.operation import read_state
from holdfast._core.protocol.task import CollectiveTask
from holdfast._core.store.base import Store, Writer, replace_file, storage_errors
from holdfast._core.store.filesystem import make_durably
from holdfast._core.store.local import LocalStore, open_local, open_store
from holdfast._core.store.pins import Pin
from holdfast._models.conversion.folder import carried, put_files, refuse_changed
from holdfast._models.huggingface.assembling import PublishedPart, assemble, assemble_quantized
from holdfast._models.huggingface.export_metadata import (
    DataDigest,
    Files,
    check_data,
    data_said,
    exported_config,
    file_header,
    weights_index,
)
from holdfast._models.huggingface.published_tensors import (
    ModelPart,
    PublishedTensor,
    plan_export,
    share_among_files,
)
from holdfast._models.huggingface.quantizing import METHODS, QuantizedTensor, quantized
from holdfast._models.huggingface.whole_files import WholeFiles
from holdfast._models.views import hub_format as hf
from holdfast.errors import BadInput

SLAB = 32 << 20
"""Bytes of weights that are assembled at a time."""
_THREADS = 2
"""While one thread writes, the other assembles."""
FILE_BYTES = 5_000_000_000
"""Maximum number of bytes of weights in a file; transformers uses shards of this size."""
_PARTIAL = re.compile(r"\.model[^/]*\.safetensors\.[0-9a-f]{8}\.partial")
_MODEL = re.compile(r"model.*\.safetensors")
"""Names of files with a model's weights; adapter files have another prefix."""


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
    prefix: str = ""
    """What the names of the model begin with in the checkpoint, such as `model.`."""
    left_out: tuple[str, ...] = ()
    """Weights of the checkpoint that are no part of the model: their names have no such prefix."""


def export_huggingface(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str],
    dtype: str | torch.dtype | None = None,
    quantize: str | None = None,
    file_bytes: int = FILE_BYTES,
    strict: bool = True,
    prefix: str | None = None,
    progress: ReportProgress | None = None,
    job: Job | None = None,
) -> ExportReport:
    """Export the weights of a Holdfast checkpoint of megatron-core's to a folder that transformers loads.

    In a job all participants call it. Each writes some of the files completely; there is no collective.

    source: a committed checkpoint; optimizer state in it is not read.
    out: a new folder, or one in which an export of the same checkpoint was interrupted.
    like: the folder of the published model, whose configuration, tokenizer and code are copied. If it holds
        weights, the exported names and shapes must be the same.
    dtype: of floating-point weights, such as "bfloat16" or torch.bfloat16; None: as in `like`, but never more
        exact than they are stored. A router's bias stays as it is stored.
    quantize: "fp8" writes linear layers in float8_e4m3fn, with a scale in float32 for each block of 128 rows
        and columns; None: `dtype`. If `like` has tensors in 8 bits, these are the ones, in blocks as there.
    file_bytes: the most bytes of weights in a file.
    strict: raise an error for tensors of `like` that the checkpoint does not have; otherwise they are left
        out and reported.
    prefix: of the model's names in the checkpoint, such as "model" of one of `{"model": model, "optim":
        optimizer}`; None: find it. Weights without it are left out and reported.
    progress: called with the bytes that this rank has done, and the bytes of all its files.
    job: who takes part, and deadlines (`holdfast.Job`); its `timeout` is 7200 s by default.

    Raises BadInput for arguments, an unknown family and unknown weights, MissingTensors and CoverageError for
    missing tensors or parts of them, NotCommitted and CorruptCheckpoint for the checkpoint, StorageError, and
    RankFailed and DeadlineExceeded for other ranks.
    """
    if type(file_bytes) is not int or file_bytes < 1:
        raise BadInput(f"file_bytes must be a whole number from 1 on, not {file_bytes!r}.")
    if quantize not in (None, *METHODS):
        raise BadInput(f"quantize={quantize!r} is none of {', '.join(METHODS)}.")
    check_switches(strict=strict)
    call = begin_call(job_of(job).within(7200.0))
    return run_export(
        open_store(source),
        open_local(like, "holdfast.export"),
        open_local(out, "holdfast.export"),
        call,
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        quantize=quantize,
        file_bytes=file_bytes,
        strict=strict,
        prefix=prefix,
        progress=progress or quiet,
    )


def run_export(
    store: Store,
    base: LocalStore,
    out: LocalStore,
    call: Call,
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    file_bytes: int = FILE_BYTES,
    strict: bool = True,
    prefix: str | None = None,
    progress: ReportProgress = quiet,
    in_framework: bool = False,
) -> ExportReport:
    """Run an export on this rank, with the arguments of `export_huggingface`. Raises the same error on all
    ranks.

    in_framework: write only weights, and replace other weights in the folder. The framework writes
        configuration and tokenizer, and layers for multi-token prediction may be missing.
    """
    export = _Export(store, base, out, call, progress, in_framework)

    def plan() -> None:
        with open_index(store) as index:
            alike = partial(hold_the_same, store, index)
            tensors, missing, export.part = plan_export(
                index, base, dtype, strict, in_framework, alike, prefix
            )
            if quantize is not None:
                tensors = quantized(tensors, base)
            export.plan(index, share_among_files(tensors, file_bytes), missing)

    with ExitStack() as held:
        # On one rank only, as in a load; it is the last one to return.
        if call.rank == call.participants[0]:
            held.enter_context(closing(Pin(store)))
        export.collect_error = read_state(plan, call.rank)
        export.run()
    return export.report()


class _Export(CollectiveTask):
    """The files of one export; each rank writes some of them."""

    kind = "export"

    def __init__(
        self,
        store: Store,
        base: LocalStore,
        out: LocalStore,
        call: Call,
        progress: ReportProgress,
        in_framework: bool,
    ) -> None:
        super().__init__(f"export to {out.url}", out.url, call)
        self.store, self.base, self.out = store, base, out
        self._call, self._progress, self._in_framework = call, progress, in_framework
        self.part = ModelPart("", [], [])
        self._done = self._written = 0
        self._free = [ScratchBuffer(SLAB) for _ in range(_THREADS)]
        """Buffers that no thread is using."""
        self._lock = threading.Lock()

    def plan(self, index: Index, files: Files, missing: list[str]) -> None:
        """Set the files of all ranks; this rank writes its share of them."""
        self._files, self._missing = files, tuple(missing)
        self._identity = index.identity
        step = index.about.get("step")
        self._step = step if isinstance(step, int) else None
        self._total = sum(tensor.nbytes for _, tensors in self._mine() for tensor in tensors)
        with storage_errors("Making", self.out.url):
            make_durably(self.out.root)
        if not self._in_framework:
            self._refuse_others()

    def report(self) -> ExportReport:
        """Return the report of a finished export."""
        tensors = sum(len(one.stored()) for _, part in self._files for one in part)
        return ExportReport(
            self.out.url,
            self._step,
            tensors,
            self._written,
            len(self._files),
            self._missing,
            self.part.prefix,
            tuple(self.part.left_out),
        )

    # -- called by the protocol ---------------------------------------------------------------------

    def contribute(self) -> Message:
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
            with reading(self.store, self._identity):
                for name, tensors in self._mine():
                    self._write(name, tensors)
        return {}

    def finish(self, reports: dict[int, Message]) -> Message:
        """Complete the model once all files are written; the weights' index comes last."""
        for name, tensors in self._files:
            if self._finished(name, tensors) is None:
                raise BadInput(f"{self.out.url}/{name} was changed or removed by somebody else meanwhile.")
        for name in self.out.list():
            if _PARTIAL.fullmatch(name):
                self.out.delete(name)
        if not self._in_framework:
            put_files(self.out, carried(self.base, partial(exported_config, files=self._files)))
        if len(self._files) > 1:  # a single file needs no index
            replace_file(self.out, hf.WEIGHTS_INDEX, weights_index(self._files))
        return {}

    # -- this rank's share ------------------------------------------------------------------------

    def _mine(self) -> Files:
        ranks = self._call.participants
        return self._files[ranks.index(self._call.rank) :: len(ranks)]

    def _refuse_others(self) -> None:
        """Raise BadInput if the folder holds another model than this export, finished or not."""
        files = dict(self._files)
        # By these, readers would look for weights elsewhere.
        misleading = [hf.ADAPTER_CONFIG, *([hf.WEIGHTS_INDEX] if len(files) == 1 else [])]
        for name in self.out.list():
            is_mine = name in files and self._finished(name, files[name]) is not None
            if name in misleading or (hf.is_weights_file(name) and not is_mine):
                raise BadInput(
                    f"{self.out.url} holds {name}, which is not of this export, or no longer whole.",
                    hint="Export into a new folder, or the one of an export that was interrupted.",
                )
        refuse_changed(self.out, carried(self.base, partial(exported_config, files=self._files)))

    def _remove_others(self) -> None:
        """Remove the weights of an earlier model, their index first: an incomplete model must not load."""
        names = self.out.list()
        for name in (hf.WEIGHTS_INDEX, *filter(_MODEL.fullmatch, names)):
            if name in names:
                self.out.delete(name)

    def _write(self, name: str, tensors: Sequence[PublishedTensor]) -> None:
        """Write one file, unless an earlier export has finished it."""
        start = len(file_header(tensors, self._identity))
        if (said := self._finished(name, tensors)) is not None:
            check_data(self.out, name, start, said, self._advance)
            return
        file, digest = WholeFiles(self.out.root).create(name), DataDigest()
        try:
            # The slabs are assembled one after the other, by whichever thread has written its last one.
            slabs = _digested(self._slabs(tensors, start), digest.update)
            on_threads(_THREADS, "holdfast-export", partial(self._write_slab, file), slabs)
            for tensor in tensors:
                tensor.check_zeros()
            file.write_at(0, [file_header(tensors, self._identity, digest.hexdigest())])
        except BaseException:
            file.discard()
            raise
        file.finish()

    def _write_slab(self, file: Writer, slab: _Slab) -> None:
        size = sum(map(len, slab.buffers))
        file.write_at(slab.offset, slab.buffers)
        with self._lock:
            self._free.append(slab.memory)
            self._written += size
            self._advance(size)

    def _advance(self, size: int) -> None:
        self._done += size
        self.doing(f"writing, {self._done} of {self._total} bytes")
        self._progress(self._done, self._total)

    def _finished(self, name: str, tensors: Sequence[PublishedTensor]) -> str | None:
        """Return the digest of a complete file of this export, by its header, which has the checkpoint; or
        None."""
        header = file_header(tensors, self._identity)
        entry = self.out.stat(name)
        if entry is None or entry.size != len(header) + sum(tensor.nbytes for tensor in tensors):
            return None
        with closing(self.out.open(name)) as reader:
            return data_said(reader.read(0, len(header)), header)

    def _slabs(self, tensors: Sequence[PublishedTensor], offset: int) -> Iterator[_Slab]:
        """Yield the bytes of tensors in order, from `offset` of the file on: several small tensors at a time,
        or a part of a large one."""
        for is_quantized, run in groupby(tensors, lambda tensor: isinstance(tensor, QuantizedTensor)):
            if is_quantized:
                for tensor in run:
                    yield from self._quantized_slabs(tensor, offset)
                    offset += tensor.nbytes
                continue
            parts = (
                PublishedPart(tensor, box)
                for tensor in run
                for box in cut(whole(tensor.shape), SLAB // DTYPES[tensor.code].size)
            )
            for batch in batches(parts, SLAB):
                memory = self._free.pop()
                yield _Slab(offset, memory, assemble(self.store, self._index, batch, memory))
                offset += sum(part.nbytes for part in batch)

    def _quantized_slabs(self, tensor: PublishedTensor, offset: int) -> Iterator[_Slab]:
        """Yield the bytes of a tensor in 8 bits, from `offset` of the file on; at last with its scales."""
        assert isinstance(tensor, QuantizedTensor)
        scales = list[memoryview]()
        for band in tensor.bands(SLAB // DTYPES[CODE_OF["float32"]].size):
            memory = self._free.pop()
            elements, more = assemble_quantized(self.store, self._index, tensor, band, memory)
            scales.append(more)
            is_last = band.stop == tensor.shape
            yield _Slab(offset, memory, [elements, *scales] if is_last else [elements])
            offset += len(elements)


class _Slab(NamedTuple):
    """Assembled bytes of a file. memory: the buffer that holds them."""

    offset: int
    memory: ScratchBuffer
    buffers: Sequence[memoryview]


def _digested(slabs: Iterable[_Slab], update: Callable[[memoryview], None]) -> Iterator[_Slab]:
    """Yield slabs after `update` has had their bytes, in order."""
    for slab in slabs:
        for data in slab.buffers:
            update(data)
        yield slab
