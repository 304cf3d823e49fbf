"""What some ranks need of a checkpoint or a published model: which bytes of which files, and a copy of just
these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from holdfast.errors import BadInput
from holdfast.format.columns import Columns
from holdfast.format.slice import CHECKPOINT, PUBLISHED
from holdfast.io.hugging_face import PublishedModel
from holdfast.io.open_checkpoint import Source, TorchDist, open_source
from holdfast.io.slice import Slice
from holdfast.layout.grid import Grid, grid_of
from holdfast.layout.ranks import ranks_of, ranks_text
from holdfast.layout.tensor import DTYPES, TensorSpec
from holdfast.maintenance.slice_writer import Fetched, SliceWriter
from holdfast.maintenance.target import Place
from holdfast.plan.byte_ranges import ByteRange, byte_ranges
from holdfast.plan.read import overlaps
from holdfast.plan.shard_table import ShardTable
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
"""Called with the bytes done and the bytes of the whole."""


class RankNeeds(msgspec.Struct, frozen=True):
    """What one rank needs."""

    rank: int
    tensors: int
    bytes: int


class FileNeeds(msgspec.Struct, frozen=True):
    """What the ranks need of one file of the source."""

    name: str
    bytes: int
    ranges: int
    places: tuple[ByteRange, ...]


class FetchReport(msgspec.Struct, frozen=True):
    """What ranks need, and what was copied."""

    source: str
    step: int | None
    ranks: str
    grid: str
    tensors: int
    """That at least one of the ranks needs something of."""
    bytes: int
    """Of their elements, each once, however many of the ranks need it."""
    bytes_of_files: int
    """That hold them: more than `bytes` where digests cover blocks."""
    bytes_in_all: int
    """Of all tensors of the source."""
    by_rank: tuple[RankNeeds, ...]
    files: tuple[FileNeeds, ...]
    taken_whole: tuple[str, ...]
    """Names of which it is not known how ranks share them."""
    path: str | None = None
    """The folder with the copy."""
    bytes_written: int = 0
    """By this call; files that an earlier one had finished are not counted."""


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
    """Find what ranks need of a checkpoint or a published model, and copy just that to a folder of theirs.

        >>> huggingface.fetch("Qwen3-30B-A3B", "8-15", "world=64,tp=2,pp=4,ep=8", "/local/Qwen3-30B-A3B")

    These ranks load from the copy, in this grid, with nothing else present; others get MissingTensors. One
    process, a few hundred MB of memory, no torch. After an interruption the same call goes on.

    source: the folder of a published model, or a committed Holdfast checkpoint of megatron-core's model.
    ranks: such as those of one host: "8-15", or numbers.
    grid: how the ranks of the job share the model: a `Grid`, or a text such as "world=64,tp=2,pp=4,ep=8".
    to: a new folder, or that of a fetch that was interrupted; None: nothing is copied.
    split: how many layers each model chunk has, in the order of the model: pp x vpp numbers. None: all the
        same.
    vocabulary: rows of the model's embedding, with its padding. None: as many as a checkpoint has; of a
        published model rows for any padding up to a multiple of 128 x tp.
    weights_only: of a checkpoint: leave out the optimizer's state and the states of random generators.
    progress: called with the bytes copied, and the bytes of the whole copy.

    Raises BadInput for ranks, a grid or a split that do not fit the model, and for a folder that holds
    something else; NotCommitted and CorruptCheckpoint for the source; StorageError.
    """
    grid = grid_of(grid) if isinstance(grid, str) else grid
    numbers = ranks_of(ranks) if isinstance(ranks, str) else ranks_of(ranks_text(ranks))
    for rank in (numbers[0], numbers[-1]):
        grid.coordinates(rank)  # refuses one that the grid does not have
    if vocabulary is not None and vocabulary < 1:
        raise BadInput(f"vocabulary must be at least 1, not {vocabulary}.")
    store = open_store(source)
    with open_source(store) as opened:
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
            writer = SliceWriter(store, opened, open_store(to), what, progress or _quiet)
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


def _quiet(done: int, total: int) -> None:
    pass


_Find = Callable[[Grid, Sequence[int], Sequence[int] | None], dict[int, Needs]]


def _needs_of(opened: Source, specs: dict[str, TensorSpec], words: int, weights_only: bool) -> _Find:
    """How to find what ranks need of a source."""
    view = opened.view_if_known if isinstance(opened, PublishedModel) else None
    is_published = isinstance(opened, PublishedModel)
    sizes = sizes_published(view, specs, words) if is_published else sizes_stored(specs, words)

    def find(grid: Grid, ranks: Sequence[int], split: Sequence[int] | None) -> dict[int, Needs]:
        stages = stages_of(grid, sizes.layers, split)
        # Data-parallel ranks need the same, so it is found once.
        known: dict[tuple[RankShare, int], Needs] = {}
        found = {}
        for rank in ranks:
            share = share_of(grid, rank, sizes, stages)
            key = (share, -1 if is_published else rank)
            if key not in known:
                known[key] = (
                    of_published(view, specs, share)
                    if is_published
                    else of_stored(specs, share, rank, weights_only)
                )
            found[rank] = known[key]
        return found

    return find


def _nbytes(needs: Needs, specs: dict[str, TensorSpec]) -> int:
    return sum(
        box.volume * DTYPES[specs[name].dtype].size for name, boxes in needs.boxes.items() for box in boxes
    )


def _files(columns: Columns, specs: dict[str, TensorSpec], needs: Needs) -> tuple[FileNeeds, ...]:
    """Which bytes of which files that is."""
    row = {name: at for at, name in enumerate(columns.names)}
    table = ShardTable()
    for name, boxes in needs.boxes.items():
        for box in boxes:
            table.specs.append(specs[name])
            table.boxes.append(box)
    arrays, lead = table.arrays(), columns.dims
    missing = lead - arrays.dims
    pairs = overlaps(
        len(columns.names),
        np.asarray([row[spec.name] for spec in table.specs], np.int64),
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
