"""Find the tensors of a published model that no rank asks for.

Names of a state and of a published model differ, so a weight that the model on the ranks does not have, such
as a bias, would else be left out without a word.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from holdfast._format.columns import Array
from holdfast._layout.ranks import runs
from holdfast._layout.tensor import listed
from holdfast._protocol.call import Call
from holdfast._protocol.operation import agree
from holdfast._ready import ready
from holdfast._values import Json

log = logging.getLogger("holdfast")
_RowRuns = list[tuple[int, int]]
"""Runs of rows, as (first, last): 100,000 names from each rank are more than a roster should carry."""


@dataclass(frozen=True)
class Asked:
    """What this rank asks for of a published model in the folder `where`.

    names: of all its tensors. rows: of those that are asked for, ascending.
    left_out: names that this rank does not ask for on purpose; no other rank need ask for them.
    is_weight: whether a tensor counts: scales and constants, which go with other tensors, do not.
    """

    where: str
    names: Sequence[str]
    rows: Array
    left_out: frozenset[str]
    is_weight: Callable[[str], bool]

    def by_none(self, call: Call) -> tuple[str, ...]:
        """Return the weights that no rank asks for; the same on all ranks, of which the lowest logs it."""

        def choose(reports: dict[int, Json]) -> Json:
            unasked, left_out = np.ones(len(self.names), bool), set[str]()
            for report in reports.values():
                asked, more = msgspec.convert(report, ready(tuple[_RowRuns, list[str]]))
                left_out.update(more)
                for first, last in asked:
                    unasked[first : last + 1] = False
            names = ((row, self.names[row]) for row in np.flatnonzero(unasked).tolist())
            return list(runs([row for row, name in names if self.is_weight(name) and name not in left_out]))

        title = f"comparison of what ranks ask for with {self.where}"
        mine: Json = [list(runs(self.rows.tolist())), sorted(self.left_out)]
        found = msgspec.convert(agree(title, f"{self.where}|unasked", choose, call, mine), ready(_RowRuns))
        names = tuple(name for first, last in found for name in self.names[first : last + 1])
        if names and call.rank == call.participants[0]:
            log.warning(
                "%d of the %d tensors in %s were not loaded, because no rank asks for them: %s.",
                len(names),
                len(self.names),
                self.where,
                listed(names),
            )
        return names
