"""The other systems, and the machine itself, behind one small interface.

Each side is given the same pieces and the same tensors and turns them into the state it is used to;
that part is not timed. All are durable as far as they go: files are fsynced. No peer syncs directories.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import xxhash

from bench.moe_state import Layout, Piece, State, writers
from bench.shapes import Model

IOV_BATCH = 512  # below IOV_MAX
MIB = 1024 * 1024
BATCHES = (2 * MIB, 16 * MIB, 128 * MIB)
"""Bytes of a raw call: a cache's, between, and more than matters. Which is best depends on the file system."""


class Side:
    """One system on one rank. `prepare` is called again for another layout, after `release`."""

    name: str
    state: dict[str, Any]

    def prepare(self, model: Model, layout: Layout, own: Sequence[Piece], state: State) -> None:
        raise NotImplementedError

    def save(self, path: Path) -> Any:
        raise NotImplementedError

    def load(self, path: Path) -> Any:
        raise NotImplementedError

    def release(self) -> None:
        """Lets go of every tensor."""
        self.state = {}


def rank_of() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# ------------------------------------------------------------------------------------------------ raw


def view(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's own bytes."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


@dataclass(frozen=True)
class Batch:
    """What one call moves: buffers, and where in the file their bytes begin."""

    offset: int
    buffers: list[memoryview]


def batched(buffers: Sequence[memoryview], limit: int, offset: int = 0) -> list[Batch]:
    """Cut buffers that follow each other in a file into calls of at most `limit` bytes and IOV_BATCH buffers."""
    found, some, size = list[Batch](), list[memoryview](), 0
    for buffer in buffers:
        for low in range(0, len(buffer), limit):
            part = buffer[low : low + limit]
            if some and (size + len(part) > limit or len(some) == IOV_BATCH):
                found.append(Batch(offset, some))
                offset, some, size = offset + size, [], 0
            some.append(part)
            size += len(part)
    return [*found, Batch(offset, some)] if some else found


def write_all(path: Path, batches: Sequence[Batch]) -> None:
    """Write a new file and sync it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for batch in batches:
            _whole(os.pwritev, fd, batch.buffers, batch.offset)
        os.fsync(fd)
    finally:
        os.close(fd)


def read_all(path: Path, batches: Sequence[Batch], digested: int = 0) -> None:
    """Read calls that were made up beforehand. digested: bytes of each block that is digested after its call; 0: none."""
    fd = os.open(path, os.O_RDONLY)
    try:
        for batch in batches:
            _whole(os.preadv, fd, batch.buffers, batch.offset)
            for buffer in batch.buffers if digested else ():
                for low in range(0, len(buffer), digested):
                    xxhash.xxh3_64_intdigest(buffer[low : low + digested])
    finally:
        os.close(fd)


def _whole(call: Any, fd: int, batch: list[memoryview], offset: int) -> int:
    want = done = sum(len(buffer) for buffer in batch)
    done = call(fd, batch, offset)
    while done < want:
        rest, skip = [], done
        for buffer in batch:
            if skip < len(buffer):
                rest.append(buffer[skip:])
            skip = max(0, skip - len(buffer))
        count = call(fd, rest, offset + done)
        if count <= 0:
            raise OSError(f"{call.__name__} stopped at {done} of {want} bytes")
        done += count
    return want


class Raw(Side):
    """The machine's limit: the same deduplicated bytes by plain pwritev and fsync, read back by preadv.

    Its calls are made up beforehand, in `prepare`, and the clock sees nothing but them. A piece that is a
    slice of what was written is read as one run of the same length from where its tensor lies: as many bytes
    as are needed, in the cheapest shape (so its values are not the slice's). What lies side by side in a file
    is read by one call.
    """

    name = "raw"
    digested = 0

    def __init__(self, limit: int = BATCHES[0]) -> None:
        self.limit = limit  # bytes a call
        self.index: dict[str, tuple[int, int, int]] = {}  # name -> rank file, offset, length

    def prepare(self, model: Model, layout: Layout, own: Sequence[Piece], state: State) -> None:
        if not self.index:
            shares = writers(model, layout)
            for rank, share in enumerate(shares):
                offset = 0
                for piece in share:
                    self.index[piece.name] = (rank, offset, piece.nbytes)
                    offset += piece.nbytes
            self.writes = batched([view(state[piece.name]) for piece in shares[rank_of()]], self.limit)
        self.reads = self._reads(own, state)

    def _reads(self, own: Sequence[Piece], state: State) -> dict[int, list[Batch]]:
        """The calls that read each rank's file."""
        runs = []
        for piece in own:
            rank, offset, length = self.index[piece.name]
            inside = min(piece.offset[0] * length // piece.global_shape[0], length - piece.nbytes)
            runs.append((rank, offset + inside, view(state[piece.name])))
        found: dict[int, list[Batch]] = {}
        together: list[memoryview] = []
        begin, end = (-1, 0), (-1, 0)
        for rank, offset, buffer in [*sorted(runs, key=lambda run: run[:2]), (-1, -1, memoryview(b""))]:
            if (rank, offset) != end:
                if together:
                    found.setdefault(begin[0], []).extend(batched(together, self.limit, begin[1]))
                together, begin = [], (rank, offset)
            together.append(buffer)
            end = (rank, offset + len(buffer))
        return found

    def save(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        write_all(path / f"{rank_of()}.bin", self.writes)

    def load(self, path: Path) -> None:
        for rank, batches in self.reads.items():
            read_all(path / f"{rank}.bin", batches, self.digested)

    def release(self) -> None:
        super().release()
        self.writes, self.reads = [], {}

    def exact(self, piece: Piece) -> bool:
        """Whether the run that was read is the piece itself."""
        return piece.shape[1:] == piece.global_shape[1:]


# ------------------------------------------------------------------------------------------ torch DCP


class Verified(Raw):
    """The limit of a load that verifies: raw reads, and a digest of each block while it is in cache."""

    name = "verified"
    digested = 128 << 10


class Dcp(Side):
    """torch.distributed.checkpoint as it comes: sync_files=True, one thread.

    Experts are plain tensors with unique names (DCP drops the DP replicas), dense tensors plain
    replicas: cheaper for its planner than replicated DTensors. What tensor parallelism cuts is a DTensor.
    """

    name = "DCP"

    def prepare(self, model: Model, layout: Layout, own: Sequence[Piece], state: State) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
        self.state = dict(state)
        if layout.tp == 1:
            return
        mesh = init_device_mesh("cpu", (layout.dp, layout.ep, layout.tp), mesh_dim_names=("dp", "ep", "tp"))
        expert_mesh = mesh["dp", "tp"]
        for p in own:
            if p.cut_dim is None:
                continue
            where, copies = (expert_mesh, 1) if p.expert else (mesh, 2)
            placements = [Replicate()] * copies + [Shard(p.cut_dim)]
            self.state[p.name] = DTensor.from_local(state[p.name], where, placements, run_check=False)

    def save(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state, checkpoint_id=path)  # type: ignore[attr-defined]

    def load(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(self.state, checkpoint_id=path)  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------------- megatron-core


def mcore_on_cpu() -> None:
    """megatron-core's checkpoint code names cuda in a few places; here these names mean the CPU.

    Adds no work: a device query, a synchronisation and `.cuda()` become nothing.
    """
    warnings.filterwarnings("ignore")
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    logging.getLogger("megatron").setLevel(logging.ERROR)


class Mcore(Side):
    """megatron-core dist_checkpointing: torch_dist, FullyParallelSaveStrategyWrapper, per-expert keys.

    The strategy lives as long as the job, as in Megatron's checkpointing_context. Loading is the plain
    load: FullyParallelLoad was slower on gloo.
    """

    name = "mcore"

    def prepare(self, model: Model, layout: Layout, own: Sequence[Piece], state: State) -> None:
        mcore_on_cpu()
        from megatron.core.dist_checkpointing.mapping import ShardedTensor
        from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
        from megatron.core.dist_checkpointing.strategies.fully_parallel import (
            FullyParallelSaveStrategyWrapper,
        )

        def sharded(p: Piece) -> Any:
            cuts = (
                []
                if p.cut_dim is None
                else [(p.cut_dim, p.offset[p.cut_dim] // p.shape[p.cut_dim], layout.tp)]
            )
            return ShardedTensor.from_rank_offsets(p.name, state[p.name], *cuts, replica_id=(0, 0, p.replica))

        self.state = state
        self.make: Callable[[], dict[str, Any]] = lambda: {p.name: sharded(p) for p in own}
        self.sharded = self.make()
        self.strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy())

    def save(self, path: Path) -> None:
        from megatron.core import dist_checkpointing

        path.mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(self.sharded, str(path), self.strategy)
        self.sharded = self.make()

    def load(self, path: Path) -> None:
        from megatron.core import dist_checkpointing

        loaded = dist_checkpointing.load(self.sharded, str(path))
        for name, tensor in self.state.items():
            if loaded[name].data_ptr() != tensor.data_ptr():
                tensor.copy_(loaded[name])
        self.sharded = self.make()

    def release(self) -> None:
        super().release()
        self.sharded, self.make = {}, dict


# --------------------------------------------------------------------------------- torch_checkpointing


class TorchOnCpu:
    """The torch module as one peer module sees it: a tensor asked for on cuda is made on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype)


def torch_checkpointing_on_cpu() -> None:
    """Its metadata exchange is written for CUDA; the same exchange over gloo, with no work added."""
    from torch_checkpointing import metadata_manager

    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    metadata_manager.torch = TorchOnCpu()  # type: ignore[attr-defined,assignment]


class TorchCheckpointing(Side):
    """torch_checkpointing from PyPI: synchronous saver, DefaultResharder (without it nothing can be resharded).

    Its natural state is DTensors: dense ones over the whole mesh, an expert over the ranks that hold it.
    It writes what each rank holds, replicas included. It does not fsync, so its callback does that here.
    A manager a save: from its second save on, a manager with the synchronous saver writes no metadata.pkl,
    and another layout then reads the files of its own rank number, wrong values included, without an error.
    Without CUDA its metadata exchange stops at `torch.tensor(..., device="cuda")`; see the shim.
    """

    name = "torch_checkpointing"

    def prepare(self, model: Model, layout: Layout, own: Sequence[Piece], state: State) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch_checkpointing import CheckpointManager, ItemSpec
        from torch_checkpointing.default_resharder import DefaultResharder

        torch_checkpointing_on_cpu()
        logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)

        def wrap(p: Piece) -> DTensor:
            last = Replicate() if p.cut_dim is None else Shard(p.cut_dim)
            where, copies = (expert_mesh, 1) if p.expert else (mesh, 2)
            return DTensor.from_local(state[p.name], where, [Replicate()] * copies + [last], run_check=False)

        mesh = init_device_mesh("cpu", (layout.dp, layout.ep, layout.tp), mesh_dim_names=("dp", "ep", "tp"))
        expert_mesh = mesh["dp", "tp"]
        self.state = {p.name: wrap(p) for p in own}
        config = CheckpointManager.Config.with_sync_save()
        config.items = {"model": ItemSpec(resharder=DefaultResharder())}
        config.pre_finalize_callback = fsync_own_files
        self.config = config
        self.loader = config.build()

    def save(self, path: Path) -> None:
        self.config.build().save(str(path), {"model": self.state})

    def load(self, path: Path) -> None:
        self.loader.load(str(path), into={"model": self.state})


def fsync_own_files(args: Any) -> None:
    for path in Path(args.path).glob(f"*_{rank_of()}.pt"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


# ------------------------------------------------------------------------------------------- holdfast


class Ours(Side):
    """Holdfast: every tensor an explicit shard of its global tensor, with its replica number."""

    name = "holdfast"
    job: Any = None

    def prepare(self, model: Model, layout: Layout, own: Sequence[Piece], state: State) -> None:
        import holdfast

        self.state = {
            p.name: holdfast.Shard(
                state[p.name],
                global_shape=p.global_shape,
                offset=p.offset,
                replica=(p.replica, len(p.owners)),
            )
            for p in own
        }

    def save(self, path: Path) -> Any:
        import holdfast

        return holdfast.save(self.state, path, job=self.job)

    def load(self, path: Path) -> Any:
        import holdfast

        return holdfast.load(self.state, path)


class OursInColumns(Ours):
    """Holdfast, told which matrices may be cut along their columns (Megatron's RowParallelLinear)."""

    name = "holdfast in columns"

    def __init__(self) -> None:
        import holdfast

        options = holdfast.Options(columns=("*.down_proj.weight", "*.o_proj.weight"))
        self.job = holdfast.Job(options=options)


# ------------------------------------------------------- plain tensors, which only this rank holds


class Plain(Protocol):
    """A side for tensors that are nobody else's."""

    name: str

    def __init__(self, state: State) -> None: ...

    def save(self, path: Path) -> Any: ...

    def load(self, path: Path) -> Any: ...


class Floor:
    """The least that can be done for a tensor: an iovec in one pwritev of many; preadv straight into place.

    The calls are made up once, not in each save: what is measured is the kernel's part, and no Python a tensor.
    """

    name = "floor"

    def __init__(self, state: State) -> None:
        self.batches = batched([view(tensor) for tensor in state.values()], BATCHES[0])

    def save(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        write_all(path / f"{rank_of()}.bin", self.batches)

    def load(self, path: Path) -> None:
        read_all(path / f"{rank_of()}.bin", self.batches)


class Safetensors:
    """safetensors: save_file (no fsync, no digest), load_file and a copy into the live tensors."""

    name = "safetensors"

    def __init__(self, state: State) -> None:
        self.state = state

    def save(self, path: Path) -> None:
        from safetensors.torch import save_file

        path.mkdir(parents=True, exist_ok=True)
        save_file(self.state, path / f"{rank_of()}.safetensors")

    def load(self, path: Path) -> None:
        from safetensors.torch import load_file

        for name, tensor in load_file(path / f"{rank_of()}.safetensors").items():
            self.state[name].copy_(tensor)


class PlainDcp(Dcp):
    def __init__(self, state: State) -> None:
        logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
        self.state = dict(state)


class PlainOurs(Ours):
    def __init__(self, state: State) -> None:
        self.state = dict(state)


PLAIN: dict[str, type[Plain]] = {
    "floor": Floor,
    "safetensors": Safetensors,
    "DCP": PlainDcp,
    "holdfast": PlainOurs,
}
SIDES: dict[str, type] = {
    cls.name: cls for cls in (Raw, Verified, Dcp, Mcore, TorchCheckpointing, Ours, OursInColumns)
}
