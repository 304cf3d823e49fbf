"""Do all ranks have the same common state? megatron-core broadcasts it and warns; here ranks tell digests.

Common state is stored once, from the lowest participant; what another rank has under the same keys is lost.
So with `validate_access_integrity` each rank digests its own, as a tree: a node's digest is that of its
children's. It tells, with what it has written, a cut through the tree: the leaves, or nodes above them where
there are too many. The committer compares with its own tree, and warns in megatron-core's words. No rank
waits for this, and no save fails by it.
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
from holdfast.values import Buffer

if TYPE_CHECKING:
    from holdfast.integrations.megatron import mcore

log = logging.getLogger("holdfast")
MOST_NODES = 1 << 20
"""In the cuts of all ranks together: some ten megabytes of messages in the largest world."""
MOST_KEYS, MOST_WARNINGS = 20, 10
Path = tuple[str, ...]
_PLAIN = (bool, int, float, str, bytes, type(None))
_noted: set[str] = set()


class Node(NamedTuple):
    """A value of the common state: what identifies it, and what it consists of if it is a dict or a list."""

    digest: str
    children: dict[str, Node]


def tree(value: object) -> Node:
    """The digests of a value and of all parts of it. Dicts are equal in any order of their keys, and a list
    equals a tuple."""
    if isinstance(value, dict):
        # repr, so that 1 and "1" stay two keys, and keys of several types can be sorted.
        children = {repr(key): tree(part) for key, part in value.items()}
        return Node(_digest("dict", *(f"{key}={children[key].digest}" for key in sorted(children))), children)
    if isinstance(value, list | tuple) and not _is_long(value):
        children = {str(number): tree(part) for number, part in enumerate(value)}
        return Node(_digest("list", *(part.digest for part in children.values())), children)
    return Node(_leaf(value), {})


def _is_long(values: Sequence[object]) -> bool:
    """Are these so many plain values that they are one leaf together?"""
    return len(values) > 1024 and all(type(value) in _PLAIN for value in values)


def _digest(kind: str, *parts: str) -> str:
    # 32 bits: this warns and decides nothing, and messages of 10,000 ranks are half as long.
    return f"{digest(chr(0).join((kind, *parts)).encode(errors='surrogatepass')) & 0xFFFFFFFF:08x}"


def _leaf(value: object) -> str:
    """Numbers that are equal have one digest, whatever their type."""
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
    """By what it says of itself, unless that names a place in memory, which differs on every rank."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    text = repr(value)
    # A repr is deterministic for what is made of plain values; an address differs in each process.
    if " at 0x" not in text:
        return _digest(kind, text)
    if kind not in _noted:
        _noted.add(kind)
        log.warning("What is a %s in the common state is not compared between ranks.", kind)
    return _digest(kind)


def cut(root: Node, most: int) -> dict[Path, str]:
    """Nodes of a tree that stand for all of it: its leaves, or nodes above them where that were more than
    `most`."""
    done: dict[Path, str] = {}
    level: list[tuple[Path, Node]] = [((), root)]
    while level:
        below: list[tuple[Path, Node]] = []
        # Level by level: a large subtree must not use up the entries of its neighbours.
        for number, (path, node) in enumerate(level, 1):
            others = len(done) + len(level) - number + len(below)  # at least one entry for each
            if node.children and others + len(node.children) <= most:
                below += [((*path, key), part) for key, part in node.children.items()]
            else:
                done[path] = node.digest
        level = below
    return done


class Difference(NamedTuple):
    """Where the common state of another rank is not that of this one."""

    here: tuple[Path, ...]
    there: tuple[Path, ...]
    unequal: tuple[Path, ...]


def difference(own: Node, theirs: Mapping[Path, str]) -> Difference:
    """Compare with the cut of another rank's tree."""
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
        # The other's cut goes on below this node; where it ends, digests are compared.
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
    """The comparison of a save: each rank reads and says, the committer compares."""

    def __init__(self, preprocess: Callable[[mcore.StateDict], object] | None = None) -> None:
        self._preprocess = preprocess
        self._tree: Node | None = None
        self._said = ""

    def read(self, common: mcore.StateDict, ranks: int, normalize: Callable[[object], object]) -> None:
        """Take in this rank's common state. `ranks` is how many there are, `normalize` what is left of it to
        compare."""
        # Outside of the `try`: it is the user's, and what it raises fails the save on all ranks.
        state = self._preprocess(common) if self._preprocess is not None else common
        try:
            self._tree = tree(normalize(state))
            # The committer hears the cuts of all ranks: the more there are, the fewer nodes each may name.
            found = cut(self._tree, max(16, min(1024, MOST_NODES // ranks)))
            data = msgspec.json.encode([list(found), "".join(found.values())])
            self._said = base64.b64encode(zlib.compress(data)).decode()
        except Exception as error:  # a repr that raises, a dict that contains itself
            log.warning(
                "The common state can't be compared between ranks: %s: %s", type(error).__name__, error
            )

    def say(self) -> str:
        """What the committer is to hear of this rank's; empty if there is nothing to compare."""
        return self._said

    def compare(self, said: Mapping[int, str]) -> None:
        """On the committer: warn of every difference."""
        try:
            self._compare(said)
        except Exception as error:
            log.warning("The common state of ranks can't be compared: %s: %s", type(error).__name__, error)

    def _compare(self, said: Mapping[int, str]) -> None:
        differing: dict[str, list[int]] = {}
        for rank, text in said.items():
            # Ranks that differ mostly say the same. Each text is decoded and compared once.
            if text and text != self._said:
                differing.setdefault(text, []).append(rank)
        if self._tree is None or not differing:
            return
        ranks_of: dict[Difference, list[int]] = {}
        for text, ranks in differing.items():
            ranks_of.setdefault(difference(self._tree, _heard(text)), []).extend(ranks)
        found = sorted((sorted(ranks), what) for what, ranks in ranks_of.items() if any(what))
        for ranks, what in found[:MOST_WARNINGS]:
            log.warning("%s", _sentence(ranks, min(said), what))
        if len(found) > MOST_WARNINGS:
            others = sum(len(ranks) for ranks, _ in found[MOST_WARNINGS:])
            log.warning("Common state of %d other ranks differs in other ways.", others)


def _heard(text: str) -> dict[Path, str]:
    paths, digests = msgspec.json.decode(zlib.decompress(base64.b64decode(text)))
    return {tuple(path): digests[8 * at : 8 * at + 8] for at, path in enumerate(paths)}


def _sentence(ranks: list[int], lead: int, what: Difference) -> str:
    """megatron-core's, for several ranks at a time."""
    who = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} others" if len(ranks) > 8 else "")
    return (
        f"Rank{'s' if len(ranks) > 1 else ''} {who} common state dict differs from rank {lead} common state "
        f"dict. "
        f"Keys only on rank {lead}: {_keys(what.here)}, Keys only on {who}: {_keys(what.there)}, "
        f"Mismatched keys: {_keys(what.unequal)}"
    )


def _keys(paths: Iterable[Path]) -> str:
    shown = list(_each(paths))
    more = [f"and {len(shown) - MOST_KEYS} more"] if len(shown) > MOST_KEYS else []
    return f"[{', '.join([*shown[:MOST_KEYS], *more])}]"


def _each(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        yield f"({', '.join(path)}{',' if len(path) == 1 else ''})"
