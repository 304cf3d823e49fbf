"""Numbers whose kind differs between the checkpoint and the state: a learning rate, or another value of a
parameter group, may be a Python number in one run and a 0-dimensional tensor in the next.

A load returns the stored kind, as `torch.load` does. A list of parameter groups without tensors is stored as
one object; with a tensor it is split into parts. If the state has parts and the checkpoint the object, the
parts are taken from the object.

A counter may also have another dtype, if the optimizer took its steps under another default dtype.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from holdfast._core.io.source import Source
from holdfast._core.layout.tensor import OBJECT, TENSOR, TensorSpec
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.state.flatten import build_shard_table
from holdfast._core.state.from_names import parents_of
from holdfast._core.state.leaf import Leaf
from holdfast.errors import MissingTensors, ShapeMismatch


def add_wholes(
    index: Source,
    leaves: list[Leaf],
    owners: list[int],
    table: ShardTable,
    gone: Sequence[int],
    everyone: tuple[int, ...],
) -> dict[int, list[int]]:
    """Add leaves, with their rows and owners, for stored objects that contain values of leaves that the
    checkpoint lacks. Return, for each added leaf, the leaves that are its parts; all by index.

    gone: the rows of `table` that the checkpoint lacks.
    """
    above = {row: [*parents_of(table.specs[row].name, 0)][-2::-1] for row in gone}  # the longest first
    names = sorted({name for some in above.values() for name in some})
    rows = index.find(names)
    stored = index.select(np.unique(rows[rows >= 0]))
    objects = {name for name, kind in zip(stored.names, stored.kind.tolist(), strict=True) if kind == OBJECT}
    parts: dict[str, list[int]] = {}
    for row, some in above.items():
        whole = next((name for name in some if name in objects), None)
        if whole is not None:
            parts.setdefault(whole, []).append(owners[row])
    new = [Leaf(name, None, _ignore, source=leaves[some[0]].source) for name, some in parts.items()]
    more, owner = build_shard_table(new, table.rank, everyone, for_load=True)
    first = len(leaves)
    owners += [first + at for at in owner]
    leaves += new
    table.extend(more)
    return {first + at: some for at, some in enumerate(parts.values())}


def _ignore(value: object) -> None:
    pass


def taken_apart(
    leaves: Sequence[Leaf], whole: int, parts: Collection[int], value: object, strict: bool
) -> dict[int, object]:
    """Take the values of leaves out of the stored object of which they are parts.

    strict: raise MissingTensors for a part that the object lacks; otherwise leave it out.
    """
    found: dict[int, object] = {}
    for part in parts:
        path = leaves[part].name[len(leaves[whole].name) + 1 :]
        try:
            found[part] = _value_at(value, path)
        except LookupError:
            if not strict:
                continue
            raise MissingTensors(
                f"The stored object {leaves[whole].name!r} has no {path!r} in it.",
                details={"missing": [leaves[part].name]},
            ) from None
    return found


def _value_at(value: object, path: str) -> object:
    if not path:
        return value
    if isinstance(value, Mapping):
        keys = {str(key): key for key in value}
        text = max((end for end in parents_of(path, 0) if end in keys), key=len, default="")
        if not text:
            raise LookupError(path)
        return _value_at(value[keys[text]], path[len(text) + 1 :])
    if isinstance(value, list | tuple):
        text, _, rest = path.partition(".")
        if text.isdecimal():
            return _value_at(value[int(text)], rest)
    raise LookupError(path)


def not_exchanged(stored: int) -> str:
    """Return the hint for a name that has another kind of value in the checkpoint than in the state."""
    return (
        f"Tensors and objects can't be exchanged: give the state {_ONE[stored]} under this name, or leave "
        "it out of the load: holdfast.load(exclude=[...])."
    )


_ONE = {TENSOR: "a tensor", OBJECT: "an object"}


def check_number(spec: TensorSpec, value: object) -> None:
    """Raise ShapeMismatch if a stored object is not a number; the state has a tensor in its place."""
    if not isinstance(value, int | float):
        raise ShapeMismatch(
            f"{spec.name!r}: the checkpoint holds an object of type {type(value).__name__}, the state "
            "wants a tensor.",
            hint=not_exchanged(OBJECT),
            details={"tensor": spec.name},
        )


def put_exactly(name: str, number: torch.Tensor, target: torch.Tensor) -> None:
    """Put a number that is stored in another dtype into a tensor of the state. Raises ShapeMismatch if the
    conversion would change its value."""
    made = number.to(target.dtype)
    given, got = number.item(), made.item()
    # Python compares int with float exactly, without rounding. NaN equals nothing.
    if given != got and (given == given or got == got):
        raise ShapeMismatch(
            f"{name!r}: the checkpoint holds {given} as {str(number.dtype)[6:]}, the state wants "
            f"{str(target.dtype)[6:]}, which would make it {got}.",
            hint="holdfast.load(cast=True) converts.",
            details={"tensor": name},
        )
    with torch.no_grad():
        target.detach().copy_(made)
