"""Find which bytes of a checkpoint or a published model some ranks need, and copy just these."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import cache, partial

import msgspec
import numpy as np

from holdfast._core.base.deadline import Deadline
from holdfast._core.base.reporting import quiet
from holdfast._core.base.threads import within
from holdfast._core.base.values import ReportProgress
from holdfast._core.format.columns import Columns
from holdfast._core.format.slice import CHECKPOINT, PUBLISHED
from holdfast._core.io.file_reader import plan_read
from holdfast._core.io.open_checkpoint import TorchDist, open_source
from holdfast._core.io.slice import Slice
from holdfast._core.io.source import Source
from holdfast._core.layout.grid import Grid, grid_of
from holdfast._core.layout.ranks import ranks_of, ranks_text
from holdfast._core.layout.tensor import DTYPES, TensorSpec
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.store.base import Folder, Store
from holdfast._core.store.local import open_local, open_store
from holdfast._core.store.pins import Pin
from holdfast._models.conversion.byte_ranges import ByteRange, byte_ranges
from holdfast._models.huggingface.slice_writer import Fetched, SliceWriter
from holdfast._models.views.needs import (
    Needs,
    of_published,
    of_stored,
    sizes_published,
    sizes_stored,
    together,
)
from holdfast._models.views.published_model import PublishedModel
from holdfast._models.views.rank_share import share_of, split_of, stages_of
from holdfast.errors import BadInput, DeadlineExceeded


class RankNeeds(msgspec.Struct, frozen=True):
    """Number of tensors and bytes that one rank needs."""

    rank: int
    tensors: int
    bytes: int


class FileNeeds(msgspec.Struct, frozen=True):
    """The bytes of one file of the source that the ranks need."""

    name: str
    bytes: int
    ranges: int
    places: tuple[ByteRange, ...]


class FetchReport(msgspec.Struct, frozen=True):
    """The result of `fetch`: what the ranks need, and what was copied."""

    source: str
    step: int | None
    ranks: str
    grid: str
    tensors: int
    """Number of tensors of which at least one rank needs a part."""
    bytes: int
    """Bytes of the elements that the ranks need, each counted once."""
    bytes_of_files: int
    """Bytes to read from files: more than `bytes` where digests cover blocks."""
    bytes_in_all: int
    """Bytes of all tensors of the source."""
    by_rank: tuple[RankNeeds, ...]
    files: tuple[FileNeeds, ...]
    taken_whole: tuple[str, ...]
    """Names that ranks take whole, because it is not known how ranks share them."""
    path: str | None = None
    """The folder with the copy."""
    bytes_written: int = 0
    """Bytes written by this call, without files that an earlier call had finished."""


def fetch(
    source: Folder,
    ranks: str | int | Iterable[int],
    grid: str | Grid,
    to: str | os.PathLike[str] | None = None,
    *,
    split: str | Sequence[int] | None = None,
    vocabulary: int | None = None,
    weights_only: bool = False,
    progress: ReportProgress | None = None,
    timeout: float = 7200.0,
) -> FetchReport:
    """Find what some ranks need of a checkpoint or a published model, and copy just that to a folder.

        >>> huggingface.fetch("Qwen3-30B-A3B", "8-15", "world=64,tp=2,pp=4,ep=8", "/local/Qwen3-30B-A3B")

    These ranks can load from the copy alone, in this grid; other ranks get MissingTensors. It runs in one
    process, without torch, in a few hundred MB of memory. After an interruption the same call continues.

    source: the folder of a published model, or a committed Holdfast checkpoint of megatron-core's model.
    ranks: ranks of the job, such as those of one host: "8-15", a number, or numbers.
    grid: how the ranks of the job share the model: a `Grid`, or a text such as "world=64,tp=2,pp=4,ep=8".
    to: a new folder, or the folder of an interrupted fetch; None: nothing is copied.
    split: number of layers of each model chunk, in the order of the model: pp x vpp numbers, or "4,4,3".
        None: all have the same.
    vocabulary: rows of the model's embedding, with its padding. None: as many as a checkpoint has, or, for a
        published model, enough for any padding up to a multiple of 128 x tp.
    weights_only: leave out the optimizer's state and the states of random generators of a checkpoint.
    progress: called with the bytes copied, and the bytes of the whole copy, on another thread.
    timeout: seconds from this call until it fails, even if it makes progress.

    Raises BadInput for ranks, a grid or a split that do not fit the model, and for a folder that holds
    something else; NotCommitted and CorruptCheckpoint for the source; StorageError; DeadlineExceeded.
    """
    deadline, ended = Deadline(timeout), threading.Event()
    tell = progress or quiet

    def report(done: int, total: int) -> None:
        if deadline.passed() or ended.is_set():
            raise DeadlineExceeded("The fetch was given up.")
        tell(done, total)

    found: list[FetchReport] = []
    arguments = (source, ranks, grid, to, split, vocabulary, weights_only, report)
    try:
        # On another thread, because a read of the source may never return.
        within(deadline.left(), f"fetch from {source}", lambda: found.append(_fetch(*arguments)))
    except DeadlineExceeded:
        raise DeadlineExceeded(
            f"The fetch from {source} did not end within {timeout:g} s.",
            hint="Run the same fetch again, which goes on with what is there, with a longer timeout=.",
        ) from None
    finally:
        ended.set()  # the thread stops at its next file
    return found[0]


def _fetch(
    source: Folder,
    ranks: str | int | Iterable[int],
    grid: str | Grid,
    to: str | os.PathLike[str] | None,
    split: str | Sequence[int] | None,
    vocabulary: int | None,
    weights_only: bool,
    report: ReportProgress,
) -> FetchReport:
    grid = grid_of(grid) if isinstance(grid, str) else grid
    if not isinstance(grid, Grid):
        raise BadInput(f"grid must be a holdfast.Grid, or a text such as 'world=64,pp=4', not {grid!r}.")
    ranks = [ranks] if isinstance(ranks, int) else ranks
    numbers = ranks_of(ranks) if isinstance(ranks, str) else ranks_of(ranks_text(ranks))
    split = split_of(split)
    for rank in (numbers[0], numbers[-1]):
        grid.coordinates(rank)  # raises if the grid has no such rank
    if vocabulary is not None and (type(vocabulary) is not int or vocabulary < 1):
        raise BadInput(f"vocabulary must be at least 1, not {vocabulary!r}.")
    store = open_store(source)
    with closing(Pin(store)), open_source(store) as opened:
        _check_source(store, opened)
        columns = opened.select()
        specs = {spec.name: spec for spec in columns.specs()}
        by_rank = _needs_of(opened, specs, vocabulary or 0, weights_only, grid, numbers, split)
        needs = together(by_rank.values())
        step = opened.about.get("step")
        files = _files(columns, specs, needs, opened.where)
        written, path = 0, None
        if to is not None:
            kind = PUBLISHED if isinstance(opened, PublishedModel) else CHECKPOINT
            what = Fetched(kind, ranks_text(numbers), grid.text(), columns, specs, needs)
            out = open_local(to, "holdfast fetch --to")
            written, path = SliceWriter(store, opened, out, what, report).write(), out.url
    return FetchReport(
        source=store.url,
        step=step if isinstance(step, int) else None,
        ranks=ranks_text(numbers),
        grid=grid.text(),
        tensors=len(needs.boxes),
        bytes=_nbytes(needs, specs),
        bytes_of_files=sum(file.bytes for file in files),
        bytes_in_all=int(columns.chunk_bytes().sum()),
        by_rank=tuple(
            RankNeeds(rank, len(need.boxes), _nbytes(need, specs)) for rank, need in by_rank.items()
        ),
        files=files,
        taken_whole=tuple(sorted(needs.unknown)),
        path=path,
        bytes_written=written,
    )


def _check_source(store: Store, opened: Source) -> None:
    """Raise BadInput for a source that can't be fetched from."""
    if isinstance(opened, Slice):
        raise BadInput(
            f"{store.url} is itself what was fetched for {opened.fetched_for}.",
            hint="Fetch from the whole folder.",
        )
    if isinstance(opened, TorchDist):
        raise BadInput(
            f"{store.url} is a checkpoint of torch DCP or megatron-core, whose bytes carry no digests.",
            hint=f"`holdfast import torch_dist {store.url} OUT` makes one of Holdfast; fetch from that.",
        )


def _needs_of(
    opened: Source,
    specs: dict[str, TensorSpec],
    words: int,
    weights_only: bool,
    grid: Grid,
    ranks: Sequence[int],
    split: Sequence[int] | None,
) -> dict[int, Needs]:
    """Find what ranks need of a source."""
    if isinstance(opened, PublishedModel):
        view = opened.view_if_known
        sizes = sizes_published(view, specs, words)
        needed = cache(partial(of_published, view, specs))  # data-parallel ranks need the same
    else:
        sizes = sizes_stored(specs, words)
    stages = stages_of(grid, sizes.layers, split)
    shares = {rank: share_of(grid, rank, sizes, stages) for rank in ranks}
    if isinstance(opened, PublishedModel):
        return {rank: needed(share) for rank, share in shares.items()}
    return {rank: of_stored(specs, share, rank, weights_only) for rank, share in shares.items()}


def _nbytes(needs: Needs, specs: dict[str, TensorSpec]) -> int:
    return sum(
        box.volume * DTYPES[specs[name].dtype].size for name, boxes in needs.boxes.items() for box in boxes
    )


def _files(columns: Columns, specs: dict[str, TensorSpec], needs: Needs, where: str) -> tuple[FileNeeds, ...]:
    """Return the byte ranges of each file that hold what is needed."""
    rows = {name: row for row, name in enumerate(columns.names)}
    table = ShardTable()
    for name, boxes in needs.boxes.items():
        for box in boxes:
            table.specs.append(specs[name])
            table.boxes.append(box)
    of = np.asarray([rows[spec.name] for spec in table.specs], np.int64)
    pairs = plan_read(table, of, columns, where).pairs
    return tuple(
        FileNeeds(name, sum(run.nbytes for run in runs), sum(run.count for run in runs), tuple(runs))
        for name, runs in byte_ranges(columns, pairs).items()
    )
