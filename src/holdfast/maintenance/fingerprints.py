"""Fingerprints of a live state, over all ranks that hold it: sums of what each has, without a gather.

A shard of which several ranks have a declared copy is summed by the first of them. What nobody has declared,
such as the plain tensors of data-parallel ranks, is summed by each that has it, and must be the same on all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from holdfast.buffers import Buffer
from holdfast.errors import BadInput, CoverageError, HoldfastError, ReplicaMismatch
from holdfast.format.digest import digest, hex_digest
from holdfast.format.fingerprint import Sums, box_sums, nothing, text_of
from holdfast.format.names import is_weight
from holdfast.io.raw_read import slabs
from holdfast.layout.box import Box, Dims
from holdfast.layout.tensor import DTYPES, OBJECT, TensorSpec
from holdfast.plan.merge import what
from holdfast.plan.shard_table import ShardTable
from holdfast.protocol.call import Call, begin_call
from holdfast.protocol.messages import from_roster
from holdfast.protocol.operation import read_state
from holdfast.protocol.task import CollectiveTask
from holdfast.roster.base import Message, Roster
from holdfast.state.cuda_streams import CallerStreams
from holdfast.state.flatten import Flat, build_shard_table, flatten, select

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SLAB = 16 << 20
"""Bytes that are copied from a device, or made row-major, at a time."""


class Fingerprint(msgspec.Struct, frozen=True):
    """128 bits of a tensor that do not depend on its layout over ranks."""

    dtype: str
    shape: Dims
    """Of the whole tensor."""
    value: str
    """32 hex digits."""


def fingerprint(
    state_dict: Mapping[str, object],
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    participants: Iterable[int] | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    timeout: float = 1800.0,
    stall_timeout: float = 120.0,
    roster: Roster | None = None,
) -> dict[str, Fingerprint]:
    """Take the fingerprints of all weights of a state, in whatever layout the ranks have it.

    All participants call it, and all get the same answer. It issues no collective, and gathers no weights.
    Equal weights have equal fingerprints on any number of ranks, and those that a save notes in the index
    (`Options(fingerprint=True)`) are the same numbers.

    state_dict: nested dict, as `holdfast.save` takes it. State of optimizers and objects are left out.
    include, exclude: shell patterns of names; `model` means everything under it.
    participants: ranks of the default process group that take part, ascending or not; default all. Other
        ranks must not call.
    process_group: the same, as a group of torch.distributed.
    no_dist: this process alone, whether or not torch.distributed is initialised.
    timeout: seconds from this call until it fails, however well it goes.
    stall_timeout: seconds that a rank may go without any progress before it is given up.
    roster: a coordination store to use in place of torch.distributed's.

    Raises BadInput for arguments and state, ReplicaMismatch where ranks hold different things under one name,
    CoverageError for a tensor of which a part is on no rank, RankFailed and DeadlineExceeded for other ranks.
    """
    call = begin_call(
        roster,
        no_dist=no_dist,
        participants=participants,
        process_group=process_group,
        timeout=timeout,
        stall_timeout=stall_timeout,
    )
    return fingerprint_leaves(lambda rank: flatten(state_dict, rank), call, include, exclude)


def fingerprint_leaves(
    collect: Callable[[int], Flat],
    call: Call,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
) -> dict[str, Fingerprint]:
    """`fingerprint` of what `collect` yields for a rank."""
    task = _Task(call)

    def read() -> None:
        leaves = select(collect(call.rank).leaves, include, exclude)
        table, _ = build_shard_table(leaves, call.rank, call.participants)
        task.take(table)

    task.trouble = read_state(read, call.rank)
    return msgspec.convert(task.run(), dict[str, Fingerprint])


class _Rows(msgspec.Struct):
    """What a rank has summed: the sums of declared rows by name, and each undeclared row for itself."""

    specs: dict[str, tuple[int, Dims]]
    sums: dict[str, tuple[int, int, int]]
    """Both sums and how many elements."""
    undeclared: list[tuple[str, Dims, Dims, int, int]]
    """Name, box, both sums; of the first of those ranks that have the same."""


class _Task(CollectiveTask):
    kind = "fingerprint"

    def __init__(self, call: Call) -> None:
        super().__init__("fingerprint of the state", "memory:fingerprint", call)
        self.trouble: HoldfastError | None = None
        """What reading the state met; all ranks hear of it."""
        self._table = ShardTable(call.rank)
        self._streams = CallerStreams(self._table)
        self._said = _Rows({}, {}, [])
        self._undeclared: list[tuple[str, Dims, Dims, int, int]] = []

    def take(self, table: ShardTable) -> None:
        """The rows of this rank's state."""
        if any(late is not None for late in table.deferred):
            raise BadInput(
                "The offsets of some shards are known to all ranks together only; such a state has no "
                "fingerprint."
            )
        self._table = table
        self._streams = CallerStreams(table)  # on the caller's thread, whose streams these are

    # -- what the protocol asks -------------------------------------------------------------------

    def contribute(self) -> Message:
        if self.trouble is not None:
            raise self.trouble
        self._streams.wait()
        for row, (spec, box) in enumerate(zip(self._table.specs, self._table.boxes, strict=True)):
            if spec.kind == OBJECT or not is_weight(spec.name):
                continue
            self._said.specs[spec.name] = (spec.dtype, spec.shape)
            replica = self._table.replicas[row]
            if replica is None:
                self._undeclared.append((spec.name, box.offset, box.shape, *self._sums(row)))
            elif replica[0] == 0:
                first, second = self._sums(row)
                known = self._said.sums.get(spec.name, (0, 0, 0))
                self._said.sums[spec.name] = (
                    known[0] + first & _MASK,
                    known[1] + second & _MASK,
                    known[2] + box.volume,
                )
        # In place of the rows, of which mostly all ranks have the same.
        return {"undeclared": hex_digest(digest(msgspec.json.encode(self._undeclared)))}

    def decide(self, said: dict[int, Message]) -> dict[int, Message]:
        first: dict[str, int] = {}
        for rank, message in said.items():
            first.setdefault(message["undeclared"], rank)
        return {rank: {"wanted": rank in first.values()} for rank in said}

    def execute(self, answer: Message) -> Message:
        if answer["wanted"]:
            self._said.undeclared = self._undeclared
        message: Message = msgspec.to_builtins(self._said)
        return message

    def finish(self, reports: dict[int, Message]) -> Message:
        whole = _Whole()
        for rank, message in reports.items():
            whole.add(rank, from_roster(message, _Rows, rank))
        found: Message = msgspec.to_builtins(whole.result())
        return found

    def _sums(self, row: int) -> tuple[int, int]:
        first, second = self._sums_of(row)
        self.operation.tick()
        return int(first), int(second)

    def _sums_of(self, row: int) -> Sums:
        spec, box, memory = self._table.specs[row], self._table.boxes[row], self._table.memory[row]
        itemsize = DTYPES[spec.dtype].size
        if memory.address:
            data: Buffer = (ctypes.c_ubyte * (box.volume * itemsize)).from_address(memory.address)
            return box_sums(data, itemsize, box)
        sums = nothing()
        for part in slabs(box, itemsize, _SLAB):
            out = memoryview(bytearray(part.volume * itemsize))
            memory.gather(part.relative_to(box.offset), out)
            sums += box_sums(out, itemsize, part)
            self.operation.tick()
        return sums


_MASK = (1 << 64) - 1


class _Whole:
    """The sums of all ranks."""

    def __init__(self) -> None:
        self._specs: dict[str, tuple[int, tuple[int, Dims]]] = {}
        """By name the first rank that has it, and what it is there."""
        self._sums: dict[str, list[int]] = {}
        """Both sums, and how many elements."""
        self._undeclared: dict[tuple[str, Dims, Dims], tuple[int, tuple[int, int]]] = {}
        """By name and box the first rank that has it, and its sums."""

    def add(self, rank: int, rows: _Rows) -> None:
        for name, spec in rows.specs.items():
            first, known = self._specs.setdefault(name, (rank, spec))
            if known != spec:
                raise ReplicaMismatch(
                    f"Ranks disagree on {name!r}: rank {first} holds {what(0, *known)}, rank {rank} "
                    f"{what(0, *spec)}.",
                    rank=rank,
                    details={"tensor": name, "ranks": [first, rank]},
                )
        for name, (a, b, many) in rows.sums.items():
            self._count(name, a, b, many)
        for name, offset, shape, a, b in rows.undeclared:
            first, sums = self._undeclared.setdefault((name, offset, shape), (rank, (a, b)))
            if sums != (a, b):
                raise ReplicaMismatch(
                    f"Ranks {first} and {rank} hold different elements of {name!r}.",
                    rank=rank,
                    hint="If every rank has its own value, give it a name of its own.",
                    details={"tensor": name, "ranks": [first, rank]},
                )
            if first == rank:
                self._count(name, a, b, Box(offset, shape).volume)

    def _count(self, name: str, a: int, b: int, many: int) -> None:
        known = self._sums.setdefault(name, [0, 0, 0])
        known[:] = known[0] + a & _MASK, known[1] + b & _MASK, known[2] + many

    def result(self) -> dict[str, Fingerprint]:
        found = {}
        for name in sorted(self._specs):
            rank, (dtype, shape) = self._specs[name]
            a, b, many = self._sums[name]
            spec = TensorSpec(name, dtype, shape)
            expected = int(np.prod(spec.shape, dtype=np.int64))
            if many != expected:
                raise CoverageError(
                    f"The ranks hold {many} elements of {name!r}, which has {expected}.",
                    rank=rank,
                    hint="Every rank that holds a part must take part.",
                    details={"tensor": name},
                )
            found[name] = Fingerprint(DTYPES[dtype].name, shape, text_of(np.asarray([a, b], np.uint64)))
        return found
