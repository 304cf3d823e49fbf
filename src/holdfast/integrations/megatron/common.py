"""Comparison of common state between ranks, by digests. (megatron-core broadcasts the state, and warns.)

Common state is stored once, from the lowest participant; different values on other ranks are lost. So with
`validate_access_integrity` each rank digests its own as a tree: a node's digest covers the digests of its
children. With its report on what it has written, it sends a cut through the tree: the leaves, or nodes above
them where there are too many. The committer compares the cut with its own tree, and warns in megatron-core's
words. No rank waits for this, and no save fails because of it.
"""

from __future__ import annotations

import argparse
import base64
import enum
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import torch

from holdfast.format.digest import digest
from holdfast.integrations.reporting import warn_once
from holdfast.values import Buffer

if TYPE_CHECKING:
    from holdfast.integrations.megatron import mcore

log = logging.getLogger("holdfast")
MOST_NODES = 1 << 20
"""The most nodes in the cuts of all ranks together: some ten megabytes of messages in the largest world."""
MOST_KEYS, MOST_WARNINGS = 20, 10
Path = tuple[str, ...]
_PLAIN = (bool, int, float, str, bytes, type(None))


class Node(NamedTuple):
    """A value of the common state: its digest, and its parts if it is a dict or a list."""

    digest: str
    children: dict[str, Node]


def tree(value: object) -> Node:
    """Digest a value and all its parts. The order of keys does not matter, and a list equals a tuple."""
    if isinstance(value, dict):
        # repr, so that 1 and "1" stay two keys, and keys of different types can be sorted.
        children = {repr(key): tree(part) for key, part in value.items()}
        return Node(_digest("dict", *(f"{key}={children[key].digest}" for key in sorted(children))), children)
    if isinstance(value, list | tuple) and not _is_long(value):
        children = {str(number): tree(part) for number, part in enumerate(value)}
        return Node(_digest("list", *(part.digest for part in children.values())), children)
    return Node(_leaf(value), {})


def _is_long(values: Sequence[object]) -> bool:
    """Return whether these are so many plain values that they make one leaf."""
    return len(values) > 1024 and all(type(value) in _PLAIN for value in values)


def _digest(kind: str, *parts: str) -> str:
    # 32 bits are enough for a warning, and make the messages of 10,000 ranks half as long.
    return f"{digest(chr(0).join((kind, *parts)).encode(errors='surrogatepass')) & 0xFFFFFFFF:08x}"


def _leaf(value: object) -> str:
    """Digest a value without parts; equal numbers have the same digest, whatever their type."""
    if isinstance(value, enum.Enum):
        return _digest("enum", type(value).__qualname__, value.name)
    if isinstance(value, int | float):
        # 1 and 1.0 and True compare as equal in Python, so they do here.
        whole = isinstance(value, int) or value.is_integer()
        return _digest("number", repr(int(value)) if whole else repr(float(value)))
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return _digest("array", value.dtype.str, repr(value.shape), _bytes(value.tobytes()))
    if isinstance(value, argparse.Namespace):
        return _digest("namespace", tree(vars(value)).digest)
    if isinstance(value, set | frozenset):
        return _digest("set", *sorted(_leaf(part) for part in value))
    return _other(value)


def _tensor(value: torch.Tensor) -> str:
    if value.layout is not torch.strided:
        return _other(value)
    described = ("tensor", str(value.dtype), repr(tuple(value.shape)))
    if value.device.type == "meta":
        return _digest(*described)
    # As bytes: NumPy has no bfloat16 and no float8.
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return _digest(*described, _bytes(data.numpy().data))


def _bytes(data: Buffer) -> str:
    return f"{digest(data):x}"


def _other(value: object) -> str:
    """Digest a value by its repr, or by its type alone if the repr has an address in memory."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    text = repr(value)
    if " at 0x" not in text:
        return _digest(kind, text)
    warn_once(f"What is a {kind} in the common state is not compared between ranks.")
    return _digest(kind)


def cut(root: Node, most: int) -> dict[Path, str]:
    """Return the digests of nodes that cover a tree: its leaves, or nodes above them so that there are at
    most `most`."""
    done: dict[Path, str] = {}
    level: list[tuple[Path, Node]] = [((), root)]
    while level:
        below: list[tuple[Path, Node]] = []
        # Level by level, so that a large subtree does not use up the entries of its neighbours.
        for number, (path, node) in enumerate(level, 1):
            others = len(done) + len(level) - number + len(below)  # at least one entry for each
            if node.children and others + len(node.children) <= most:
                below += [((*path, key), part) for key, part in node.children.items()]
            else:
                done[path] = node.digest
        level = below
    return done


class Difference(NamedTuple):
    """The paths at which the common state of another rank differs from this one's."""

    here: tuple[Path, ...]
    there: tuple[Path, ...]
    unequal: tuple[Path, ...]


def difference(own: Node, theirs: Mapping[Path, str]) -> Difference:
    """Compare a tree with the cut of another rank's tree."""
    inner: dict[Path, set[str]] = {}
    for path in theirs:
        for depth in range(len(path)):
            inner.setdefault(path[:depth], set()).add(path[depth])
    here: list[Path] = []
    there: list[Path] = []
    unequal: list[Path] = []
    left: list[tuple[Path, Node]] = [((), own)]
    while left:
        path, node = left.pop()
        # The other rank's cut goes on below this node; where it ends, digests are compared.
        if path in inner:
            if not node.children and node.digest != _EMPTY:
                unequal.append(path)
                continue
            left += [((*path, key), part) for key, part in node.children.items()]
            there += [(*path, key) for key in inner[path] - node.children.keys()]
        elif path not in theirs:
            here.append(path)
        elif theirs[path] == _EMPTY and node.children:
            here += [(*path, key) for key in node.children]
        elif theirs[path] != node.digest:
            unequal.append(path)
    return Difference(tuple(sorted(here)), tuple(sorted(there)), tuple(sorted(unequal)))


_EMPTY = tree({}).digest


class Comparison:
    """The comparison in a save: each rank reads and encodes its cut, and the committer compares."""

    def __init__(self, preprocess: Callable[[mcore.StateDict], object] | None = None) -> None:
        self._preprocess = preprocess
        self._tree: Node | None = None
        self._cut = ""
        """This rank's cut, encoded; empty if there is nothing to compare."""

    def read(self, common: mcore.StateDict, ranks: int, normalize: Callable[[object], object]) -> None:
        """Digest this rank's common state.

        ranks: their number. normalize: removes what may differ between ranks.
        """
        # Outside of the `try`: this is the user's function, and its error fails the save on all ranks.
        state = self._preprocess(common) if self._preprocess is not None else common
        try:
            self._tree = tree(normalize(state))
            # The committer gets the cuts of all ranks: the more ranks, the fewer nodes in each cut.
            nodes = cut(self._tree, max(16, min(1024, MOST_NODES // ranks)))
            data = msgspec.json.encode([list(nodes), "".join(nodes.values())])
            self._cut = base64.b64encode(zlib.compress(data)).decode()
        except Exception as error:  # a repr that raises, a dict that contains itself
            log.warning(
                "The common state can't be compared between ranks: %s: %s", type(error).__name__, error
            )

    def say(self) -> str:
        """Return this rank's cut for the committer; empty if there is nothing to compare."""
        return self._cut

    def compare(self, cuts: Mapping[int, str]) -> None:
        """Warn of every difference; only on the committer. cuts: by rank, as `say` returns them."""
        try:
            self._compare(cuts)
        except Exception as error:
            log.warning("The common state of ranks can't be compared: %s: %s", type(error).__name__, error)

    def _compare(self, cuts: Mapping[int, str]) -> None:
        differing: dict[str, list[int]] = {}
        for rank, text in cuts.items():
            # Ranks that differ mostly have the same cut, so each text is decoded and compared once.
            if text and text != self._cut:
                differing.setdefault(text, []).append(rank)
        if self._tree is None or not differing:
            return
        ranks_of: dict[Difference, list[int]] = {}
        for text, ranks in differing.items():
            ranks_of.setdefault(difference(self._tree, _decode_cut(text)), []).extend(ranks)
        differences = sorted((sorted(ranks), what) for what, ranks in ranks_of.items() if any(what))
        for ranks, what in differences[:MOST_WARNINGS]:
            log.warning("%s", _sentence(ranks, min(cuts), what))
        if len(differences) > MOST_WARNINGS:
            others = sum(len(ranks) for ranks, _ in differences[MOST_WARNINGS:])
            log.warning("Common state of %d other ranks differs in other ways.", others)


def _decode_cut(text: str) -> dict[Path, str]:
    paths, digests = msgspec.json.decode(zlib.decompress(base64.b64decode(text)))
    return {tuple(path): digests[8 * index : 8 * index + 8] for index, path in enumerate(paths)}


def _sentence(ranks: list[int], lead: int, what: Difference) -> str:
    """Format megatron-core's warning, for several ranks at a time."""
    who = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} others" if len(ranks) > 8 else "")
    return (
        f"Rank{'s' if len(ranks) > 1 else ''} {who} common state dict differs from "
        f"rank {lead} common state dict. Keys only on rank {lead}: {_keys(what.here)}, "
        f"Keys only on {who}: {_keys(what.there)}, Mismatched keys: {_keys(what.unequal)}"
    )


def _keys(paths: Iterable[Path]) -> str:
    shown = list(_each(paths))
    more = [f"and {len(shown) - MOST_KEYS} more"] if len(shown) > MOST_KEYS else []
    return f"[{', '.join([*shown[:MOST_KEYS], *more])}]"


def _each(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        yield f"({', '.join(path)}{',' if len(path) == 1 else ''})"
