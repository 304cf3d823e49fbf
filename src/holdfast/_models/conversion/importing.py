"""An import: a save of tensors from files in another format, each read when it is written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from holdfast._core.base.options import Options
from holdfast._core.base.reporting import Meter
from holdfast._core.base.values import Buffer, Json
from holdfast._core.existing.target import number
from holdfast._core.format.names import DATA, IMPORTED_MODEL
from holdfast._core.io.index_file import open_index
from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import DTYPES, Dims, TensorSpec
from holdfast._core.protocol.call import Call
from holdfast._core.protocol.operation import agree
from holdfast._core.ready import ready
from holdfast._core.saving.job import SaveJob, SaveReport
from holdfast._core.saving.request import SaveRequest
from holdfast._core.state.leaf import Flat, Leaf
from holdfast._core.store.base import Store
from holdfast._models.conversion.byte_ranges import runs_of
from holdfast._models.conversion.folder import (
    carried,
    check_finished,
    delete,
    label_of,
    left_in,
    put_files,
    put_missing,
    refuse_changed,
)
from holdfast.errors import BadInput, CorruptCheckpoint, NotCommitted

ReadInto = Callable[[int, Sequence[Buffer]], int]
"""Fills buffers one after the other, from a position on; returns the number of bytes read."""


class FileMemory:
    """A row-major box of a tensor in a file, as the source of a save, which reads it on writing."""

    # 0, so that a save calls `gather`: there is no memory to write from.
    address = 0

    def __init__(self, spec: TensorSpec, box: Box, read_into: ReadInto, position: int, meter: Meter) -> None:
        self._name, self._shape, self._itemsize = spec.name, box.shape, DTYPES[spec.dtype].size
        self._read_into, self.position, self._meter = read_into, position, meter
        self.nbytes = box.volume * self._itemsize
        meter.total += self.nbytes

    def gather(self, box: Box, out: Buffer) -> None:
        view, done = memoryview(out).cast("B"), 0
        for run in runs_of(self._shape, box, self._itemsize, 0):
            for repeat in range(run.count):
                self.read(run.start + repeat * run.step, view[done : done + run.length])
                done += run.length
        self._meter.moved(done)

    def read(self, offset: int, view: memoryview) -> None:
        """Read bytes, from `offset` in the box on."""
        if self._read_into(self.position + offset, [view]) != len(view):
            raise CorruptCheckpoint(f"The file that holds {self._name!r} ends before that does.")

    def scatter(self, box: Box, data: Buffer, shape: Dims, inside: Box) -> None:
        raise AssertionError("a file that is imported is not written to")


def leaf(name: str, value: object) -> Leaf:
    return Leaf(name, value, lambda loaded: None)


def run_import(
    base: Store,
    target: Store,
    call: Call,
    collect: Callable[[], Iterator[Leaf]],
    *,
    identity: str,
    trouble: object = None,
    step: int | None,
    options: Options,
    imported: str,
) -> SaveReport:
    """Save the leaves that `collect` yields; do nothing if this import has completed before.

    identity: that of the source, which must be the same on all ranks. trouble: this rank's error reading it.
    """
    left, files = list[str](), dict[str, bytes]()

    def choose(reports: dict[int, Json]) -> Json:
        known = _one_source(reports)
        # Files of the same names and sizes can have other elements, so file times are included.
        there = [name for name in base.list() if not name.endswith("/")]
        seen = [(name, entry) for name in there if (entry := base.stat(name)) is not None]
        label = f"import-{label_of(known, seen, step, options)}-"
        if imported == IMPORTED_MODEL:
            files.update(carried(base))
        done, left[:] = _begin(target, label, files)
        refuse_changed(target, files)
        if done is not None:
            put_missing(target, files)
        return {"label": label, "done": msgspec.to_builtins(done)}

    # Ranks compare their views of the source before one of them writes: hosts may differ.
    title, mine = f"choice of what to import from {base.url}", [identity, str(trouble or "")]
    chosen = agree(title, f"import|{target.url}", choose, call, mine)
    if chosen["done"] is not None:
        return msgspec.convert(chosen["done"], ready(SaveReport))

    def read(rank: int) -> Flat:
        # Before the index, which makes the folder a checkpoint. Only one rank has chosen, and has any.
        put_files(target, files)
        return Flat(list(collect()))

    request = SaveRequest(
        store=target,
        collect=read,
        call=call,
        step=step,
        notes={"imported": imported},
        overwrite=False,
        options=options,
        label=chosen["label"],
        after=lambda: delete(target, left),
    )
    return SaveJob(request).run()


def _begin(out: Store, label: str, known: Collection[str]) -> tuple[SaveReport | None, list[str]]:
    """Return the report of this import if it is finished, else None; and leftovers of interrupted ones.

    Raises BadInput for a folder that holds anything else, CorruptCheckpoint for a finished import without its
    data files.
    """
    try:
        with open_index(out) as index:
            about = index.about
            if not str(about.get("attempt")).startswith(label):
                raise BadInput(f"{out.url} holds a checkpoint already; an import goes into a new folder.")
            named, tensors = set(index.file_names()), index.tensors
            check_finished(out, index, "import")
    except NotCommitted:
        return None, left_in(out, lambda path: path.startswith(f"{DATA}/{label}"), known, "an import")
    paths = [f"{DATA}/{name}" for name in out.list(DATA) if name.startswith(label)]
    delete(out, [path for path in paths if path not in named])
    return SaveReport(out.url, number(about.get("step")), tensors, 0, 0.0, {}), []


def _one_source(reports: dict[int, Json]) -> str:
    """Return the identity of the source; raise BadInput if ranks see different ones, or can't read it."""
    first, (identity, _) = next(iter(reports.items()))
    for rank, (other, trouble) in reports.items():
        if trouble:
            who = f"Rank {rank} can't read the model: " if len(reports) > 1 else ""
            raise BadInput(f"{who}{trouble}", rank=rank)
        if other != identity:
            raise BadInput(
                f"Rank {rank} sees another version of the model than rank {first}.",
                rank=rank,
                hint="Give a folder that all ranks share, or the same revision on all hosts.",
            )
    return str(identity)
