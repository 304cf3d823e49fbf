"""Agreement between ranks on replica indices of undeclared rows, and on tied weights, which must be tied on
all their holders."""

from __future__ import annotations

import logging

from holdfast._core.format import plain_objects
from holdfast._core.format.digest import digest, hex_digest
from holdfast._core.layout.tensor import OBJECT, Replica, listed
from holdfast._core.plan.agreement import disagreement
from holdfast._core.plan.shard_table import ShardTable, describe
from holdfast._core.protocol.messages import Assigned, RowList
from holdfast._core.state.tied import find_ties

log = logging.getLogger("holdfast")
_OBJECT = "the object"
"""The description of an object begins with this (`Holders._names`)."""
NOT_SAVED: Replica = (0, 0)
"""The replica of a row that is not saved, because another rank's object is. `plan_save` skips counts of 0."""


class Holders:
    """One rank's report about its rows, and the resulting replica index of each row."""

    def __init__(self, table: ShardTable) -> None:
        """Find the ties of a table, and set its `tied`."""
        self.table = table
        found, replicas = find_ties(table), table.replicas
        self.ties = {row: first for row, first in found.items() if replicas[row] != (0, 1)}
        """Rows with the memory of another row, and that row, if its other holders must have the same."""
        # An undeclared row is copied whole, so an asynchronous save has it under both names.
        table.tied = {row: first for row, first in found.items() if replicas[row] in ((0, 1), None)}

    def row_digest(self) -> str | None:
        """Return a digest of the rows without declared holders, and of the ties, or None if there are
        none."""
        keys, specs = self._to_agree_on()
        if not keys:
            return None
        # A digest in place of the list: if 10,000 ranks hold the same rows, each sends 16 characters.
        return hex_digest(digest("\0".join([*keys, *specs]).encode()))

    def list_rows(self) -> RowList:
        """Return the undeclared rows and the ties themselves, if digests differ between ranks."""
        return RowList(*self._to_agree_on())

    def _undeclared_rows(self) -> list[int]:
        return [row for row, replica in enumerate(self.table.replicas) if replica is None]

    def _to_agree_on(self) -> tuple[list[str], list[str]]:
        """Return the keys of undeclared rows, then of ties; and a description of each."""
        keys, specs = self._names(self._undeclared_rows())
        table = self.table
        for row, first in self.ties.items():
            keys.append(f"{table.specs[row].name}\0is\0{table.specs[first].name}@{table.boxes[row]}")
            specs.append("a tie")
        return keys, specs

    def _names(self, rows: list[int]) -> tuple[list[str], list[str]]:
        """Return the key of each of these rows, and a description that must be equal on all holders."""
        keys, specs = [], []
        for row in rows:
            spec, plain = self.table.specs[row], self.table.unsharded[row]
            box, late = self.table.boxes[row], self.table.deferred[row]
            # Without an offset (start -1), axis, lane and position tell one shard from another.
            part = f"{late[:3]}{box.shape}" if late is not None and late.start == -1 else box
            keys.append(spec.name if plain else f"{spec.name}@{part}")
            if spec.kind == OBJECT:
                # With its digest, so that objects that differ are found now, before everything is written.
                data = self.table.memory[row].data  # type: ignore[attr-defined]
                specs.append(f"{_OBJECT} {plain_objects.preview(data)} (digest {hex_digest(digest(data))})")
            else:
                specs.append(describe(spec))
        return keys, specs

    def agreed(self, assigned: Assigned | None) -> list[Replica]:
        """Return (index, count) of every row, including those that the committer has assigned; note which
        ties all holders of both rows have."""
        rows, tied = self._undeclared_rows(), self.table.tied
        answers: list[Replica] = []
        if assigned is not None and assigned.holders is not None:
            mine = (assigned.holders.index(self.table.rank), len(assigned.holders))
            answers = [mine] * (len(rows) + len(self.ties))
        elif assigned is not None and assigned.replicas is not None:
            answers = assigned.replicas
        of_row = dict(zip(rows, answers, strict=False))
        replicas = [
            of_row.get(row, (0, 1)) if one is None else one for row, one in enumerate(self.table.replicas)
        ]
        for (row, first), (_, count) in zip(self.ties.items(), answers[len(rows) :], strict=True):
            # Otherwise another rank would choose another writer of the row.
            if replicas[row][1] == replicas[first][1] == count:
                tied[row] = first
            else:
                tied.pop(row, None)
        return replicas


def assign(lists: dict[int, RowList], where: str, objects_may_differ: bool) -> dict[int, Assigned]:
    """Committer: choose which replica each rank holds of each row in its list."""
    holders: dict[str, list[int]] = {}
    first: dict[str, tuple[int, str]] = {}
    of_one: set[str] = set()
    # In rank order: the lowest holder is replica 0, and errors name it first.
    for rank, message in sorted(lists.items()):
        for key, spec in zip(message.keys, message.specs, strict=True):
            owner, known = first.setdefault(key, (rank, spec))
            if known == spec:
                holders.setdefault(key, []).append(rank)
            elif objects_may_differ and spec.startswith(_OBJECT) and known.startswith(_OBJECT):
                # torch DCP also saves one of several objects. Tensors that differ are an error: one of
                # them would be lost.
                of_one.add(key)
            else:
                raise disagreement(key, owner, known, rank, spec)
    if of_one:
        log.warning(
            "%s: ranks have different objects under %s; those of the lowest rank are saved.",
            where,
            listed(sorted(of_one)),
        )

    def replica(key: str, rank: int) -> Replica:
        if key in of_one:
            return (0, 1) if rank == first[key][0] else NOT_SAVED
        return holders[key].index(rank), len(holders[key])

    return {
        rank: Assigned(replicas=[replica(key, rank) for key in message.keys])
        for rank, message in lists.items()
    }
