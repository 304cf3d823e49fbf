"""Random access to a checkpoint without a state: names, shapes, dtypes, and any part of any tensor."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from types import EllipsisType
from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy as np
import torch

from holdfast._core.base.values import Json, amount
from holdfast._core.format import objects
from holdfast._core.format.columns import Array, tied_rows
from holdfast._core.format.limits import bounded_memory
from holdfast._core.io.missing_files import reading
from holdfast._core.io.open_checkpoint import open_source
from holdfast._core.io.renamed import Rename, Renamed, check_rename
from holdfast._core.io.source import Source
from holdfast._core.layout.box import Box, whole
from holdfast._core.layout.patterns import Patterns, refuse_text, selector, unmatched
from holdfast._core.layout.tensor import (
    OBJECT,
    TensorSpec,
    dtype_code,
    listed,
    nearest,
)
from holdfast._core.loading.boxes import Wanted, fill_boxes, read_boxes
from holdfast._core.state.from_names import with_extra_states
from holdfast._core.state.live import State
from holdfast._core.state.memory import torch_dtype
from holdfast._core.state.structure import nest
from holdfast._core.store.base import Folder
from holdfast._core.store.local import open_store
from holdfast._core.store.pins import Pin
from holdfast.errors import BadInput, MissingTensors

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

Index = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]


class StoredTensor:
    """A tensor in a checkpoint. Indexing reads and verifies its elements.

    w = ckpt["model.weight"]
    w.shape, w.dtype       # nothing is read
    w[3:5], w[..., 0]      # torch tensors; only the blocks that hold them are read
    w[...], np.asarray(w)  # all of it
    """

    def __init__(self, checkpoint: StoredCheckpoint, spec: TensorSpec) -> None:
        self._checkpoint, self.spec = checkpoint, spec

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.spec.shape)

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.spec.dtype)

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def __len__(self) -> int:
        if not self.spec.shape:
            raise TypeError(f"{self.name!r} has no dimensions, so it has no length.")
        return self.spec.shape[0]

    def __getitem__(self, index: Index) -> torch.Tensor:
        """Read a part. Takes integers, slices with positive steps, and `...`; returns a torch tensor."""
        box, steps = _box(index, self.spec)
        return self._checkpoint.read_boxes([Wanted(self.spec, box, self.spec.dtype)])[0][steps]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError(f"{self.name!r} is read from storage, so there is nothing to share.")
        return np.asarray(self[...].numpy(), dtype=dtype)

    def __repr__(self) -> str:
        return f"StoredTensor({self.name!r}, {str(self.dtype)[6:]}{list(self.spec.shape)})"


class StoredCheckpoint(Mapping[str, Any]):
    """A checkpoint of Holdfast, torch DCP or megatron-core, or a model in Hugging Face's format.

    A mapping from names, in checkpoint order, to a `StoredTensor` or the value of an object. It reads on this
    process alone and keeps the index open until `close` or garbage collection. Until then, on storage with
    file locks and on object stores that it may write to, neither `keep=` nor `prune` removes the step.
    """

    def __init__(self, path: Folder, rename: Rename | None = None) -> None:
        check_rename(rename)
        self._store = open_store(path)
        with ExitStack() as opened:
            self._pin = Pin(self._store)
            opened.callback(self._pin.let_go)  # a finalizer must not wait for storage
            self._source: Source = opened.enter_context(open_source(self._store))
            if rename is not None:
                self._source = Renamed(self._source, rename)
            self._names = self._source.names()
            self._close = finalize(self, opened.pop_all().close)

    @property
    def path(self) -> str:
        return self._store.url

    @property
    def step(self) -> int | None:
        """The `step` argument of the save."""
        step = self._source.about.get("step")
        return step if isinstance(step, int) else None

    @property
    def notes(self) -> Json:
        """The `notes` argument of the save."""
        return self._source.about.get("notes")

    @property
    def metrics(self) -> dict[str, float | None]:
        """The `metrics` of `Checkpoints.save`; None in place of non-finite numbers."""
        metrics = self._source.about.get("metrics")
        return metrics if isinstance(metrics, dict) else {}

    @cached_property
    def _row(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self._names)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._row

    def __getitem__(self, name: str) -> Any:
        """Return a StoredTensor, or the value of an object. KeyError if there is no such name."""
        if name not in self._row:
            near = nearest(str(name), self._names)
            raise KeyError(f"{self.path} does not hold {name!r}" + (f"; nearest: {near!r}" if near else ""))
        [spec] = self.specs([name])
        if spec.kind != OBJECT:
            return StoredTensor(self, spec)
        return self.decoded(name, self.encoded([name])[name])

    def encoded(self, names: Iterable[str]) -> dict[str, bytes]:
        """Read objects, all at once, in the form that `decoded` takes."""
        specs, prefix = self.specs(names), self._source.object_prefix
        with bounded_memory(f"An object of {self.path}"):
            contents = self.read_boxes([Wanted(spec, whole(spec.shape), spec.dtype) for spec in specs])
            return {
                spec.name: prefix + data.numpy().tobytes() for spec, data in zip(specs, contents, strict=True)
            }

    def decoded(self, name: str, data: bytes) -> object:
        """Return the value of an object. LoadFailed if its type is not allowed."""
        with bounded_memory(f"The object {name!r} of {self.path}"):
            return objects.decode(data, name)

    def read(self, prefix: str = "", dtype: torch.dtype | None = None) -> State:
        """Read all values below a prefix, with the prefix removed from their names, as for
        `Module.load_state_dict`.

            model.load_state_dict(holdfast.open("run/step-100").read("model"))

        A dict that a module's `get_extra_state` has returned is one value. So is a list with tensors in it.

        prefix: `model` selects the names that begin with `model.`.
        dtype: convert floating-point tensors to this dtype, except those without dimensions, which are
            counters. None: as stored.
        Raises MissingTensors if there is no name below the prefix.
        """
        start = f"{prefix}." if prefix else ""
        names = [name for name in self._names if name.startswith(start)]
        if prefix and not names:
            raise MissingTensors(
                f"{self.path} holds no name below {prefix!r}.",
                hint=f"It holds {amount(len(self), 'name')}, for example {listed(self._names[:3])}.",
            )
        values = {name[len(start) :]: value for name, value in self._values(names, dtype).items()}
        return with_extra_states(values)

    def nested(self, patterns: Patterns, dtype: torch.dtype | None, lazy: bool) -> State:
        """Read the values that patterns select, as nested dicts (`holdfast.load` without a state).

        dtype: as of `read`. lazy: tensors as StoredTensor.
        """
        refuse_text(include=patterns[0], exclude=patterns[1])
        for pattern in unmatched([*(patterns[0] or ()), *(patterns[1] or ())], self._names):
            raise BadInput(f"{self.path} holds no name that matches {pattern!r}.")
        names = list(filter(selector(patterns), self._names))
        if lazy and dtype is not None:
            raise BadInput(f"cast={dtype} is for tensors that are read at once, so not with lazy=True.")
        return nest(self._values(names, dtype, lazy))

    def _values(self, names: Sequence[str], dtype: torch.dtype | None, lazy: bool = False) -> State:
        # All at once: each selection reads and verifies parts of the index.
        specs, tied = self._described(names)
        tensors = [spec for spec in specs if spec.kind != OBJECT and spec.name not in tied]
        made: Sequence[StoredTensor | torch.Tensor]
        if lazy:
            made = [StoredTensor(self, spec) for spec in tensors]
        else:
            made = self.read_boxes([Wanted(spec, whole(spec.shape), _code(spec, dtype)) for spec in tensors])
        found = dict(zip([spec.name for spec in tensors], made, strict=True))
        encoded = self.encoded(spec.name for spec in specs if spec.kind == OBJECT)
        return {
            spec.name: self.decoded(spec.name, encoded[spec.name])
            if spec.kind == OBJECT
            else found[tied.get(spec.name, spec.name)]
            for spec in specs
        }

    def specs(self, names: Iterable[str]) -> list[TensorSpec]:
        """Return dtype, shape and kind of each of these names, in the order of the checkpoint."""
        return self._described(names)[0]

    def _described(self, names: Iterable[str]) -> tuple[list[TensorSpec], dict[str, str]]:
        """Return `specs`, and of each tied weight the name that it is read under."""
        rows = np.asarray(sorted({self._row[name] for name in names}), np.int64)
        columns = self._source.select(rows)
        specs = columns.specs()
        return specs, {specs[row].name: specs[first].name for row, first in tied_rows(columns).items()}

    def read_boxes(self, boxes: Sequence[Wanted]) -> list[torch.Tensor]:
        """Read boxes of tensors, all at once."""
        with self._reading():
            return read_boxes(self._store, self._source, boxes)[0]

    def fill(self, boxes: Sequence[Wanted], targets: Sequence[torch.Tensor]) -> None:
        """Read boxes of tensors into others of their shapes, all at once."""
        with self._reading():
            fill_boxes(self._store, self._source, boxes, targets)

    def _reading(self) -> AbstractContextManager[None]:
        return reading(self._store, self._source.identity, self._pin)

    def close(self) -> None:
        """Close the index. Later reads fail."""
        self._close()
        self._pin.close()

    def __enter__(self) -> StoredCheckpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"StoredCheckpoint({self.path!r}, {amount(len(self), 'name')})"


def open(path: Folder) -> StoredCheckpoint:  # noqa: A001
    """Open a checkpoint to inspect it and read parts of it, without a state, ranks or a process group.

    path: the folder, or a store, of one checkpoint of Holdfast, torch DCP or megatron-core, or of a model in
        Hugging Face's format.

    Every byte is verified. Nothing in a checkpoint is executed. Raises NotCommitted if there is no
    checkpoint.
    """
    return StoredCheckpoint(path)


def _code(spec: TensorSpec, wanted: torch.dtype | None) -> int:
    if wanted is None:
        return spec.dtype
    if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
        raise BadInput(
            f"The dtype to cast to must be a torch.dtype of floating-point numbers, not {wanted!r}.",
            hint="For example torch.bfloat16.",
        )
    # A tensor without dimensions is a counter, as an optimizer's `step`: bfloat16 counts to 256.
    if not torch_dtype(spec.dtype).is_floating_point or not spec.shape:
        return spec.dtype
    return dtype_code(str(wanted)[6:], "The result")


def _box(index: Index, spec: TensorSpec) -> tuple[Box, tuple[int | slice, ...]]:
    """Return the box that holds all elements of an index, and the index of them in it."""
    given = index if isinstance(index, tuple) else (index,)
    dots = sum(part is Ellipsis for part in given)
    missing = len(spec.shape) - len(given) + dots
    if dots > 1 or missing < 0:
        raise BadInput(f"{spec.name!r} has {len(spec.shape)} dimensions; the index {index!r} has more.")
    at = next((i for i, part in enumerate(given) if part is Ellipsis), len(given))
    parts = [*given[:at], *[slice(None)] * missing, *given[at + 1 :]]
    offset, shape, steps = [], [], list[int | slice]()
    for part, size in zip(parts, spec.shape, strict=True):
        if isinstance(part, slice):
            start, stop, step = part.indices(size)
            if step < 1:
                raise BadInput(
                    f"The index {index!r} of {spec.name!r} has a step of {step}; steps begin at 1."
                )
            steps.append(slice(None, None, step))
        else:
            start = _whole_number(part, index, spec.name)
            if not -size <= start < size:
                raise IndexError(
                    f"{spec.name!r} has the shape {list(spec.shape)}; {index!r} lies outside it."
                )
            start %= size
            stop = start + 1
            steps.append(0)
        offset.append(start)
        shape.append(max(stop - start, 0))
    return Box(tuple(offset), tuple(shape)), tuple(steps)


def _whole_number(part: object, index: object, name: str) -> int:
    if not isinstance(part, bool) and hasattr(part, "__index__"):
        try:
            return operator.index(part)
        except TypeError:  # a tensor or an array of several elements
            pass
    raise BadInput(f"The index {index!r} of {name!r} must be made of whole numbers, slices and `...`.")
