"""`load`: from a committed checkpoint into a user's state, in place, in any layout."""

from __future__ import annotations

import os
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from holdfast.adapters.memory import BytesMemory, TensorMemory
from holdfast.adapters.state import Flat, Leaf, flatten, hold, is_selected, select
from holdfast.adapters.tensors import Unborn
from holdfast.errors import (
    BadInput,
    CorruptCheckpoint,
    HoldfastError,
    LoadFailed,
    MissingTensors,
    NotCommitted,
    Replaced,
    ShapeMismatch,
    Unplaced,
)
from holdfast.flow.commit import VISIBLE_WITHIN
from holdfast.flow.lengths import Lengths, put_in_place, unplaced
from holdfast.flow.operation import Operation, read_state
from holdfast.flow.phases import LOAD_TRANSITIONS
from holdfast.flow.protocol import load_steps
from holdfast.flow.read import plan_read, read_into
from holdfast.flow.sources import Source, open_source
from holdfast.flow.world import find_participants, find_roster, the_place
from holdfast.format import objects
from holdfast.format.columns import Columns
from holdfast.layout.box import Box, Dims, whole
from holdfast.layout.tensor import DTYPES, KINDS, OBJECT, TENSOR, TensorSpec, listed, nearest
from holdfast.options import Options
from holdfast.plan.holding import Holding, describe
from holdfast.plan.merge import what
from holdfast.roster.base import Message, Roster
from holdfast.store.base import NotFound, Store
from holdfast.store.local import open_store


class LoadReport(msgspec.Struct, frozen=True):
    """What a load did on this rank."""

    path: str
    step: int | None
    tensors: int
    """Names that were filled, objects included."""
    bytes_needed: int
    """Of the checkpoint's tensors, by this rank."""
    bytes_read: int
    """By this rank, the index included."""
    seconds: float
    missing: tuple[str, ...] = ()
    """Names that the state has and the checkpoint does not: they kept their values (strict=False), or an optimizer still has
    no state under them."""


@dataclass
class _Work:
    """The load of one rank, as the protocol wants it."""

    store: Store
    held: Holding
    strict: bool
    options: Options
    operation: Operation
    leaves: list[Leaf] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    """Per row of `held`, its leaf."""
    trouble: HoldfastError | None = None
    step: int | None = None
    needed: int = 0
    bytes_read: int = 0
    missing: list[str] = field(default_factory=list)
    filled: list[int] = field(default_factory=list)
    """Leaves that were filled."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes of each object that was read, by leaf."""
    prefix: bytes = b""
    values: dict[int, Any] = field(default_factory=dict)
    """Objects that were read, by leaf."""
    born: list[tuple[Leaf, dict[str, Any]]] = field(default_factory=list)
    """What takes the place of an `Unborn`, or of a list that the checkpoint has in parts."""
    patterns: tuple[Sequence[str] | None, Sequence[str] | None] = (None, None)
    """include, exclude"""
    _at: dict[tuple[int, Dims], int] | None = None

    def choose(self) -> Message:
        if self.trouble is not None:
            raise self.trouble
        with open_source(self.store) as index:
            return {"identity": index.identity, "created": index.about.get("created")}

    def read(self, chosen: Message) -> Message:
        if self.trouble is not None:
            raise self.trouble
        self._wait_for(chosen)
        with open_source(self.store) as index:
            if index.identity != chosen["identity"]:
                raise self._replaced()
            self.step = index.about.get("step")
            try:
                self._read(index)
            except NotFound as error:
                if self._still(chosen["identity"]):
                    raise CorruptCheckpoint(
                        f"A data file of {self.store.url} is missing: {error.message}",
                        hint="Load an older step, or another copy of this one.",
                    ) from None
                raise self._replaced() from None
        self._decode()
        return {"bytes": self.bytes_read}

    def _read(self, index: Source) -> None:
        self._give_birth(index)
        rows = index.find([spec.name for spec in self.held.specs])
        keep = self._check_missing(rows, index)
        held = Holding(self.held.rank)
        tensors, position = np.unique(rows[keep], return_inverse=True)
        columns = index.select(tensors)
        for place, row in enumerate(keep):
            self._take(held, row, columns, int(position[place]))
        plan = plan_read(held, position, columns, index.where)
        self.needed = plan.bytes_needed
        read = read_into(
            self.store,
            held,
            columns,
            plan,
            self.options.writer_threads,
            lambda moved: self.operation.progress(moved, self.needed),
        )
        self.bytes_read = read + index.bytes_read
        self.prefix = index.object_prefix
        self.filled = [self.owner[row] for row in keep]
        objects_read = [place for place in range(len(keep)) if held.specs[place].kind == OBJECT]
        self.sizes = {self.filled[place]: held.specs[place].shape[0] for place in objects_read}

    def _give_birth(self, index: Source) -> None:
        """Leaves and rows for what the checkpoint has where the state has nothing yet."""
        unborn = [leaf for leaf in self.leaves if isinstance(leaf.value, Unborn)]
        lists = [leaf for leaf in self.leaves if isinstance(leaf.value, list)]
        there = index.find([leaf.name for leaf in lists]).tolist()
        lists = [leaf for leaf, row in zip(lists, there, strict=True) if row < 0]
        if not unborn and not lists:
            return
        names, known = index.names(), {leaf.name for leaf in self.leaves}
        for leaf in lists:
            first, stop = _under(names, leaf.name)
            keys = [name[len(leaf.name) + 1 :] for name in names[first:stop]]
            if _are_parts_of_a_list(keys):
                leaf.optional = True  # it is there in parts
                self._bear(leaf, keys, index.select(np.arange(first, stop)))
        filled = False
        for leaf in unborn:
            first, stop = _under(names, leaf.name)
            keys = [name[len(leaf.name) + 1 :] for name in names[first:stop]]
            other = [
                f"{leaf.name}.{key}" in known or f"{leaf.name}.{key.rpartition('.')[0]}" in known
                for key in keys
            ]
            nested = [key for key, is_other in zip(keys, other, strict=True) if "." in key and not is_other]
            if nested:
                raise BadInput(
                    f"{self.store.url} has a nested state {nested[0]!r} under {leaf.name!r}, for which the optimizer has nothing yet.",
                    hint="How it is built only the optimizer knows: let it take a step before the load.",
                )
            rows = [
                at
                for at, (key, is_other) in enumerate(zip(keys, other, strict=True))
                if not is_other and is_selected(f"{leaf.name}.{key}", *self.patterns)
            ]
            filled = filled or bool(rows)
            if rows:
                self._bear(leaf, [keys[at] for at in rows], index.select(first + np.asarray(rows)))
            else:
                self.missing.append(leaf.name)
        self._refuse_strangers(unborn, filled, names)

    def _bear(self, leaf: Leaf, keys: list[str], columns: Columns) -> None:
        """Leaves for parts of a leaf, and rows for those."""
        value, born, new = leaf.value, dict[str, Any](), list[Leaf]()
        for at, key in enumerate(keys):
            made = None
            if int(columns.kind[at]) == TENSOR:
                dtype, shape = getattr(torch, DTYPES[int(columns.dtype[at])].name), columns.shape_of(at)
                made = born[key] = (
                    value.make(key, dtype, shape)
                    if isinstance(value, Unborn)
                    else torch.zeros(shape, dtype=dtype)
                )
            new.append(Leaf(columns.names[at], made, partial(born.__setitem__, key)))
        self.born.append((leaf, born))
        held, owner = hold(new, self.held.rank, self.operation.at.participants, for_load=True)
        if isinstance(value, Unborn):
            self._lie_like(held, value.like)
        self.owner += [len(self.leaves) + at for at in owner]
        self.leaves += new
        self.held.extend(held)

    def _lie_like(self, held: Holding, like: torch.Tensor) -> None:
        """Give uneven shards the box of the parameter's shard, whose place all ranks have settled."""
        late = [row for row, found in enumerate(held.lates) if found is not None and held.boxes[row].volume]
        if not late:
            return
        address = like._local_tensor.data_ptr()  # type: ignore[attr-defined]
        of = self._parameters()
        for row in late:
            parameter = of.get((address, held.boxes[row].shape))
            if parameter is not None:
                held.boxes[row] = self.held.boxes[parameter]
            elif held.lates[row].start == -1:  # type: ignore[union-attr]
                raise BadInput(
                    f"Rank {held.rank} holds a part of {held.specs[row].name!r} whose offset it does not know, and its parameter is "
                    "not in the state.",
                    hint="Load the model together with its optimizer, or let the optimizer take a step before.",
                )

    def _parameters(self) -> dict[tuple[int, Dims], int]:
        """Rows of uneven shards, by what memory they have."""
        if self._at is None:
            self._at = {
                (memory.tensor.data_ptr(), box.shape): row
                for row, (memory, box, late) in enumerate(
                    zip(self.held.memory, self.held.boxes, self.held.lates, strict=True)
                )
                if late is not None and isinstance(memory, TensorMemory)
            }
        return self._at

    def _refuse_strangers(self, unborn: list[Leaf], filled: bool, names: list[str]) -> None:
        """An optimizer of other names: none of its states is there, and others are."""
        if filled or not unborn or not self.strict:
            return
        found = [re.match(r"(?:.*?\.)?state(?=\.)", leaf.name) for leaf in unborn]
        parents = {match[0] for match in found if match is not None}
        known = {leaf.name for leaf in self.leaves}
        for parent in parents:
            first, stop = _under(names, parent)
            other = next((name for name in names[first:stop] if name not in known), None)
            if other is not None and is_selected(other, *self.patterns):
                raise MissingTensors(
                    f"{self.store.url} has nothing of {unborn[0].name!r}, nor of any other state that this optimizer lacks; it has "
                    f"{other!r}.",
                    hint="Build the model and the optimizer as they were saved, or leave the optimizer out with exclude=.",
                    details={"missing": [leaf.name for leaf in unborn[:100]]},
                )

    def _replaced(self) -> Replaced:
        return Replaced(
            f"{self.store.url} was replaced or removed while rank {self.held.rank} loaded it.",
            hint="Load again.",
        )

    def _still(self, identity: str) -> bool:
        """Is the version that this load began with the one that is there?"""
        try:
            with open_source(self.store) as index:
                return index.identity == identity
        except HoldfastError:
            return False

    def tidy(self) -> None:
        at = self.operation.at
        with suppress(HoldfastError):
            self.operation.roster.delete(
                [at.said("read", rank) for rank in at.participants if rank != at.rank]
            )

    def _wait_for(self, chosen: Message) -> None:
        """Until the version that the committer chose is visible here; a network file system may show it
        late. Another version that is newer, or that the committer itself sees, has replaced it."""
        at = self.operation.at
        ends = at.clock.now() + min(VISIBLE_WITHIN, at.deadline.left())
        while True:
            with suppress(NotCommitted), open_source(self.store) as index:
                if index.identity == chosen["identity"]:
                    return
                created, before = index.about.get("created"), chosen["created"]
                newer = isinstance(created, float) and isinstance(before, float) and created > before
                if at.leads or newer:
                    raise self._replaced()
            self.operation.still_wanted()
            if at.leads or at.clock.now() >= ends:
                raise self._replaced()
            at.clock.sleep(0.05)

    def _check_missing(self, rows: Any, index: Source) -> list[int]:
        """Rows of the holding that the checkpoint has; the others are an error unless excused."""
        gone = [row for row in range(len(self.held)) if rows[row] < 0]
        names = list(
            dict.fromkeys(
                self.held.specs[row].name for row in gone if not self.leaves[self.owner[row]].optional
            )
        )
        self._refuse_unborn(gone, index)
        if names and self.strict:
            have = index.names()

            def say(name: str) -> str:
                near = nearest(name, have)
                return f"{name!r}" + (f" (nearest: {near!r})" if near else "")

            raise MissingTensors(
                f"{self.store.url} does not hold {len(names)} of the names in the state: {listed(names, say)}.",
                hint=f"It holds {index.tensors} names; load a part with include= or exclude=, or pass strict=False to keep "
                "present values.",
                details={"missing": names[:100]},
            )
        self.missing += names
        return [row for row in range(len(self.held)) if rows[row] >= 0]

    def _refuse_unborn(self, gone: list[int], index: Source) -> None:
        """An empty dict in the state where the checkpoint has a subtree: an optimizer before its first step.
        Passing it over would lose the moments without a word."""
        empty = [
            name
            for row in gone
            if self.leaves[self.owner[row]].value == {} and (name := self.held.specs[row].name)
        ]
        if not empty:
            return
        have = index.names()
        for name in empty:
            inside = next((other for other in have if other.startswith(name + ".")), None)
            if inside is not None:
                raise MissingTensors(
                    f"{name!r} is empty in the state, but {self.store.url} holds {inside!r} and more under it.",
                    hint="An optimizer has no state before its first step: make it have one (a step with zero gradients, or "
                    "torch.distributed.checkpoint.state_dict.get_state_dict), or leave it out with exclude=.",
                    details={"missing": [name]},
                )

    def _take(self, held: Holding, row: int, columns: Columns, tensor: int) -> None:
        """A row to fill, once what the checkpoint holds fits it."""
        spec, memory = self.held.specs[row], self.held.memory[row]
        kind, shape = int(columns.kind[tensor]), columns.shape_of(tensor)
        if spec.kind == OBJECT and kind == OBJECT:
            assert isinstance(memory, BytesMemory)
            memory.resize(shape[0])
            held.add(spec._replace(shape=shape), whole(shape), (0, 1), True, memory)
            return
        dtype, box = int(columns.dtype[tensor]), self.held.boxes[row]
        leaf = self.leaves[self.owner[row]]
        if spec.kind == TENSOR == kind and (leaf.converts or leaf.fits):
            assert isinstance(memory, TensorMemory)
            if leaf.converts and spec.dtype != dtype:
                memory = TensorMemory(memory.tensor, getattr(torch, DTYPES[dtype].name))
                spec = spec._replace(dtype=dtype)
            if leaf.fits and spec.shape != shape and len(spec.shape) == len(shape):
                spec, box, memory = _fitted(spec, box, memory, shape)
        stored = what(kind, dtype, shape)
        if spec.kind != kind or spec.shape != shape or spec.dtype != dtype:
            raise ShapeMismatch(
                f"{spec.name!r}: the checkpoint holds {stored}, the state wants {describe(spec)}.",
                hint=f"{KINDS[kind]} and {KINDS[spec.kind]} can't be exchanged."
                if spec.kind != kind
                else "Build the model as it was saved, or leave this name out with exclude=.",
                details={"tensor": spec.name},
            )
        held.add(spec, box, (0, 1), False, memory)

    def _decode(self) -> None:
        """Objects, before this rank says that it has read: one that can't be decoded fails the load everywhere."""
        rows = dict(zip(self.owner, range(len(self.owner)), strict=True))
        for owner, size in self.sizes.items():
            memory = self.held.memory[rows[owner]]
            assert isinstance(memory, BytesMemory)
            self.values[owner] = objects.decode(self.prefix + memory.value(size), self.leaves[owner].name)

    def give_back(self) -> None:
        """Objects into the state, and dicts that were made for it; tensors are there already."""
        for owner, value in self.values.items():
            self.leaves[owner].put(value)
        for leaf, born in self.born:
            leaf.put(_as_list(born) if isinstance(leaf.value, list) else born)


def _under(names: list[str], parent: str) -> tuple[int, int]:
    """Where the names under a name begin and end, among sorted ones."""
    return bisect_left(names, f"{parent}."), bisect_left(names, f"{parent}/")  # the character after the dot


def _are_parts_of_a_list(keys: list[str]) -> bool:
    """`0.lr`, `0.betas`, `1.lr`, ...: dicts, each with a number, none left out."""
    split = [key.split(".") for key in keys]
    if not keys or any(len(part) != 2 or not part[0].isdecimal() or not part[1] for part in split):
        return False
    numbers = {int(part[0]) for part in split}
    return numbers == set(range(len(numbers)))


def _as_list(parts: dict[str, Any]) -> list[Any]:
    """A list of dicts from `0.lr`, `0.betas`, `1.lr`: so torch DCP saves an optimizer's `param_groups`."""
    found: dict[int, dict[str, Any]] = {}
    for path, value in parts.items():
        number, _, key = path.partition(".")
        found.setdefault(int(number), {})[key] = value
    return [found[at] for at in sorted(found)]


def _fitted(
    spec: TensorSpec, box: Box, memory: TensorMemory, shape: Dims
) -> tuple[TensorSpec, Box, TensorMemory]:
    """The part of a shard that a stored tensor of another shape fills; the rest of it is zeroed."""
    with torch.no_grad():
        memory.tensor.zero_()
    nothing = Box((0,) * len(shape), (0,) * len(shape))
    common = box.intersect(whole(shape)) or nothing
    part = memory.tensor.detach()
    if common.volume:
        part = part[common.relative_to(box.offset).slices()]
    return spec._replace(shape=shape), common, TensorMemory(part, memory.stored)


def load(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str] | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    participants: Iterable[int] | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    timeout: float = 1800.0,
    stall_timeout: float = 120.0,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    strict: bool = True,
    options: Options | None = None,
    roster: Roster | None = None,
) -> LoadReport:
    """Load a checkpoint into a state, in place; the layout may differ from the one that saved it.

    Tensors are overwritten where they lie, objects are replaced in their dict or list, stateful
    values get their `load_state_dict`. Every byte is verified. Nothing in a checkpoint is
    executed. All participants load the same version, and if one fails all raise its error (the
    state may then be partly overwritten).

    strict: a name that the checkpoint lacks is an error; else it keeps its value and is reported.
    The other arguments are those of `save`.
    """
    store, found = open_store(the_place(path, checkpoint_id)), find_roster(roster, no_dist)
    begun = time.monotonic()
    while True:
        try:
            return load_from(
                store,
                lambda rank: flatten(state_dict, rank),
                roster=found,
                participants=participants,
                process_group=process_group,
                timeout=timeout,
                stall_timeout=stall_timeout,
                include=include,
                exclude=exclude,
                strict=strict,
                options=options,
            )
        except Replaced:  # the same on every rank: all begin anew, with the version that is there now
            if time.monotonic() - begun > timeout / 2:
                raise


def load_from(
    store: Store,
    take: Callable[[int], Flat],
    *,
    roster: Roster,
    participants: Iterable[int] | None = None,
    process_group: Any = None,
    timeout: float = 1800.0,
    stall_timeout: float = 120.0,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    strict: bool = True,
    options: Options | None = None,
    signature: object = None,
) -> LoadReport:
    """`load` from a store, into what `take(rank)` yields; what that raises is told to the other ranks.

    signature: what else tells this call from others on the same folder, the same on all ranks.
    """
    everyone = find_participants(roster, participants, process_group)
    flat, ends = Flat(), time.monotonic() + timeout
    lengths: Lengths | None = None

    def begin() -> _Work:
        operation = Operation(
            "load",
            f"load of {store.url}",
            store.url,
            None,
            (include, exclude, strict, signature, lengths is None),
            roster,
            everyone,
            None,
            max(0.1, ends - time.monotonic()),
            stall_timeout,
            LOAD_TRANSITIONS,
        )
        made = _Work(store, Holding(roster.rank), strict, options or Options(), operation)
        made.patterns = (include, exclude)
        return made

    def read() -> None:
        taken = take(roster.rank)
        flat.after = taken.after
        work.leaves = select(taken.leaves, include, exclude)
        work.held, work.owner = hold(work.leaves, roster.rank, work.operation.at.participants, for_load=True)
        if lengths is not None:
            put_in_place(work.held, lengths)

    while True:
        work = begin()
        operation = work.operation
        work.trouble = read_state(read, roster.rank)
        if lengths is None and work.trouble is None:
            work.trouble = unplaced(work.held, operation.at.title)
        try:
            operation.run(lambda: load_steps(operation.at, work), work.trouble)  # noqa: B023
            break
        except Unplaced:  # the same on every rank
            lengths = Lengths(
                f"lengths for the {operation.at.title}",
                f"{store.url}|lengths",
                roster,
                participants=everyone,
                timeout=max(0.1, ends - time.monotonic()),
                stall_timeout=stall_timeout,
            ).of(work.held, work.trouble)
            lengths.run()
    work.give_back()
    for finish in flat.after:
        try:
            finish()
        except Exception as error:
            raise LoadFailed(
                f"{operation.at.title}: all was read, but load_state_dict failed on {operation.at.who}: "
                f"{type(error).__name__}: {error}",
                rank=roster.rank,
                hint="Other ranks don't know of this.",
            ) from error
    return LoadReport(
        store.url,
        work.step,
        len(set(work.filled)),
        work.needed,
        work.bytes_read,
        operation.seconds(),
        tuple(work.missing),
    )
