"""A source whose tensors are renamed, to load a checkpoint that was saved with other names by another program
or another version of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias

import numpy as np

from holdfast._core.base.values import shortened, told
from holdfast._core.format.columns import Array, Columns, counts_of
from holdfast._core.io.source import ForeignSource, Source
from holdfast._core.plan.merge import reordered
from holdfast.errors import BadInput

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str]
"""A mapping from names or subtrees in a checkpoint to those in the state; or a function for one name."""


def check_rename(rename: object) -> None:
    """Raise BadInput unless it is a mapping of text to text, a function, or None."""
    texts = isinstance(rename, Mapping) and all(
        isinstance(text, str) for pair in rename.items() for text in pair
    )
    if not (rename is None or callable(rename) or texts):
        raise BadInput(
            f"rename must map names of the checkpoint to those of the state, as texts or by a function, not "
            f"{shortened(repr(rename))}.",
            hint="rename={'module': 'model'} makes module.w model.w; rename={'module': ''} makes it w.",
        )


_LOOKED_AT, _TRIED = 20_000, 20
"""Limits of the search for a fitting renaming: stored names, and wanted names and their candidates."""


class Renamed:
    """A source whose tensors are renamed and sorted by their new names."""

    def __init__(self, source: Source, rename: Rename) -> None:
        """Raises BadInput if two tensors get one name, or if a name in the mapping is not there."""
        if isinstance(source, ForeignSource):
            raise BadInput(
                f"rename can't be used for {source.where}: names of a published model are mapped already."
            )
        self._source = source
        self.where, self.identity, self.about = source.where, source.identity, source.about
        self.object_prefix, self.fetched_for = source.object_prefix, source.fetched_for
        given = source.names()
        new = (
            _by_mapping(given, rename, self.where)
            if isinstance(rename, Mapping)
            else _by_function(given, rename)
        )
        for name, other in zip(given, new, strict=True):
            if not isinstance(other, str) or not other:
                raise BadInput(f"rename makes {other!r} of {name!r}, which is no name.")
        self._order: Array = np.asarray(sorted(range(len(new)), key=new.__getitem__), np.int64)
        self._names = [new[row] for row in self._order.tolist()]
        self._row = {name: row for row, name in enumerate(self._names)}
        if len(self._row) < len(new):
            first: dict[str, str] = {}
            for name, other in zip(given, new, strict=True):
                if first.setdefault(other, name) != name:
                    raise BadInput(f"rename makes {other!r} of both {first[other]!r} and {name!r}.")

    @property
    def tensors(self) -> int:
        return len(self._names)

    @property
    def bytes_read(self) -> int:
        return self._source.bytes_read

    def names(self) -> list[str]:
        return self._names

    def find(self, wanted: Sequence[str]) -> Array:
        return np.fromiter(map(self.find_one, wanted), np.int64, len(wanted))

    def find_one(self, name: str) -> int:
        return self._row.get(name, -1)

    def select(self, rows: Array | None = None) -> Columns:
        rows = np.arange(len(self._names)) if rows is None else rows
        inner = self._order[rows]
        columns = self._source.select(np.sort(inner))
        names = [self._names[row] for row in rows.tolist()]
        return _permuted(columns, np.argsort(np.argsort(inner)), names)


def mapping_that_fits(wanted: Sequence[str], names: Sequence[str]) -> tuple[dict[str, str], int]:
    """Return the renaming of one subtree of a checkpoint that yields the most wanted names, and their number;
    an empty mapping if no renaming yields more than half of them.

    names: names of the checkpoint that no other part of the state uses. Only some names are examined, because
        the result is a hint in an error message.
    """
    by_end: dict[str, list[list[str]]] = {}
    for name in names[:_LOOKED_AT]:
        parts = name.split(".")
        by_end.setdefault(parts[-1], []).append(parts)
    votes = Counter[tuple[str, str]]()
    for name in wanted[:_TRIED]:
        parts, found = name.split("."), set[tuple[str, str]]()
        for theirs in by_end.get(parts[-1], ()):
            common = 1
            while common < min(len(parts), len(theirs)) and parts[-common - 1] == theirs[-common - 1]:
                common += 1
            found.add((".".join(theirs[:-common]), ".".join(parts[:-common])))
        votes.update(found)
    have, best, most = set(names), dict[str, str](), 0
    for (theirs_head, head), _ in votes.most_common(_TRIED):
        made = [moved(name, head, theirs_head) for name in wanted]
        fits = sum(name in have for name in made if name is not None)
        if theirs_head != head and fits > most:
            best, most = {theirs_head: head}, fits
    return (best, most) if 2 * most > len(wanted) else ({}, 0)


def moved(name: str, head: str, other: str) -> str | None:
    """Return a name with the subtree `head` replaced by `other`; None if the name is not within `head`."""
    if head and name != head and not name.startswith(head + "."):
        return None
    return ".".join(filter(None, (other, name[len(head) :].lstrip(".") if head else name)))


def _by_function(names: list[str], rename: Callable[[str], str]) -> list[str]:
    new = []
    for name in names:
        try:
            new.append(rename(name))
        except Exception as error:
            raise BadInput(
                f"The function rename= failed for {name!r}: {told(error)}",
                hint="It is called with each name of the checkpoint, also with those that the state lacks.",
            ) from error
    return new


def _by_mapping(names: list[str], rename: Mapping[str, str], where: str) -> list[str]:
    unused, new = set(rename), []
    for name in names:
        # The longest matching subtree, because the more specific rule has precedence.
        parts = name.split(".")
        ends = (".".join(parts[:count]) for count in range(len(parts), -1, -1))
        old = next((end for end in ends if end in rename), None)
        if old is None:
            new.append(name)
            continue
        unused.discard(old)
        rest = name[len(old) :].lstrip(".") if old else name
        new.append(".".join(filter(None, (rename[old], rest))))
    if unused:
        raise BadInput(
            f"rename: {where} holds no name {min(unused)!r}, and none below it; the first is "
            f"{names[0] if names else ''!r}."
        )
    return new


def _permuted(columns: Columns, order: Array, names: list[str]) -> Columns:
    """Return columns of tensors in another order, with their chunks and digests, under other names."""
    counts = counts_of(columns.chunk_end)
    chunk = reordered(np.arange(len(columns.file)), counts, order)
    digest_counts = counts_of(columns.digest_end)
    made: dict[str, Any] = {
        "names": names,
        "chunk_end": np.cumsum(counts[order], dtype="<i8"),
        "digest_end": np.cumsum(digest_counts[chunk], dtype="<i8"),
        "digests": reordered(columns.digests, digest_counts, chunk)
        if len(columns.digests)
        else columns.digests,
    }
    by = {"T": order, "C": chunk}
    for one in fields(Columns):
        if one.name not in made:
            value, spec = getattr(columns, one.name), one.metadata.get("spec")
            rows = by.get(spec.rows) if spec is not None else None
            made[one.name] = value if rows is None or not len(value) else value[rows]
    return Columns(**made)
