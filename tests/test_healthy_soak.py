"""Healthy jobs at the default limits of `install()`, each late for longer than those of its kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from drill.healthy import JOBS
from drill.must_go_on import go, went_well
from drill.torchrun import launcher


@pytest.mark.soak
@pytest.mark.timeout(4000)
@pytest.mark.parametrize(
    ("name", "seconds"),
    # Longer than `lost_after` and `after_end`; the first one beyond the old crash after 674 s, too.
    [("writes", 900.0), ("gil", 130.0), ("uploads", 130.0), ("debugger", 130.0)],
)
def test_a_healthy_job_goes_on_at_the_default_limits(name: str, seconds: float, tmp_path: Path) -> None:
    with launcher() as start:
        outcome = go(start, name, "default", tmp_path / "job", seconds, 0.0, 3 * seconds + 300)
    assert went_well(JOBS[name], outcome), outcome.ended[0].said
    assert outcome.seconds > seconds
    waits = name in ("writes", "gil")  # guarded, so that the wait is told
    assert not waits or "has waited 3" in outcome.told()
