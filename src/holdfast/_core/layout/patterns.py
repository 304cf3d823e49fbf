"""Selection of names by shell patterns (`include`, `exclude`), compiled once for many names."""

from __future__ import annotations

import fnmatch
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import islice, takewhile

from holdfast.errors import BadInput

Patterns = tuple[Sequence[str] | None, Sequence[str] | None]
"""Shell patterns of names: (include, exclude). None: all, or none."""

_WILD = re.compile(r"[*?\[]")


class Names:
    """The names that match any of some patterns, or are in a subtree that a pattern names.

    A name is compared only with patterns whose text before the first wildcard is a prefix of the name, all in
    one regular expression.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._trees = frozenset(patterns)
        heads: dict[str, list[str]] = {}
        for pattern in self._trees:
            if _WILD.search(pattern):
                heads.setdefault(head_of(pattern), []).append(fnmatch.translate(pattern))
        self._compiled = {head: re.compile("|".join(some)) for head, some in heads.items()}
        self._lengths = sorted({*map(len, heads)})

    def __contains__(self, name: str) -> bool:
        if name in self._trees or self._below(name):
            return True
        for length in self._lengths:
            compiled = self._compiled.get(name[:length])
            if compiled is not None and compiled.match(name):
                return True
        return False

    def _below(self, name: str) -> bool:
        end = name.find(".")
        while end >= 0:
            if name[:end] in self._trees:
                return True
            end = name.find(".", end + 1)
        return False


def head_of(pattern: str) -> str:
    """Return a pattern's text before its first wildcard."""
    found = _WILD.search(pattern)
    return pattern if found is None else pattern[: found.start()]


def matches(name: str, pattern: str) -> bool:
    """Return whether a name matches a shell pattern, or lies in the subtree that the pattern names."""
    return name in _compiled((pattern,))


@lru_cache(maxsize=64)
def _compiled(patterns: tuple[str, ...]) -> Names:
    return Names(patterns)


def selector(patterns: Patterns) -> Callable[[str], bool]:
    """Return a function that tells whether a name matches `include` (None: all do) and not `exclude`."""
    include, exclude = (None if some is None else _compiled(tuple(some)) for some in patterns)
    if include is None:
        return lambda name: exclude is None or name not in exclude
    return lambda name: name in include and (exclude is None or name not in exclude)


def is_selected(name: str, patterns: Patterns) -> bool:
    """Return the result of `selector` for one name."""
    return selector(patterns)(name)


def unmatched(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the patterns that match no name and no subtree."""
    ordered = sorted(names)

    def is_matched(pattern: str) -> bool:
        head, one = head_of(pattern), Names([pattern])
        # Names that begin alike are neighbours.
        begun = islice(ordered, bisect_left(ordered, head), None)
        return any(name in one for name in takewhile(lambda name: name.startswith(head), begun))

    return [pattern for pattern in patterns if not is_matched(pattern)]


def refuse_text(**patterns: Sequence[str] | None) -> None:
    """Raise BadInput if patterns are given as a str: each of its characters would be a pattern."""
    for argument, given in patterns.items():
        if isinstance(given, str):
            raise BadInput(f"{argument} takes a list of patterns, not the text {given!r}.")
