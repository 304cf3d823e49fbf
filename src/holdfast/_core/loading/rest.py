"""What a load leaves: names of the state that keep their values, and names of the checkpoint that no rank
asks for. The committer compares what all ranks report, and all ranks are told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from holdfast._core.format.names import without_rank
from holdfast._core.io.renamed import mapping_that_fits
from holdfast._core.layout.tensor import listed
from holdfast._core.loading.request import LoadRequest
from holdfast._core.protocol.messages import HaveRead, Rest
from holdfast._core.state.leaf import Leaf
from holdfast.errors import LoadFailed, MissingTensors

log = logging.getLogger("holdfast")
TOLD = 10_000
"""Names that a report lists at most."""
KEPT = 100
"""Names of a rank that keep their values, of which it tells."""


class Stored(NamedTuple):
    """The names of a checkpoint, for the committer, and whether some rank should ask for one: scales and
    constants of a published model go with other tensors."""

    names: Sequence[str]
    counts: Callable[[str], bool]


def compare(
    stored: Stored, reports: dict[int, HaveRead], request: LoadRequest, leaves: Iterable[Leaf]
) -> Rest:
    """Committer: find what a load leaves.

    leaves: of this rank's state.

    Raises MissingTensors if no tensor of the state was filled, and LoadFailed for values that must not be
    left: weights that `request.may_be_left` refuses, and those of ranks that are gone.
    """
    where, names = request.store.url, stored.names
    kept = tuple(dict.fromkeys(name for report in reports.values() for name in report.kept))
    if any(report.tensors[0] for report in reports.values()) and not any(
        report.tensors[1] for report in reports.values()
    ):
        raise MissingTensors(
            f"The load of {where} fills no tensor at all: it holds {len(names)} names, and none of the "
            f"tensors in the state, such as {listed(kept, most=3)}.",
            hint=remedy(*renaming(kept, _unasked(stored, reports)), len(kept))
            or f"Compare the names: it holds {listed(names, most=3)}. Or give another folder.",
            details={"missing": list(kept)},
        )
    unasked = [name for name in _unasked(stored, reports) if stored.counts(name)]
    refused = [name for name in unasked if not request.may_be_left(name)]
    if refused:
        raise LoadFailed(
            f"No rank asks for {len(refused)} weights of {where}: {listed(refused)}.",
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
    # Of an optional value those of other ranks may go.
    unasked = [name for name in unasked if without_rank(name) not in bases[True] - {None}]
    return Rest(tuple(unasked[:TOLD]), len(unasked), kept[:KEPT])


def _unasked(stored: Stored, reports: dict[int, HaveRead]) -> list[str]:
    unasked, left_out = np.ones(len(stored.names), bool), set[str]()
    for report in reports.values():
        left_out.update(report.left_out)
        for first, last in report.rows:
            unasked[first : last + 1] = False
    names = (stored.names[row] for row in np.flatnonzero(unasked).tolist())
    return [name for name in names if name not in left_out]


def _refuse_gone(where: str, gone: list[str]) -> None:
    """Refuse to drop values of ranks that this job does not have, under names that its own ranks have."""
    patterns = sorted({f"{name.partition('@')[0]}@*" for name in gone})
    if gone:
        raise LoadFailed(
            f"{where} holds {len(gone)} values of ranks that are not in this load, and would lose them: "
            f"{listed(gone)}.",
            hint="If they may go, say so: holdfast.PerRank(value, optional=True), or strict=False. If they "
            "may not, as positions in the data, give the rule that makes a rank's value from those of all: "
            f"holdfast.PerRank(value, merge=rule); holdfast.load(path, include={patterns}) shows them.",
            details={"names": gone[:100]},
        )


def renaming(missing: Sequence[str], names: Sequence[str]) -> tuple[dict[str, str], int]:
    """Return what `mapping_that_fits` returns, but for values of one rank: none is to get another's."""
    return mapping_that_fits([name for name in missing if without_rank(name) is None], names)


def remedy(mapping: dict[str, str], fits: int, missing: int) -> str:
    """Say which renaming gives names that a checkpoint does not hold; "" if there is none."""
    return f"holdfast.load(rename={mapping!r}) fits {fits} of these {missing} names." if mapping else ""


def warn(where: str, rest: Rest, total: int) -> None:
    """Tell what a load has left, in one line."""
    sentences = []
    if rest.unasked:
        sentences.append(
            f"{rest.unasked_total} of the {total} names in {where} were not loaded, because no rank asks "
            f"for them: {listed(rest.unasked)}."
        )
    if rest.kept:
        sentences.append(
            f"What {where} does not hold, or in another shape, kept its value: {listed(rest.kept)}."
        )
    if sentences:
        log.warning("%s", " ".join(sentences))
