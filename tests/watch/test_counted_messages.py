"""Numbers of collectives in a group over gloo that has messages, too."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast._watch import own_stacks
from holdfast._watch.collector import Collector
from holdfast._watch.dumps import operations_of
from holdfast._watch.evidence import ROLL_CALL
from holdfast._watch.own_stacks import OwnEvidence


def record(enqueued: int, done: int, *entries: tuple[int, int], backend: str = "gloo") -> dict[str, Any]:
    """A record of one group; of each entry, its number with messages, and its number."""
    return {
        "pg_status": {
            "0": {"last_enqueued_collective": str(enqueued), "last_completed_collective": str(done)}
        },
        "entries": [
            {
                "process_group": ["0", "default_pg"],
                "pg_id": 0,
                "op_id": count,
                "collective_seq_id": number,
                "profiling_name": f"{backend}:all_reduce",
                "state": "scheduled",
                "retired": count <= done,
            }
            for count, number in entries
        ],
    }


@pytest.mark.parametrize(
    ("found", "progress"),
    [
        (record(9, 6, (3, 1), (6, 2), (9, 3)), (3, 2)),
        (record(9, 6, (9, 3)), (3, 2)),  # of the others, the entries have left the record
        (record(3, -1, (3, 1)), (1, -1)),
        (record(9, 9, (3, 1), (6, 2), (9, 3)), (3, 3)),
        (record(3, 2, (1, 1), (2, 2), (3, 3)), (3, 2)),
        (record(3, 2, (6, 2), (9, 3), backend="nccl"), (3, 2)),  # which counts collectives alone
    ],
)
def test_numbers_of_a_group_over_gloo_are_those_of_its_collectives(
    found: dict[str, Any], progress: tuple[int, int]
) -> None:
    """torch's status counts messages, too, and a pipeline has as many as it has stages before and behind."""
    collector = Collector()
    operations_of(found, collector, ROLL_CALL, 0)
    (one,) = collector.evidence().ranks[0].progress
    assert (one.enqueued, one.completed) == progress


def test_a_collective_behind_messages_is_not_over_at_the_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [record(9, 6, (3, 1), (6, 2), (9, 3))]
    monkeypatch.setattr(own_stacks, "flight_records", lambda entries=False: records)
    look = OwnEvidence(0, [])
    again = look.again([], look.found.stacks)
    assert [(one.number, one.is_pending) for one in again.operations] == [(3, True), (2, False)]
    records[0] = record(15, 12, (9, 3), (12, 4), (15, 5))
    again = look.again([], look.found.stacks)
    assert [(one.enqueued, one.completed) for one in again.progress] == [(5, 4)]
    assert [(one.number, one.is_pending) for one in again.operations] == [(3, False), (2, False)]
