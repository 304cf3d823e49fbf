"""What a rank asks of a checkpoint, for the committer, which finds what no rank asks for (`rest`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast._core.io.source import ForeignSource, Source
from holdfast._core.layout.patterns import selector
from holdfast._core.layout.ranks import runs
from holdfast._core.loading.boxes import are_equal
from holdfast._core.loading.plan import LoadPlan
from holdfast._core.loading.request import LoadRequest
from holdfast._core.loading.rest import Stored
from holdfast._core.protocol.operation import Operation


class AskedRows(NamedTuple):
    """What this rank asks for."""

    rows: list[tuple[int, int]]
    """Rows of the checkpoint's index, as runs."""
    left_out: list[str]
    """Names that it leaves out on purpose; one that ends with a dot is all below it."""
    stored: Stored
    """Committer: the names of the checkpoint, if unrequested ones are to be reported."""


def ask(
    source: Source, request: LoadRequest, plan: LoadPlan, merged: Sequence[int], operation: Operation
) -> AskedRows:
    """Return what this rank asks for. merged: rows of the index that were read for rules."""
    counts: Callable[[str], bool] = selector(request.patterns)
    # A skipped state of a parameter is stored as several values below its name.
    left_out = {*plan.skipped, *(f"{name}." for name in plan.lazy.skipped)}
    is_committer = operation.context.is_committer
    tells = request.tells_rest and not source.fetched_for
    if isinstance(source, ForeignSource):
        tells, counts, names = True, source.is_weight, request.left_out
        # transformers loads an output layer whose values differ from the embedding's, even if the
        # configuration says that they are tied.
        if (
            (tied := source.tied) is not None
            and is_committer
            and source.find_one(tied[0]) not in plan.found
            and not source.fetched_for
            and are_equal(request.store, source, tied, operation.tick)
        ):
            names |= {tied[0]}
        left_out |= names
    asked = sorted({*plan.found.tolist(), *merged})
    # Only the committer reads the names, and only if needed: to report unrequested ones, or for the error
    # that no tensor was filled.
    stored = Stored((), lambda name: True)
    if is_committer and ((tells and len(asked) < source.tensors) or not plan.tensors[1]):
        stored = Stored(source.names(), counts if tells else lambda name: False)
    return AskedRows(list(runs(asked)), sorted(left_out), stored)
