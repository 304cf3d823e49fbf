"""Compiled patterns select what `fnmatch` selects, one name and one pattern at a time."""

from __future__ import annotations

import fnmatch

from hypothesis import given
from hypothesis import strategies as st

from holdfast._core.layout.patterns import Names, matches, selector, unmatched

NAMES = st.lists(st.text("ab.[\n", max_size=6), max_size=8)
PATTERNS = st.lists(st.text("ab.*?[!]\n", max_size=5), max_size=6)


def by_hand(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or name.startswith(pattern + ".")


@given(NAMES, PATTERNS, PATTERNS)
def test_patterns_select_what_fnmatch_does(names: list[str], include: list[str], exclude: list[str]) -> None:
    chosen = selector((include, exclude))
    for name in names:
        taken = any(by_hand(name, pattern) for pattern in include)
        left = any(by_hand(name, pattern) for pattern in exclude)
        assert (name in Names(include)) == taken
        assert chosen(name) == (taken and not left)
        assert selector((None, exclude))(name) == (not left)
        assert all(matches(name, pattern) == by_hand(name, pattern) for pattern in include)
    assert unmatched(include, names) == [
        pattern for pattern in include if not any(by_hand(name, pattern) for name in names)
    ]
