"""Import of a published model to a Holdfast checkpoint: the same tensors under the same names, with digests.

The checkpoint loads like the folder of the model, into megatron-core's names and shapes in any layout.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace

import numpy as np
import torch

from holdfast._core.base.reporting import Meter, quiet
from holdfast._core.base.values import Buffer, ReportProgress, amount, check_switches
from holdfast._core.format.names import IMPORTED_MODEL
from holdfast._core.io.index_file import open_index
from holdfast._core.io.open_files import OnDemand, OpenFiles
from holdfast._core.layout.box import Box, whole
from holdfast._core.layout.tensor import DTYPES, FLOATS, Dims, TensorSpec, counted
from holdfast._core.loading.boxes import Wanted, fill_boxes
from holdfast._core.plan.shard_table import Memory
from holdfast._core.protocol.call import Call, begin_call
from holdfast._core.protocol.job import Job, job_of
from holdfast._core.protocol.operation import read_state
from holdfast._core.saving.job import SaveReport
from holdfast._core.state.leaf import Leaf
from holdfast._core.state.memory import Part, torch_dtype
from holdfast._core.store.absence import explain_model
from holdfast._core.store.base import Folder, Store
from holdfast._core.store.local import open_store
from holdfast._models.conversion.importing import FileMemory, leaf, run_import
from holdfast._models.views import hub_format as hf
from holdfast._models.views.hugging_face import HuggingFaceFolder
from holdfast._models.views.scaled import check_scales
from holdfast.errors import BadInput, NotCommitted

log = logging.getLogger("holdfast")


def import_huggingface(
    source: Folder,
    out: str | os.PathLike[str],
    *,
    step: int | None = None,
    strict: bool = True,
    progress: ReportProgress | None = None,
    job: Job | None = None,
) -> SaveReport:
    """Convert a model that Hugging Face publishes to a Holdfast checkpoint.

    Names, shapes and elements stay as they are; digests are added. Configuration, tokenizer and code are
    copied. In a job all participants call it, and each writes some of the tensors.

    source: the folder of the model, or `merged(folder, adapter)`.
    out: a folder that does not exist, is empty, or in which the same import was interrupted, which then
        starts again; after one that has ended nothing is left to do.
    step: the step to note in the checkpoint.
    strict: raise an error for weights that the table of the model's type does not name, and that no load into
        megatron-core's names would use. Otherwise they are imported, too, and a warning names them. Without a
        table, all are imported.
    progress: called with the bytes that this rank has done, and all of its bytes.
    job: who takes part, deadlines, options: `Options(fingerprint=True)` also notes fingerprints.

    Raises BadInput for the folders, CorruptCheckpoint for damage in `source`, or of what this import wrote
    before, StorageError, and RankFailed and DeadlineExceeded for other ranks.
    """
    check_switches(strict=strict)
    job = job_of(job).within(7200.0)
    call = begin_call(job)
    base, meter = open_store(source), Meter(progress or quiet)
    with closing(OpenFiles(base)) as files:
        folders: list[HuggingFaceFolder] = []
        trouble = read_state(lambda: folders.append(published_folder(base)), call.rank)
        identity = folders[0].identity_of_files() if folders else ""
        if folders:  # after all headers were read: damage is not said as a fault of the table
            tells = call.rank == call.participants[0]
            trouble = read_state(lambda: check_named(folders[0], strict, tells), call.rank)
        merge: list[str] = []
        if folders and not trouble:
            trouble = read_state(lambda: merge.append(_identity_of_merge(folders[0])), call.rank)
        return run_import(
            base,
            open_store(out),
            call,
            lambda: _leaves(base, folders[0], files, meter, call),
            identity=" ".join(filter(None, [identity, *merge])),
            trouble=trouble,
            step=step,
            # While one thread reads, the other writes.
            options=replace(job.options, writer_threads=max(job.options.writer_threads, 2)),
            imported=IMPORTED_MODEL,
        )


def published_folder(base: Store) -> HuggingFaceFolder:
    folder = HuggingFaceFolder.at(base)
    if folder is None:
        with suppress(NotCommitted), open_index(base):
            raise BadInput(f"{base.url} is a Holdfast checkpoint already.")
        why, hint = explain_model(base) or (f"it has neither {hf.WEIGHTS} nor {hf.WEIGHTS_INDEX}", "")
        raise BadInput(f"{base.url} is no folder of a published model that can be read: {why}.", hint=hint)
    return folder


def check_named(folder: HuggingFaceFolder, strict: bool, tells: bool) -> None:
    """Raise BadInput for weights that no table names; if not `strict`, warn of them."""
    if not (unnamed := folder.unnamed(folder.names())):
        return
    sentence = (
        f"{folder.where} holds {amount(len(unnamed), 'weight')} that the family {folder.view.family.name!r} "
        f"does not name: {counted(unnamed)}."
    )
    if strict:
        raise BadInput(
            sentence,
            hint="Give strict=False (--unnamed) to import them as well, or write a table: docs/model.md.",
            details={"unnamed": unnamed[:100]},
        )
    if tells:
        log.warning("%s They are imported as they are.", sentence)


def _identity_of_merge(folder: HuggingFaceFolder) -> str:
    """Return an identity of the adapter that is merged, if there is one, after a check that it is of this
    model."""
    if folder.adapter is None:
        return ""
    _ = folder.changes
    # Two adapters may have the same header.
    return folder.adapter.identity_of_elements()


def _leaves(
    base: Store, folder: HuggingFaceFolder, files: OpenFiles, meter: Meter, call: Call
) -> Iterator[Leaf]:
    """Yield a rank's share of the tensors, in the order of the files; shares have about the same bytes."""
    places = [place for name in folder.names() if (place := folder.place(name)) is not None]
    places.sort(key=lambda place: (place.file, place.position))
    specs = [TensorSpec(place.name, place.code, place.shape) for place in places]
    nbytes = [whole(spec.shape).volume * DTYPES[spec.dtype].size for spec in specs]
    middle = np.cumsum(nbytes) - np.asarray(nbytes) / 2
    ranks = len(call.participants)
    owner = np.minimum(middle * ranks // max(sum(nbytes), 1), ranks - 1).astype(int).tolist()
    mine = call.participants.index(call.rank)
    for place, spec, rank in zip(places, specs, owner, strict=True):
        if rank == mine:
            check_scales(folder, place)
            box = whole(spec.shape)
            memory: Memory
            if spec.name in folder.changes:
                memory = _MergedMemory(base, folder, spec, meter)
            else:
                read_into = OnDemand(files, place.file).read_into
                memory = FileMemory(spec, box, read_into, place.position, meter)
            yield leaf(spec.name, Part(spec, box, memory))


class _MergedMemory:
    """A tensor that an adapter changes, as the source of a save, which merges a part when it is written."""

    address = 0

    def __init__(self, base: Store, folder: HuggingFaceFolder, spec: TensorSpec, meter: Meter) -> None:
        if spec.dtype not in FLOATS:
            raise BadInput(
                f"{folder.where} holds {spec.name!r} in {DTYPES[spec.dtype].name}, in which an adapter is "
                "not merged into it.",
                hint="Load both into a model in floating point, and save that.",
                details={"tensor": spec.name},
            )
        self._base, self._folder, self._spec, self._meter = base, folder, spec, meter
        meter.total += whole(spec.shape).volume * DTYPES[spec.dtype].size

    def gather(self, box: Box, out: Buffer) -> None:
        target = torch.frombuffer(out, dtype=torch_dtype(self._spec.dtype)).view(box.shape)
        fill_boxes(self._base, self._folder, [Wanted(self._spec, box, self._spec.dtype)], [target])
        self._meter.moved(target.nbytes)

    def scatter(self, box: Box, data: Buffer, shape: Dims, inside: Box) -> None:
        raise AssertionError("a model that is imported is not written to")
