"""Parameters of which the suite runs some, and `make wide` the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def wide(cases: Iterable[Any], suite: Collection[Any] = ()) -> list[Any]:
    """Return parameters of a test, marked as `wide` but for those in `suite`; a case may be a tuple, or a `pytest.param`."""
    return [case if case in suite else _marked(case) for case in cases]


def _marked(case: Any) -> Any:
    values, marks, name = case if isinstance(case, type(pytest.param())) else (case, (), None)
    if type(values) is not tuple:  # a named tuple is one value
        values = (values,)
    return pytest.param(*values, marks=[*marks, pytest.mark.wide], id=name)
