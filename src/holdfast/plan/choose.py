"""Which data files make a checkpoint, when those of several attempts lie together. Pure.

A file can't stand with another that holds part of the same elements. A choice is a set of files
that covers every tensor that any of them names, exactly once. It is searched by branching on
files that conflict; two choices are enough to know that there is no telling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.errors import CoverageError
from holdfast.format.index import Array, Columns
from holdfast.plan.read import overlaps

MOST_STEPS = 20_000


@dataclass
class _Problem:
    """F files, T tensors: the elements of each tensor that each file holds, and who excludes whom."""

    held: list[dict[int, int]]
    wanted: list[int]
    excludes: list[set[int]]


def choices(files: Sequence[Columns]) -> list[list[int]]:
    """Up to two sets of files (ascending numbers) that cover every tensor exactly once."""
    problem = _problem(files)
    have = [sum(held.get(row, 0) for held in problem.held) for row in range(len(problem.wanted))]
    if any(got < want for got, want in zip(have, problem.wanted, strict=True)):
        return []
    contested = [file for file, others in enumerate(problem.excludes) if others]
    found: list[list[int]] = []
    # (files left out, elements that can still be had, next contested file)
    stack: list[tuple[frozenset[int], list[int], int]] = [(frozenset(), have, 0)]
    for _ in range(MOST_STEPS):
        if not stack or len(found) == 2:
            break
        out, left, at = stack.pop()
        if at == len(contested):
            found.append([file for file in range(len(files)) if file not in out])
            continue
        file = contested[at]
        if file in out:
            stack.append((out, left, at + 1))
            continue
        also = problem.excludes[file] - out  # if it is taken, these are not
        stack += [
            (out | gone, rest, at + 1)
            for gone in (also, {file})
            if (rest := _without(problem, left, gone)) is not None
        ]
    if stack and len(found) == 1:
        raise CoverageError(
            "There are too many sets of data files to try, so that it can't be told which is the checkpoint."
        )
    return found


def _without(problem: _Problem, left: list[int], files: set[int]) -> list[int] | None:
    """What can still be had without these files, or None if a tensor is no longer complete."""
    rest = list(left)
    for file in files:
        for row, elements in problem.held[file].items():
            rest[row] -= elements
            if rest[row] < problem.wanted[row]:
                return None
    return rest


def _problem(files: Sequence[Columns]) -> _Problem:
    rows: dict[str, int] = {}
    wanted: list[int] = []
    held: list[dict[int, int]] = []
    for columns in files:
        place = []
        for at, name in enumerate(columns.names):
            if name not in rows:
                rows[name] = len(wanted)
                wanted.append(int(np.prod(columns.shape_of(at), dtype=object)))
            place.append(rows[name])
        mine: dict[int, int] = {}
        volumes = np.prod(columns.size, axis=1).tolist()
        for row, volume in zip(columns.tensor_of_chunk().tolist(), volumes, strict=True):
            mine[place[row]] = mine.get(place[row], 0) + volume
        held.append(mine)
    return _Problem(held, wanted, _conflicts(files, rows))


def _conflicts(files: Sequence[Columns], rows: dict[str, int]) -> list[set[int]]:
    """For each file, the others that hold some of the same elements."""
    dims = max((columns.dims for columns in files), default=1)
    tensor = np.concatenate(
        [
            np.asarray([rows[name] for name in columns.names], np.int64)[columns.tensor_of_chunk()]
            for columns in files
        ]
    )
    owner = np.repeat(np.arange(len(files)), [len(columns.file) for columns in files])
    offset = np.concatenate([_wide(columns.offset, dims, 0) for columns in files])
    size = np.concatenate([_wide(columns.size, dims, 1) for columns in files])
    order = np.argsort(tensor, kind="stable")
    tensor, owner, offset, size = tensor[order], owner[order], offset[order], size[order]
    pairs = overlaps(len(rows), tensor, offset, size, tensor, offset, size)
    one, other = owner[pairs.wanted], owner[pairs.chunk]
    excludes: list[set[int]] = [set() for _ in files]
    for a, b in np.unique(np.stack([one, other], axis=1)[one != other], axis=0).tolist():
        excludes[a].add(b)
    return excludes


def _wide(values: Array, dims: int, fill: int) -> Array:
    return np.pad(values, ((0, 0), (dims - values.shape[1], 0)), constant_values=fill)
