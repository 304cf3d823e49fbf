"""Import of a published model to a Holdfast checkpoint: the same tensors under the same names, with digests.

The checkpoint loads like the folder of the model, into megatron-core's names and shapes in any layout.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import numpy as np

from holdfast.errors import BadInput, CorruptCheckpoint
from holdfast.format import hugging_face as hf
from holdfast.format.names import IMPORTED_MODEL, INDEX
from holdfast.integrations.huggingface.carried import carry, is_carried, refuse_changed
from holdfast.integrations.reporting import Progress, quiet
from holdfast.io.hugging_face import HuggingFaceFolder
from holdfast.layout.box import Box, whole
from holdfast.layout.tensor import DTYPES, TensorSpec
from holdfast.options import Options
from holdfast.plan.shard_table import contiguous_at
from holdfast.protocol.call import begin_call
from holdfast.protocol.operation import agree, read_state
from holdfast.roster.base import Roster
from holdfast.saving.job import SaveJob, SaveReport
from holdfast.saving.request import SaveRequest
from holdfast.state.leaf import Flat, Leaf
from holdfast.state.memory import Part
from holdfast.store.base import Reader, Store
from holdfast.store.local import open_store
from holdfast.values import Buffer, Json

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def import_huggingface(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    step: int | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
    participants: Iterable[int] | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    timeout: float = 7200.0,
    stall_timeout: float = 120.0,
    roster: Roster | None = None,
) -> SaveReport:
    """Convert a model that Hugging Face publishes to a Holdfast checkpoint.

    Names, shapes and elements stay as they are; digests are added. Configuration, tokenizer and code are
    copied. In a job all participants call it, and each writes some of the tensors.

    source: the folder of the model. out: a folder that does not exist, is empty, or in which an import of
        this model was interrupted; the import then starts again.
    step: the step to note in the checkpoint.
    options: `Options(fingerprint=True)` also notes fingerprints.
    progress: called with the bytes that this rank has done, and all of its bytes.
    participants, process_group, no_dist, timeout, stall_timeout, roster: as in `export`.

    Raises BadInput for the folders, CorruptCheckpoint for damage in `source`, StorageError, and RankFailed
    and DeadlineExceeded for other ranks.
    """
    call = begin_call(
        roster,
        no_dist=no_dist,
        participants=participants,
        process_group=process_group,
        timeout=timeout,
        stall_timeout=stall_timeout,
    )
    base, target = open_store(source), open_store(out)
    with ExitStack() as opened:
        folders: list[HuggingFaceFolder] = []
        # All ranks compare their versions of the model before one of them writes: hosts may differ.
        trouble = read_state(lambda: folders.append(_folder(base)), call.rank)
        report = [folders[0].identity_of_files() if folders else "", str(trouble or "")]
        agree(
            f"choice of the model to import from {base.url}", f"import|{target.url}", _one_model, call, report
        )

        def collect(rank: int) -> Flat:
            if rank == call.participants[0]:
                _refuse_others(target, base)
                # Before the index, which makes the folder a checkpoint.
                carry(base, target)
            files = opened.enter_context(closing(_Files(base, progress or quiet)))
            mine = call.participants.index(rank)
            return Flat(_leaves(folders[0], files, mine, len(call.participants)))

        request = SaveRequest(
            store=target,
            collect=collect,
            call=call,
            step=step,
            notes={"imported": IMPORTED_MODEL},
            overwrite=False,
            options=options or Options(),
        )
        return SaveJob(request).run()


def _folder(base: Store) -> HuggingFaceFolder:
    if not HuggingFaceFolder.is_one(base):
        raise BadInput(f"{base.url} is no folder of a published model: it has no {hf.WEIGHTS_INDEX}.")
    return HuggingFaceFolder(base)


def _one_model(reports: dict[int, Json]) -> str:
    """Return the identity of the model; raise BadInput if ranks see different ones, or can't read it."""
    first, (identity, _) = next(iter(reports.items()))
    for rank, (other, trouble) in reports.items():
        if trouble:
            raise BadInput(f"Rank {rank} can't read the model: {trouble}", rank=rank)
        if other != identity:
            raise BadInput(
                f"Rank {rank} sees another version of the model than rank {first}.",
                rank=rank,
                hint="Give a folder that all ranks share, or the same revision on all hosts.",
            )
    return str(identity)


def _refuse_others(target: Store, base: Store) -> None:
    """Raise BadInput if the folder holds anything but the rest of an interrupted import of this model."""
    names = target.list() if target.stat() is not None else []
    if INDEX in names:
        raise BadInput(f"{target.url} holds a checkpoint already; an import goes into a new folder.")
    known = {name for name in base.list() if is_carried(name)}
    others = sorted(name for name in names if name not in known and name != "data/")
    if others:
        raise BadInput(f"{target.url} holds {others[0]!r}; an import goes into a new folder.")
    refuse_changed(base, target)


def _leaves(folder: HuggingFaceFolder, files: _Files, mine: int, ranks: int) -> list[Leaf]:
    """List a rank's share of the tensors, in the order of the files; shares have about the same bytes."""
    places = [place for name in folder.names() if (place := folder.place(name)) is not None]
    places.sort(key=lambda place: (place.file, place.position))
    specs = [TensorSpec(place.name, place.code, place.shape) for place in places]
    nbytes = [whole(spec.shape).volume * DTYPES[spec.dtype].size for spec in specs]
    middle = np.cumsum(nbytes) - np.asarray(nbytes) / 2
    owner = np.minimum(middle * ranks // max(sum(nbytes), 1), ranks - 1).astype(int).tolist()
    leaves = []
    for place, spec, size, rank in zip(places, specs, nbytes, owner, strict=True):
        if rank == mine:
            box = whole(spec.shape)
            part = Part(spec, box, _FileMemory(files, place, box, DTYPES[spec.dtype].size))
            leaves.append(Leaf(spec.name, part, _ignore))
            files.total += size
    return leaves


def _ignore(value: object) -> None:
    pass


class _Files:
    """Files of the folder, one open at a time; counts the bytes that were read."""

    def __init__(self, store: Store, progress: Progress) -> None:
        self._store, self._progress = store, progress
        self._open: tuple[str, Reader] | None = None
        self._lock = threading.Lock()
        self._done = self.total = 0

    def read_into(self, name: str, position: int, view: memoryview) -> None:
        # One thread at a time, because the threads of a save would close each other's files.
        with self._lock:
            if self._open is None or self._open[0] != name:
                self.close()
                self._open = (name, self._store.open(name))
            if self._open[1].read_into(position, [view]) != len(view):
                raise CorruptCheckpoint(f"{self._store.url}/{name} ends before the tensors that it lists do.")
            self._done += len(view)
            self._progress(self._done, self.total)

    def close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened[1].close()


class _FileMemory:
    """A tensor in a file as the source of a save, which reads it when it writes."""

    # 0, so that a save calls `gather`: there is no memory to write from.
    address = 0

    def __init__(self, files: _Files, place: hf.Place, box: Box, itemsize: int) -> None:
        self._files, self._place, self._shape, self._itemsize = files, place, box.shape, itemsize

    def gather(self, box: Box, out: Buffer) -> None:
        view = memoryview(out).cast("B")
        start = contiguous_at(self._shape, box)
        if start is not None:
            self._files.read_into(self._place.file, self._place.position + start * self._itemsize, view)
            return
        # A box with gaps: read one run along the last axis at a time.
        done, width = 0, box.shape[-1] * self._itemsize
        for row in np.ndindex(*box.shape[:-1]):
            index = tuple(a + b for a, b in zip(row, box.offset, strict=False))
            offset = int(np.ravel_multi_index((*index, box.offset[-1]), self._shape)) * self._itemsize
            self._files.read_into(self._place.file, self._place.position + offset, view[done : done + width])
            done += width

    def scatter(self, box: Box, data: Buffer, shape: tuple[int, ...], inside: Box) -> None:
        raise AssertionError("a file that is imported is not written to")
