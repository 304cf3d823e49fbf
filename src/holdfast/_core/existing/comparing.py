"""What `same` and `diff` have in common: data files are checked, elements are compared slab by slab, so that
memory stays bounded whatever the size of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import NamedTuple

import numpy as np

from holdfast._core.existing.reindex import LeftOut, look
from holdfast._core.format.columns import Array
from holdfast._core.io.raw_read import slabs
from holdfast._core.layout.box import Box
from holdfast._core.store.base import NotFound, Store
from holdfast.errors import CorruptCheckpoint


class BoxElements(NamedTuple):
    """The elements of a box in the dtype of a comparison."""

    data: Array
    """Their bytes."""
    lost: Array | None = None
    """By element, whether the cast to that dtype made it infinite or zero; None if it did so to none."""


class Difference(NamedTuple):
    """A box in which two places differ."""

    box: Box
    a: BoxElements
    b: BoxElements

    def by_element(self) -> Array:
        """Return for each element, row-major, whether it differs."""
        # By bytes, so that NaN equals itself, and -0.0 differs from 0.0.
        rows = self.box.volume
        differ: Array = (self.a.data.reshape(rows, -1) != self.b.data.reshape(rows, -1)).any(axis=1)
        for lost in (self.a.lost, self.b.lost):
            differ = differ if lost is None else differ | lost
        return differ


def differences(box: Box, itemsize: int, *reads: Callable[[Box], BoxElements]) -> Iterator[Difference]:
    """Compare a box, which `reads` read from either place. Yield the slabs that differ."""
    for part in slabs(box, itemsize):
        a, b = (read(part) for read in reads)
        if a.lost is not None or b.lost is not None or not np.array_equal(a.data, b.data):
            yield Difference(part, a, b)


def check_files(
    store: Store,
    files: Iterable[tuple[str, int]],
    embedded: bool = False,
    so: str = "can't be compared",
    hint: str = "",
) -> None:
    """Raise CorruptCheckpoint unless the data files of an index are there, of these sizes: what an index says
    of its data is true only of these files.

    embedded: read their embedded indexes too, which tell whether they are of the same save as the index.
    so, hint: what that means for the checkpoint, and what to do, in words.
    """
    for name, size in files:
        problem = ""
        try:
            with closing(store.open(name)) as reader:
                actual = reader.size
            if actual != size:
                problem = f"has {actual} bytes, but was written with {size}"
            elif embedded and isinstance(file := look(store, name, or_link=True), LeftOut):
                problem = f"is not that of the save: {file.why.rstrip('.')}"
        except NotFound:
            problem = "is missing"
        if problem:
            raise CorruptCheckpoint(
                f"{store.url} {so}: its data file {name} {problem}.",
                hint=hint or f"`holdfast verify {store.url}` shows all that is damaged.",
                details={"file": name},
            )
