"""Arguments of public calls that are of the wrong type, told in one sentence before anything is started."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from holdfast.errors import BadInput
from holdfast.layout.grid import Grid
from holdfast.options import Options


def check_grid(grid: Any) -> None:
    """Raise BadInput for what is no grid."""
    if grid is not None and not isinstance(grid, Grid):
        raise BadInput(f"grid must be a holdfast.Grid, not {grid!r}.")


def check_options(options: Any) -> None:
    """Raise BadInput for what is no Options."""
    if not isinstance(options, Options):
        raise BadInput(f"options must be a holdfast.Options, not {options!r}.")


def check_texts(what: str, given: Any) -> None:
    """Raise BadInput unless an argument is a text, a collection of texts, or None."""
    if given is None or isinstance(given, str):
        return
    if not isinstance(given, Collection) or not all(isinstance(one, str) for one in given):
        raise BadInput(f"{what} must be a list of names or patterns, which are texts, not {given!r}.")


def check_budget(budget: Any) -> None:
    """Raise BadInput for what is no number of bytes."""
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        raise BadInput(f"host_memory_budget must be bytes from 1 on, or None, not {budget!r}.")
