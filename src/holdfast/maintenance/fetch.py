"""Find which bytes of a checkpoint or a published model some ranks need, and copy just these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from holdfast.errors import BadInput
from holdfast.format.columns import Columns
from holdfast.format.slice import CHECKPOINT, PUBLISHED
from holdfast.io.hugging_face import PublishedModel
from holdfast.io.open_checkpoint import TorchDist, open_source
from holdfast.io.slice import Slice
from holdfast.io.source import Source
from holdfast.layout.grid import Grid, grid_of
from holdfast.layout.ranks import ranks_of, ranks_text
from holdfast.layout.tensor import DTYPES, TensorSpec
from holdfast.maintenance.slice_writer import Fetched, SliceWriter
from holdfast.maintenance.target import Place
from holdfast.plan.byte_ranges import ByteRange, byte_ranges
from holdfast.plan.read import overlaps
from holdfast.plan.shard_table import ShardTable
from holdfast.store.base import Store
from holdfast.store.local import open_store
from holdfast.views.needs import (
    Needs,
    of_published,
    of_stored,
    sizes_published,
    sizes_stored,
    together,
)
from holdfast.views.rank_share import RankShare, share_of, stages_of

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


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
    source: Place,
    ranks: str | Iterable[int],
    grid: str | Grid,
    to: Place | None = None,
    *,
    split: Sequence[int] | None = None,
    vocabulary: int | None = None,
    weights_only: bool = False,
    progress: Progress | None = None,
) -> FetchReport:
    """Find what some ranks need of a checkpoint or a published model, and copy just that to a folder.

        >>> huggingface.fetch("Qwen3-30B-A3B", "8-15", "world=64,tp=2,pp=4,ep=8", "/local/Qwen3-30B-A3B")

    These ranks can load from the copy alone, in this grid; other ranks get MissingTensors. It runs in one
    process, without torch, in a few hundred MB of memory. After an interruption the same call continues.

    source: the folder of a published model, or a committed Holdfast checkpoint of megatron-core's model.
    ranks: ranks of the job, such as those of one host: "8-15", or numbers.
    grid: how the ranks of the job share the model: a `Grid`, or a text such as "world=64,tp=2,pp=4,ep=8".
    to: a new folder, or the folder of an interrupted fetch; None: nothing is copied.
    split: number of layers of each model chunk, in the order of the model: pp x vpp numbers. None: all have
        the same.
    vocabulary: rows of the model's embedding, with its padding. None: as many as a checkpoint has, or, for a
        published model, enough for any padding up to a multiple of 128 x tp.
    weights_only: leave out the optimizer's state and the states of random generators of a checkpoint.
    progress: called with the bytes copied, and the bytes of the whole copy.

    Raises BadInput for ranks, a grid or a split that do not fit the model, and for a folder that holds
    something else; NotCommitted and CorruptCheckpoint for the source; StorageError.
    """
    grid = grid_of(grid) if isinstance(grid, str) else grid
    numbers = ranks_of(ranks) if isinstance(ranks, str) else ranks_of(ranks_text(ranks))
    for rank in (numbers[0], numbers[-1]):
        grid.coordinates(rank)  # raises if the grid has no such rank
    if vocabulary is not None and vocabulary < 1:
        raise BadInput(f"vocabulary must be at least 1, not {vocabulary}.")
    store = open_store(source)
    with open_source(store) as opened:
        _check_source(store, opened)
        columns = opened.select()
        specs = {
            name: TensorSpec(name, int(columns.dtype[row]), columns.shape_of(row), int(columns.kind[row]))
            for row, name in enumerate(columns.names)
        }
        find = _needs_of(opened, specs, vocabulary or 0, weights_only)
        by_rank = find(grid, numbers, split)
        needs = together(by_rank.values())
        step = opened.about.get("step")
        files = _files(columns, specs, needs)
        written, path = 0, None
        if to is not None:
            kind = PUBLISHED if isinstance(opened, PublishedModel) else CHECKPOINT
            what = Fetched(kind, ranks_text(numbers), grid.text(), columns, specs, needs)
            report = progress or (lambda done, total: None)
            writer = SliceWriter(store, opened, open_store(to), what, report)
            written, path = writer.write(), writer.url
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


_Find = Callable[[Grid, Sequence[int], Sequence[int] | None], dict[int, Needs]]


def _needs_of(opened: Source, specs: dict[str, TensorSpec], words: int, weights_only: bool) -> _Find:
    """Return a function that finds what ranks need of a source."""
    view = opened.view_if_known if isinstance(opened, PublishedModel) else None
    is_published = isinstance(opened, PublishedModel)
    sizes = sizes_published(view, specs, words) if is_published else sizes_stored(specs, words)

    def find(grid: Grid, ranks: Sequence[int], split: Sequence[int] | None) -> dict[int, Needs]:
        stages = stages_of(grid, sizes.layers, split)
        # Data-parallel ranks need the same, so it is computed once.
        known: dict[tuple[RankShare, int], Needs] = {}
        needs = {}
        for rank in ranks:
            share = share_of(grid, rank, sizes, stages)
            key = (share, -1 if is_published else rank)
            if key not in known:
                known[key] = (
                    of_published(view, specs, share)
                    if is_published
                    else of_stored(specs, share, rank, weights_only)
                )
            needs[rank] = known[key]
        return needs

    return find


def _nbytes(needs: Needs, specs: dict[str, TensorSpec]) -> int:
    return sum(
        box.volume * DTYPES[specs[name].dtype].size for name, boxes in needs.boxes.items() for box in boxes
    )


def _files(columns: Columns, specs: dict[str, TensorSpec], needs: Needs) -> tuple[FileNeeds, ...]:
    """Return the byte ranges of each file that hold what is needed."""
    rows = {name: row for row, name in enumerate(columns.names)}
    table = ShardTable()
    for name, boxes in needs.boxes.items():
        for box in boxes:
            table.specs.append(specs[name])
            table.boxes.append(box)
    arrays, lead = table.arrays(), columns.dims
    missing = lead - arrays.dims
    pairs = overlaps(
        len(columns.names),
        np.asarray([rows[spec.name] for spec in table.specs], np.int64),
        np.pad(arrays.offset, ((0, 0), (missing, 0))),
        np.pad(arrays.size, ((0, 0), (missing, 0)), constant_values=1),
        columns.tensor_of_chunk(),
        columns.offset,
        columns.size,
    )
    return tuple(
        FileNeeds(name, sum(run.nbytes for run in runs), sum(run.count for run in runs), tuple(runs))
        for name, runs in byte_ranges(columns, pairs).items()
    )
