"""The rest of a load: names of the state that keep their values, and stored names that no rank requests.
The committer computes it from the reports of all ranks, and sends it to all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from holdfast._core.base.values import amount
from holdfast._core.format.names import without_rank
from holdfast._core.io.renamed import mapping_that_fits
from holdfast._core.layout.tensor import counted, listed
from holdfast._core.loading.request import LoadRequest
from holdfast._core.protocol.messages import HaveRead, LoadRest
from holdfast._core.state.leaf import Leaf
from holdfast.errors import LoadFailed, MissingTensors

log = logging.getLogger("holdfast")
TOLD = 10_000
"""Maximum number of unrequested names in a report."""
KEPT = 100
"""Maximum number of names with kept values in the report of a rank."""


class Stored(NamedTuple):
    """The names of a checkpoint, for the committer. `counts` tells whether a name should be requested: scales
    and constants of a published model are read along with other tensors."""

    names: Sequence[str]
    counts: Callable[[str], bool]


def compare(
    stored: Stored, reports: dict[int, HaveRead], request: LoadRequest, leaves: Iterable[Leaf]
) -> LoadRest:
    """Committer: compute the rest of a load.

    leaves: of this rank's state.

    Raises MissingTensors if no tensor of the state was filled, and LoadFailed for values that must not be
    left unloaded: weights that `request.may_be_left` refuses, and, if strict, per-rank values of ranks that
    are not in this load.
    """
    where, names = request.store.url, stored.names
    kept = tuple(dict.fromkeys(name for report in reports.values() for name in report.kept))
    if any(report.tensors[0] for report in reports.values()) and not any(
        report.tensors[1] for report in reports.values()
    ):
        raise MissingTensors(
            f"The load of {where} fills no tensor at all: it holds {amount(len(names), 'name')}, and none of "
            f"the tensors in the state, such as {listed(kept, most=3)}.",
            hint=remedy(*renaming(kept, _unasked(stored, reports)), len(kept))
            or f"Compare the names: it holds {listed(names, most=3)}. Or give another folder.",
            details={"missing": list(kept)},
        )
    unasked = [name for name in _unasked(stored, reports) if stored.counts(name)]
    refused = [name for name in unasked if not request.may_be_left(name)]
    together = [name for name in unasked if request.left_together(name)]
    if len(together) < sum(request.left_together(name) and stored.counts(name) for name in names):
        refused += [name for name in together if request.may_be_left(name)]
    if refused:
        raise LoadFailed(
            f"No rank asks for {amount(len(refused), 'weight')} of {where}: {counted(refused)}.",
            hint="Build the model with all that is published; another strict= of "
            "holdfast.megatron.load, or install(huggingface=False), leaves such weights out.",
            details={"unasked": refused[:100]},
        )
    bases: dict[bool, set[str | None]] = {False: set(), True: set()}
    for leaf in leaves:
        if leaf.private:
            bases[leaf.optional].add(without_rank(leaf.name))
    if request.strict:
        _refuse_gone(where, [name for name in unasked if without_rank(name) in bases[False] - {None}])
    # Other ranks' values of an optional per-rank value may be dropped without a report.
    unasked = [name for name in unasked if without_rank(name) not in bases[True] - {None}]
    return LoadRest(tuple(unasked[:TOLD]), len(unasked), kept[:KEPT])


def _unasked(stored: Stored, reports: dict[int, HaveRead]) -> list[str]:
    unasked, left_out = np.ones(len(stored.names), bool), set[str]()
    for report in reports.values():
        left_out.update(report.left_out)
        for first, last in report.rows:
            unasked[first : last + 1] = False
    names = (stored.names[row] for row in np.flatnonzero(unasked).tolist())
    return [name for name in names if name not in left_out and left_out.isdisjoint(_above(name))]


def _above(name: str) -> Iterator[str]:
    """Yield what a name lies below: for `a.b.c`, `a.b.` and `a.`."""
    while dot := name.rfind(".") + 1:
        yield name[:dot]
        name = name[: dot - 1]


def _refuse_gone(where: str, gone: list[str]) -> None:
    """Raise LoadFailed for per-rank values of ranks outside this load, if this rank has a value of the same
    base name."""
    patterns = sorted({f"{name.partition('@')[0]}@*" for name in gone})
    if gone:
        raise LoadFailed(
            f"{where} holds {amount(len(gone), 'value')} of ranks that are not in this load, and would lose "
            f"them: {listed(gone)}.",
            hint="If they may go, say so: holdfast.PerRank(value, optional=True), or strict=False. If they "
            "may not, as positions in the data, give the rule that makes a rank's value from those of all: "
            f"holdfast.PerRank(value, merge=rule); holdfast.load(path, include={patterns}) shows them.",
            details={"names": gone[:100]},
        )


def renaming(missing: Sequence[str], names: Sequence[str]) -> tuple[dict[str, str], int]:
    """Return `mapping_that_fits`, without per-rank names: no rank may get the value of another one."""
    return mapping_that_fits([name for name in missing if without_rank(name) is None], names)


def remedy(mapping: dict[str, str], fits: int, missing: int) -> str:
    """Return a hint with the `rename` argument that maps stored to missing names; "" if there is none."""
    return f"holdfast.load(rename={mapping!r}) fits {fits} of these {missing} names." if mapping else ""


def warn(where: str, rest: LoadRest, total: int) -> None:
    """Log the rest of a load as a warning, in one line."""
    sentences = []
    if rest.unasked:
        sentences.append(
            f"{rest.unasked_total} of the {total} names in {where} were not loaded, because no rank asks "
            f"for them: {counted(rest.unasked)}."
        )
    if rest.kept:
        sentences.append(
            f"What {where} does not hold, or in another shape, kept its value: {counted(rest.kept)}."
        )
    if sentences:
        log.warning("%s", " ".join(sentences))
