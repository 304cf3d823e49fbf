"""Check arguments of public calls before anything is started; what is wrong is told in one sentence."""

from __future__ import annotations

import operator
import os
from collections.abc import Collection
from contextlib import suppress

from holdfast.errors import BadInput
from holdfast.layout.grid import Grid
from holdfast.options import Options
from holdfast.store.run_folder import STEPS


def check_arguments(
    *, options: object = None, grid: object = None, host_memory_budget: object = None, **names: object
) -> None:
    """Raise BadInput for an argument that is of the wrong type.

    names: by argument, a text, a collection of texts, or None.
    """
    if options is not None and not isinstance(options, Options):
        raise BadInput(f"options must be a holdfast.Options, not {options!r}.")
    if grid is not None and not isinstance(grid, Grid):
        raise BadInput(f"grid must be a holdfast.Grid, not {grid!r}.")
    budget = host_memory_budget
    # bool is a subclass of int, but True is no number of bytes.
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        raise BadInput(f"host_memory_budget must be bytes from 1 on, or None, not {budget!r}.")
    for argument, given in names.items():
        # A single text is checked where it is used: `expected` accepts "previous", `include` refuses it.
        if given is None or isinstance(given, str):
            continue
        if not isinstance(given, Collection) or not all(isinstance(one, str) for one in given):
            raise BadInput(f"{argument} must be a list of names or patterns, which are texts, not {given!r}.")


def whole_step(step: object) -> int:
    """A step as a whole number; NumPy's and other integers count, booleans don't."""
    if not isinstance(step, bool) and hasattr(step, "__index__"):
        with suppress(TypeError):  # a tensor of several elements
            number = operator.index(step)
            if 0 <= number < STEPS:
                return number
    raise BadInput(
        f"step must be a whole number from 0 on, below {STEPS:.0e}, not {step!r}.",
        hint="Count steps; a time in nanoseconds is too large." if hasattr(step, "__index__") else "",
    )


def one_folder(
    path: str | os.PathLike[str] | None, checkpoint_id: str | os.PathLike[str] | None
) -> str | os.PathLike[str]:
    """The one folder that a call names."""
    given = path if path is not None else checkpoint_id
    if given is None or (path is not None and checkpoint_id is not None):
        raise BadInput("Give the folder once: as path, or as checkpoint_id=.")
    return given
