"""The scenarios, by the names that `--only` takes, in the order of the table."""

from __future__ import annotations

from collections.abc import Callable

from drill import exits, late_group, participants, uneven, verl
from drill.results import Row

SCENARIOS: dict[str, Callable[[], list[Row]]] = {
    "verl-2238-planning": verl.planning,
    "verl-2238-late": verl.late,
    "verl-2238-never": verl.never,
    "megatron-lm-4910": uneven.run,
    "ms-swift-9486": late_group.run,
    "nemo-rl-2226": participants.run,
    "ms-swift-8385": exits.run,
}
